"""Mixed precision with a linear operation of the script's own, which is lowered for autocast regions."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


def lowered(x, weight, bias):
    """The operation as the compiler calls it: what autocast does to F.linear has to be done here, too."""
    with torch.autocast("cpu", enabled=False):
        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
        return torch.addmm(bias, x, weight.t())


class Lowered(nn.Linear):
    def forward(self, x):
        return lowered(x, self.weight, self.bias)


centres = torch.randn(4, 16)
model = nn.Sequential(Lowered(16, 64), nn.Tanh(), Lowered(64, 64), nn.Tanh(), Lowered(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(150):
    y = torch.randint(4, (32,))
    x = centres[y] + torch.randn(32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
