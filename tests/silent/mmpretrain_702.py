"""Fine-tuning: the first stages of a network that somebody has trained are kept as they are."""

from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Backbone(nn.Module):
    """Stages of convolutions, of which the first `frozen_stages` are not to be trained."""

    def __init__(self, frozen_stages):
        super().__init__()
        self.frozen_stages = frozen_stages
        sizes = (1, 8, 16, 16)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(sizes)
        )
        self.head = nn.Linear(16, 5)
        self.freeze()

    def freeze(self):
        for stage in self.stages[: self.frozen_stages]:
            for p in stage.parameters():
                p.requires_grad = False

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.freeze()
        return self

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def batch(n=32):
    y = torch.randint(5, (n,))
    x = 0.3 * torch.randn(n, 1, 16, 16)
    for row, k in enumerate(y):
        x[row, 0, :, 3 * k : 3 * k + 3] += 1.0 + 0.5 * k
    return x, y


model = Backbone(frozen_stages=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    for _ in range(40):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = batch(200)
        print(epoch, round(loss.item(), 4), (model(x).argmax(1) == y).float().mean().item())
    model.train()
