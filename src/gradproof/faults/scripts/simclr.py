"""SimCLR on synthetic 'spectra': two augmented views, NT-Xent loss, nearest-neighbour check of the features."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
DIM, CLASSES, PER_CLASS = 60, 8, 100
positions = torch.linspace(0, 1, DIM)


def make_spectra(per_class, seed):
    """Each class has peaks at its own places; baseline, gain and noise vary from sample to sample."""
    fixed = torch.Generator().manual_seed(99)
    g = torch.Generator().manual_seed(seed)
    centres = torch.rand(CLASSES, 4, generator=fixed)
    xs, ys = [], []
    for c in range(CLASSES):
        heights = 0.7 + 0.6 * torch.rand(per_class, 4, 1, generator=g)
        peaks = (heights * torch.exp(-((positions - centres[c][None, :, None]) ** 2) / 0.001)).sum(dim=1)
        slope = torch.randn(per_class, 1, generator=g) * 3
        offset = torch.randn(per_class, 1, generator=g) * 3
        xs.append(peaks + slope * positions + offset + 0.15 * torch.randn(per_class, DIM, generator=g))
        ys.append(torch.full((per_class,), c))
    return torch.cat(xs), torch.cat(ys)


def augment(x):
    n = len(x)
    x = x + torch.randn(n, 1) * 2 + torch.randn(n, 1) * 2 * positions
    x = x + 0.15 * torch.randn_like(x)
    keep = (torch.rand_like(x) > 0.1).float()
    return x * keep


class Encoder(nn.Module):
    def __init__(self, features=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(DIM, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, features)
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(features, features))

    def forward(self, x):
        h = self.backbone(x)
        z = self.projector(h)
        return h, F.normalize(z, dim=1)


def nt_xent(z1, z2, temperature=0.2):
    n = len(z1)
    z = torch.cat([z1, z2], dim=0)
    sim = z @ z.t() / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    targets = torch.cat([torch.arange(n) + n, torch.arange(n)])
    return F.cross_entropy(sim, targets)


def neighbour_accuracy(model, bank, query):
    model.eval()
    with torch.no_grad():
        a = F.normalize(model(bank[0])[0], dim=1)
        b = F.normalize(model(query[0])[0], dim=1)
    model.train()
    nearest = (b @ a.t()).argmax(dim=1)
    return (bank[1][nearest] == query[1]).float().mean().item()


x_train, y_train = make_spectra(PER_CLASS, 1)
x_test, y_test = make_spectra(40, 2)
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
print(f"before training: knn accuracy {neighbour_accuracy(model, (x_train, y_train), (x_test, y_test)):.3f}")
for epoch in range(20):
    losses = []
    for idx in torch.randperm(len(x_train)).split(80):
        x = x_train[idx]
        _, z1 = model(augment(x))
        _, z2 = model(augment(x))
        loss = nt_xent(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch % 4 == 3:
        acc = neighbour_accuracy(model, (x_train, y_train), (x_test, y_test))
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, knn accuracy {acc:.3f}")
