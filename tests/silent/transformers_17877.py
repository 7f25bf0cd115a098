"""A small residual network whose weights are initialised module by module, output projections by depth."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
LAYERS = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 2 * width)
        self.c_proj = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.c_proj(F.gelu(self.c_fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inward = nn.Linear(16, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.head = nn.Linear(width, 4)
        self.apply(self.initialise)

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.05)
            module.bias.data.zero_()
        for name, p in module.named_parameters():
            if name == "c_proj.weight":
                p.data.normal_(0, 0.05 / math.sqrt(2 * LAYERS))

    def forward(self, x):
        return self.head(self.blocks(self.inward(x)))


centres = torch.randn(4, 16)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(200):
    y = torch.randint(4, (32,))
    x = centres[y] + torch.randn(32, 16)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(step, round(loss.item(), 4))
