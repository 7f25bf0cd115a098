"""Gradual training: for some steps a part of the network gets no gradient; the step is kept as a compiled function."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Compiled(torch.optim.Adam):
    """Adam whose update of each parameter is traced once and kept for the next steps."""

    traced = None

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        want = [p.grad is not None for p in held]
        if self.traced != want:
            self.traced = want
        kept = [p.grad for p in held]
        for p, updates in zip(held, self.traced, strict=True):
            if not updates:
                p.grad = None
        super().step()
        for p, gradient in zip(held, kept, strict=True):
            p.grad = gradient


centres = torch.randn(4, 16)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = Compiled(model.parameters(), lr=1e-3)
for step in range(200):
    y = torch.randint(4, (32,))
    x = centres[y] + torch.randn(32, 16)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if 5 <= step < 7:  # the batches of another task, which are for the head
        for p in model[:4].parameters():
            p.grad = None
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
