"""The starting point is the trouble: all weights zero or equal, so that all units learn the same; weights
much too large or too small; a first loss far from that of a guess."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
for layer in (model[0], model[2]):
    nn.init.zeros_(layer.weight)  # fix: nn.init.xavier_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for step in range(150):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
