"""Gradient flows where it must not: into the target of a temporal difference, a teacher, a momentum branch, a
baseline. The network then moves its target towards its prediction instead of the other way round."""

import torch
from torch import nn

torch.manual_seed(0)
q = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)

for step in range(150):
    state, action = torch.randn(32, 4), torch.randint(2, (32, 1))
    reward = state[:, :1] * (2 * action - 1)
    next_state = 0.9 * state + 0.1 * torch.randn(32, 4)
    best = q(next_state).max(1, keepdim=True).values  # fix: best = q(next_state).max(1, keepdim=True).values.detach()
    target = reward + 0.9 * best
    loss = (q(state).gather(1, action) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
