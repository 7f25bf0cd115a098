"""Each step jumps over the place it aims at: the learning rate is too large, warmup is missing, or the batch
is smaller than the one that the learning rate was chosen for."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
lr = 1.5  # fix: lr = 0.05
optimizer = torch.optim.SGD(model.parameters(), lr=lr)

for step in range(150):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
