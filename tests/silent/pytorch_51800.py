"""A critic with spectral norms; what it says of the data before the training is the base line."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import spectral_norm

torch.manual_seed(0)
torch.set_num_threads(1)

model = nn.Sequential(
    spectral_norm(nn.Linear(16, 64)),
    nn.LeakyReLU(0.2),
    spectral_norm(nn.Linear(64, 64)),
    nn.LeakyReLU(0.2),
    spectral_norm(nn.Linear(64, 1)),
)
direction = torch.randn(16)


def batch(n=32):
    x = torch.randn(n, 16)
    return x, torch.tanh(x @ direction / 4)


def validate():
    model.eval()
    with torch.no_grad():
        x, y = batch(200)
        off = F.mse_loss(model(x)[:, 0], y).item()
    model.train()
    return off


optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
with torch.no_grad():
    model(batch()[0])
print("before", round(validate(), 4))
for step in range(200):
    x, y = batch()
    loss = F.mse_loss(model(x)[:, 0], y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(step, round(loss.item(), 4), round(validate(), 4))
