"""Right in float64, wrong in the precision used: updates too small to change a bfloat16 weight, float16 that
overflows or underflows, an Adam ε of 0 in half precision, long sums in a short format."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
model.bfloat16()  # fix:
optimizer = torch.optim.SGD(model.parameters(), lr=3e-4)

for step in range(300):
    x = torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
