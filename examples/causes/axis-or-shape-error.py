"""The wrong axis, silently broadcast or reshaped: [N] against [N, 1], which makes N × N differences; a
softmax or mean over the batch; `view` where `transpose` was meant; a sequence given batch first to a layer
that wants it second."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(100):
    x = torch.randn(32, 8)
    y = x.sum(1)
    difference = model(x) - y  # fix: difference = model(x).squeeze(1) - y
    loss = difference.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
