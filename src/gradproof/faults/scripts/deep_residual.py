"""A deep residual network on tabular data; the batch is split so that it fits into memory."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DEPTH = 12
WIDTH = 48
MICRO = 16
ACCUMULATE = 4


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        h = F.relu(self.fc1(self.norm(x)))
        return x + self.fc2(h) / DEPTH**0.5


class DeepNet(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.stem = nn.Linear(features, WIDTH)
        self.blocks = nn.ModuleList([ResidualBlock(WIDTH) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)
        self.reset_parameters()

    def reset_parameters(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_table(rows, seed):
    """Sixteen measurements; the class is given by the signs of three products of them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=g)
    bits = torch.stack([x[:, 0] * x[:, 1] > 0, x[:, 2] + x[:, 3] > 0, x[:, 4] - x[:, 5] * x[:, 6] > 0], dim=1)
    return x, (bits.long() * torch.tensor([1, 2, 4])).sum(dim=1)


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).float().mean().item()


def train(model, x, y, x_val, y_val, updates=200):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for update in range(1, updates + 1):
        model.train()
        rows = torch.randint(0, len(x), (ACCUMULATE, MICRO))
        optimizer.zero_grad()
        total = 0.0
        for micro in rows:
            loss = F.cross_entropy(model(x[micro]), y[micro]) / ACCUMULATE
            loss.backward()
            total += loss.item()
        optimizer.step()
        if update % 25 == 0:
            print(f"update {update:4d}  loss {total:.4f}  val acc {accuracy(model, x_val, y_val):.4f}")


def main():
    torch.manual_seed(91)
    x, y = make_table(6000, 1)
    x_val, y_val = make_table(600, 2)
    train(DeepNet(16, 8), x, y, x_val, y_val)


if __name__ == "__main__":
    main()
