"""Fit a curve with full-batch L-BFGS, whose step calls a closure several times."""

import torch
import torch.nn as nn

torch.manual_seed(6)
x = torch.linspace(-3, 3, 200)[:, None]
y = torch.sin(2 * x) + 0.3 * x + 0.05 * torch.randn_like(x)

net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.LBFGS(
    net.parameters(), lr=0.5, max_iter=10, history_size=20, line_search_fn="strong_wolfe"
)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss


for step in range(60):
    loss = optimizer.step(closure)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
print(f"final loss {closure().item():.5f}")
