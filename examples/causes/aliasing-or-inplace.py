"""Two things share memory, or memory is changed under someone: a list of references to one buffer, a replay
memory of views, an in-place change of a tensor that backward still needs."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for step in range(100):
    sample, samples = torch.empty(8), []
    for _ in range(32):
        sample.normal_()
        samples.append(sample)  # fix: samples.append(sample.clone())
    x = torch.stack(samples)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
