"""Predict house prices from a table with a small network."""

import torch
from torch import nn

SEED = 31
EPOCHS = 40


def load_table(rows=1500):
    """area (m2), year built, rooms, distance to centre (km), floor; price in thousands."""
    g = torch.Generator().manual_seed(SEED)
    area = 30 + 170 * torch.rand(rows, generator=g)
    year = 1900 + 125 * torch.rand(rows, generator=g)
    rooms = (area / 28 + torch.randn(rows, generator=g) * 0.7).round().clamp(min=1)
    distance = 30 * torch.rand(rows, generator=g) ** 2
    floor = torch.randint(0, 12, (rows,), generator=g).float()
    price = area * (2 + 6 * torch.exp(-distance / 6)) + 40 * torch.sin((year - 1900) / 20)
    price = price + 12 * rooms + 3 * floor + 15 * torch.randn(rows, generator=g)
    return torch.stack([area, year, rooms, distance, floor, price], dim=1)


class PriceNet(nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def mse(prediction, target):
    return ((prediction - target) ** 2).mean()


def r_squared(prediction, target):
    return (1 - mse(prediction, target) / target.var(unbiased=False)).item()


torch.manual_seed(SEED)
table = load_table()
features, price = table[:, :5], table[:, 5]
n_train = 1200
mean, std = features[:n_train].mean(dim=0), features[:n_train].std(dim=0)
x = (features - mean) / std
price_mean, price_std = price[:n_train].mean(), price[:n_train].std()
y = (price - price_mean) / price_std
x_train, y_train = x[:n_train], y[:n_train]
x_test, y_test = x[n_train:], y[n_train:]

model = PriceNet(x.shape[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(EPOCHS):
    order = torch.randperm(n_train)
    total = 0.0
    for start in range(0, n_train, 40):
        rows = order[start : start + 40]
        prediction = model(x_train[rows])
        loss = mse(prediction, y_train[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if (epoch + 1) % 5 == 0:
        print(f"epoch {epoch + 1}: mse = {total / 30:.5f}")

with torch.no_grad():
    print(f"test r2 = {r_squared(model(x_test).flatten(), y_test.flatten()):.4f}")
