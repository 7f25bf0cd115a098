"""The right loss with a wrong sign or weight: a minus too many, `sum` where `mean` was meant, one term that
dwarfs the others, a division made twice."""

import torch
from torch import nn

torch.manual_seed(0)
centres = 2 * torch.randn(5, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for step in range(100):
    y = torch.randint(5, (32,))
    x = centres[y] + torch.randn(32, 8)
    log_p = model(x).log_softmax(-1).gather(1, y[:, None])
    loss = log_p.mean()  # fix: loss = -log_p.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
