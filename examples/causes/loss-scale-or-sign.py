"""The right loss with a wrong sign or weight: a minus too many, `sum` where `mean` was meant, one term that
dwarfs the others, a division made twice."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centres = 2 * torch.randn(5, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(100):
    y = torch.randint(5, (32,))
    x = centres[y] + torch.randn(32, 8)
    loss = -F.cross_entropy(model(x), y)  # fix: loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
