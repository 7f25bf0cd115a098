"""An operation gets finite numbers and gives NaN or Inf, and it reaches the loss: log of 0, 0/0, the root of a
negative number, exp of a large one, the softmax of a row that is masked everywhere."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(60):
    x = torch.randn(32, 8)
    counts = torch.poisson(F.softplus(x.sum(1, keepdim=True)))
    rate = F.relu(model(x))  # fix: rate = F.softplus(model(x))
    loss = (rate - counts * rate.log()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
