"""The steps are far too short to get anywhere: the learning rate is too small, or something keeps the steps
short, such as a clip or a schedule."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
lr = 1e-5  # fix: lr = 1e-2
optimizer = torch.optim.Adam(model.parameters(), lr=lr)

for step in range(150):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
