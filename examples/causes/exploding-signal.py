"""Activations or gradients grow through depth or time until steps go wild: residual branches that add up
without a normalisation, a recurrent gain above 1, initial weights that multiply."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()  # fix: self.norm = nn.LayerNorm(32)
        self.f = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.relu(self.f(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.blocks = nn.Sequential(*(Block() for _ in range(24)))

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
