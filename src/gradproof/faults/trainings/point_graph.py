"""Point clouds classified by edge convolutions over nearest neighbours, after a learned alignment; SGD."""

import argparse
import hashlib
import json
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
POINTS, K, C, B, N = (48, 6, 24, 16, 512) if SMALL else (1024, 20, 64, 32, 2048)
STEPS = args.steps or (130 if SMALL else 500)
LR, CLASSES = 0.05, 4
torch.manual_seed(0)


def make_clouds(n, seed):
    """A sphere, a cube's surface, a disc and a rod: stretched, turned about the vertical axis, a little noisy."""
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (n,), generator=gen)
    raw = torch.randn(n, POINTS, 3, generator=gen)
    sphere = F.normalize(raw, dim=-1)
    cube = raw / raw.abs().amax(-1, keepdim=True)
    disc = sphere * torch.tensor([1.0, 1.0, 0.1])
    rod = sphere * torch.tensor([0.25, 0.25, 1.2])
    shape = torch.stack([sphere, cube, disc, rod], dim=1)[torch.arange(n), labels]
    turn = 6.2832 * torch.rand(n, generator=gen)
    c, s, o, i = turn.cos(), turn.sin(), torch.zeros(n), torch.ones(n)
    rotation = torch.stack([c, -s, o, s, c, o, o, o, i], dim=1).view(n, 3, 3)
    size = 0.6 + 0.8 * torch.rand(n, 1, 1, generator=gen)
    return size * shape @ rotation + 0.05 * torch.randn(n, POINTS, 3, generator=gen), labels


def neighbours(x, k):
    """Indices of the k nearest points of each point, itself among them."""
    return torch.cdist(x, x).topk(k, largest=False).indices


class EdgeConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.linear = nn.Linear(2 * cin + 1, cout, bias=False)
        self.norm = nn.BatchNorm1d(cout)

    def forward(self, x):
        n = len(x)
        with torch.no_grad():
            index = neighbours(x, K)
        near = x[torch.arange(n, device=x.device)[:, None, None], index]  # (n, p, K, c)
        offset = near - x[:, :, None]
        distance = (offset.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        edge = torch.cat([x[:, :, None].expand_as(near), offset, distance], dim=-1)
        h = self.linear(edge)
        h = self.norm(h.flatten(0, 2)).view_as(h)
        return F.leaky_relu(h, 0.2).amax(2)


class PointGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.align = nn.Sequential(nn.Linear(3, C), nn.ReLU(), nn.Linear(C, 9))
        self.edge1, self.edge2 = EdgeConv(3, C), EdgeConv(C, 2 * C)
        self.head = nn.Sequential(nn.Linear(3 * C, C), nn.BatchNorm1d(C), nn.ReLU(), nn.Linear(C, CLASSES))
        nn.init.zeros_(self.align[-1].weight)
        with torch.no_grad():
            self.align[-1].bias.copy_(torch.eye(3).flatten())

    def forward(self, points):
        frame = self.align(points).amax(1).view(-1, 3, 3)
        h1 = self.edge1(points @ frame)
        h2 = self.edge2(h1)
        return self.head(torch.cat([h1, h2], dim=-1).amax(1))


clouds, labels = (part.to(dev) for part in make_clouds(N, seed=1))
val_clouds, val_labels = (part.to(dev) for part in make_clouds(128, seed=2))
model = PointGraph().to(dev)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-4)

losses = []
start = time.time()
for step in range(STEPS):
    rows = torch.randint(0, N, (B,), device=dev)
    logits = model(clouds[rows])
    loss = F.cross_entropy(logits, labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
model.eval()
with torch.no_grad():
    metric = (model(val_clouds).argmax(1) == val_labels).float().mean().item()
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": metric}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
