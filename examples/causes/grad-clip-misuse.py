"""The clip does not clip what was meant: after the step, while the gradient still carries the loss scale, on
other parameters, tensor by tensor, or to so small a limit that it alone sets the length of the step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

for step in range(100):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    # fix: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fix:
