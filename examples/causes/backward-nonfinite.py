"""Everything is finite on the way to the loss, and the way back is not: the derivative of a root is infinite
at 0, and 0 · Inf is NaN. Typical places are distances, norms, `pow` below 1 and both branches of
`torch.where`."""

import torch
from torch import nn

torch.manual_seed(0)
embed = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(embed.parameters(), lr=1e-3)

for step in range(60):
    points = torch.randn(16, 8)
    wanted = (points[:, None] - points[None]).norm(dim=-1)
    z = embed(points)
    squares = (z[:, None] - z[None]).square().sum(-1)  # 0 on the diagonal
    distances = squares.sqrt()  # fix: distances = (squares + 1e-12).sqrt()
    loss = (distances - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
