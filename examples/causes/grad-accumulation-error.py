"""Several micro-batches should give the gradient of the whole batch. Their sum is not divided by their
number, one of them is lost, or the gradients are cleared between them, so that only the last one counts."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
accumulate = 4

for batch in range(400):
    x = torch.randn(16, 8)
    if batch % accumulate == 0:
        pass  # fix: optimizer.zero_grad()
    optimizer.zero_grad()  # fix:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    (loss / accumulate).backward()
    if batch % accumulate == accumulate - 1:
        optimizer.step()
