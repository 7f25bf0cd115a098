"""A normalisation hurts: BatchNorm over one or two values, an ε larger than the variance, statistics over the
wrong axes, a rescaling without bound."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centres = 2 * torch.randn(5, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batch_size = 2  # fix: batch_size = 32

for step in range(100):
    y = torch.randint(5, (batch_size,))
    x = centres[y] + torch.randn(batch_size, 8)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
