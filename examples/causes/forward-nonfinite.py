"""An operation gets finite numbers and gives NaN or Inf, and it reaches the loss: log of 0, 0/0, the root of
a negative number, exp of a large one, the softmax of a row that is masked everywhere."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(60):
    counts = torch.poisson(torch.full((32, 8), 4.0))
    features = counts.log()  # fix: features = counts.log1p()
    loss = (model(features) - counts.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
