"""Units that never respond: ReLUs whose input is negative for every sample, saturated sigmoids and tanhs,
clamped outputs. No gradient comes through them, so nothing brings them back."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
nn.init.constant_(model[0].bias, -10.0)  # fix: nn.init.zeros_(model[0].bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
