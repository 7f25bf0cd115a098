"""The optimizer is set up wrongly: a weight decay that outweighs the gradient, momentum or β out of range, an
ε larger than the gradients, the learning rates of two groups swapped."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
decay = 30.0  # fix: decay = 0.01
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)

for step in range(150):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
