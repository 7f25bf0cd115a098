"""A path that should carry gradient is cut: by `detach`, `.data`, `.item()`, `no_grad`, `argmax`, or by a
round trip through NumPy or `torch.tensor`. What lies before the cut stays as it was."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x):
        h = torch.relu(self.encoder(x))
        return self.head(h.detach())  # fix: return self.head(h)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.square().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
