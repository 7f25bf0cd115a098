"""Weights or optimizer state are not what they should be: `state_dict()` kept by reference, so that the best
weights go on training; a checkpoint whose keys do not fit; an optimizer state that is not restored."""

# fix: import copy
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
best, best_loss = None, float("inf")

for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    if loss.item() < best_loss:
        best_loss = loss.item()
        best = model.state_dict()  # fix: best = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.load_state_dict(best)
