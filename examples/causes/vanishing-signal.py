"""Activations or gradients die out on their way: stacks of sigmoids, a recurrent gain below 1, tiny initial
weights, gates that stay shut. The first layers then hardly move."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(32, 32)

    def forward(self, x):
        return torch.sigmoid(self.f(x))  # fix: return x + torch.tanh(self.f(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(150):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
