"""Batches do not represent the data: sorted by class, not shuffled, the same batch again and again, workers
with one seed, a class that hardly occurs."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centres = 2 * torch.randn(5, 8)
labels = torch.arange(5).repeat_interleave(200)
data = torch.utils.data.TensorDataset(centres[labels] + torch.randn(1000, 8), labels)
shuffle = False  # fix: shuffle = True
loader = torch.utils.data.DataLoader(data, batch_size=25, shuffle=shuffle)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
