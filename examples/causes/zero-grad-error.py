"""`backward` adds to the gradients that are there. Without `zero_grad` every step uses the sum of all
gradients so far; with `zero_grad` between `backward` and `step` the optimizer sees nothing."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    # fix: optimizer.zero_grad()
    loss.backward()
    optimizer.step()
