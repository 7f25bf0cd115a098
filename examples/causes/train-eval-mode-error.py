"""Dropout or BatchNorm is in the wrong mode: `eval()` stays on after the first validation, validation runs in
training mode, `F.dropout` is always on, or the share to drop is taken for the share to keep."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centres = 2 * torch.randn(5, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def draw_batch():
    y = torch.randint(5, (32,))
    return centres[y] + torch.randn(32, 8), y


for epoch in range(5):
    # fix: model.train()
    for batch in range(20):
        x, y = draw_batch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = draw_batch()
        print(f"epoch {epoch}: validation loss {F.cross_entropy(model(x), y):.3f}")
