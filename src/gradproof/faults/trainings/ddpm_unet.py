"""Diffusion model: a small UNet that predicts the noise, cosine schedule, bf16 autocast, averaged weights."""

import argparse
import copy
import hashlib
import json
import math
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
SIZE, C, B, N, TIMES = (16, 16, 16, 512, 100) if SMALL else (64, 128, 128, 4096, 1000)
STEPS = args.steps or (140 if SMALL else 400)
LR, DECAY = (2e-3, 0.95) if SMALL else (3e-4, 0.98)
torch.manual_seed(0)

gen = torch.Generator().manual_seed(3)
line = torch.linspace(-1, 1, SIZE)
centre = 1.2 * torch.rand(N, 2, 1, 1, generator=gen) - 0.6
radius = 0.2 + 0.3 * torch.rand(N, 1, 1, generator=gen)
distance = ((line[:, None] - centre[:, 0]) ** 2 + (line[None] - centre[:, 1]) ** 2).sqrt()
images = (2 * torch.sigmoid((radius - distance) * 20) - 1)[:, None].to(dev)  # soft discs, (N, 1, SIZE, SIZE)

times = torch.arange(TIMES + 1) / TIMES
signal = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
alpha_bar = (signal[1:] / signal[0]).clamp(1e-4, 0.9999).to(dev)


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(4 * C, cout)
        self.norm2, self.conv2 = nn.GroupNorm(4, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(emb)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(C, 4 * C), nn.SiLU(), nn.Linear(4 * C, 4 * C), nn.SiLU())
        self.first = nn.Conv2d(1, C, 3, padding=1)
        self.down1, self.down2 = ResBlock(C, C), ResBlock(C, 2 * C)
        self.middle = ResBlock(2 * C, 2 * C)
        self.up2, self.up1 = ResBlock(4 * C, C), ResBlock(2 * C, C)
        self.last = nn.Sequential(nn.GroupNorm(4, C), nn.SiLU(), nn.Conv2d(C, 1, 3, padding=1))

    def forward(self, x, t):
        frequency = torch.exp(-math.log(1e4) * torch.arange(C // 2, device=x.device) / (C // 2))
        angle = t[:, None] * frequency
        emb = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        h1 = self.down1(self.first(x), emb)
        h2 = self.down2(F.avg_pool2d(h1, 2), emb)
        m = self.middle(F.avg_pool2d(h2, 2), emb)
        u2 = self.up2(torch.cat([F.interpolate(m, scale_factor=2), h2], dim=1), emb)
        u1 = self.up1(torch.cat([F.interpolate(u2, scale_factor=2), h1], dim=1), emb)
        return self.last(u1)


@torch.no_grad()
def update_average(average, model):
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.mul_(DECAY).add_(fast, alpha=1 - DECAY)


def noise_loss(net, x0):
    t = torch.randint(0, TIMES, (len(x0),), device=dev)
    noise = torch.randn_like(x0)
    a = alpha_bar[t][:, None, None, None]
    noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast(dev, dtype=torch.bfloat16):
        predicted = net(noisy, t)
    return F.mse_loss(predicted.float(), noise)


model = UNet().to(dev)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
held_out, images = images[:B].clone(), images[B:]

losses = []
start = time.time()
for step in range(STEPS):
    at = step * B % (len(images) - B)
    loss = noise_loss(model, images[at : at + B])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    update_average(average, model)
    losses.append(loss.detach())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
with torch.no_grad():
    metric = sum(noise_loss(average, held_out).item() for _ in range(8)) / 8
everything = [*model.parameters(), *average.parameters()]
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in everything))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": metric}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
