"""Rings told apart by a small network, with an optimizer of our own to see how it works."""

import math

import torch
import torch.nn as nn

torch.manual_seed(5)


class Adam:
    """Kingma and Ba, as in the paper."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.params = [p for p in params if p.requires_grad]
        self.lr, self.betas, self.eps = lr, betas, eps
        self.t = 0
        self.m = {i: torch.zeros_like(p) for i, p in enumerate(self.params)}
        self.v = {i: torch.zeros_like(p) for i, p in enumerate(self.params)}

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for i, p in enumerate(self.params):
            self.m[i].mul_(b1).add_(p.grad, alpha=1 - b1)
            self.v[i].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            m_hat = self.m[i] / (1 - b1**self.t)
            v_hat = self.v[i] / (1 - b2**self.t)
            p -= self.lr * m_hat / (v_hat.sqrt() + self.eps)


class Rings(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.mid1 = nn.Linear(width, width)
        self.mid2 = nn.Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        x = x + torch.relu(self.mid1(x))
        x = x + torch.relu(self.mid2(x))
        return self.out(x)


ring = torch.randint(0, 3, (1500,))
angle = torch.rand(1500) * 2 * math.pi
radius = 0.5 + 0.6 * ring + 0.12 * torch.randn(1500)
points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
train_x, train_y, test_x, test_y = points[:1200], ring[:1200], points[1200:], ring[1200:]

model = Rings()
optimizer = Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(24):
    order = torch.randperm(len(train_x))
    for rows in order.split(50):
        loss = criterion(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 4 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")

with torch.no_grad():
    logits = model(test_x)
    print(f"test loss {criterion(logits, test_y).item():.4f}", end=" ")
    print(f"test acc {(logits.argmax(1) == test_y).float().mean().item():.4f}")
