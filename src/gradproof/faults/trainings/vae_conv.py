"""Convolutional variational autoencoder on drawn strokes: Bernoulli pixels, KL warmed up, Adam."""

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
SIZE, C, Z, B, N = (16, 16, 8, 32, 1024) if SMALL else (64, 128, 32, 256, 8192)
STEPS = args.steps or (200 if SMALL else 600)
LR = 2e-3 if SMALL else 5e-4
torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = True

gen = torch.Generator().manual_seed(6)
line = torch.linspace(-1, 1, SIZE)
angle = 3.1416 * torch.rand(N, 1, 1, generator=gen)
offset = 0.8 * torch.rand(N, 1, 1, generator=gen) - 0.4
thickness = 0.1 + 0.15 * torch.rand(N, 1, 1, generator=gen)
distance = (angle.cos() * line[None, None] + angle.sin() * line[None, :, None] - offset).abs()
images = torch.sigmoid((thickness - distance) * 30)[:, None].to(dev)  # strokes, between 0 and 1


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        act = nn.ReLU
        self.encoder = nn.Sequential(
            nn.Conv2d(1, C, 3, padding=1), act(),
            nn.Conv2d(C, C, 4, stride=2, padding=1), act(),
            nn.Conv2d(C, 2 * C, 3, padding=1), act(),
            nn.Conv2d(2 * C, 2 * C, 4, stride=2, padding=1), act(),
            nn.Flatten(),
        )  # fmt: skip
        flat = 2 * C * (SIZE // 4) ** 2
        self.to_mean, self.to_logvar = nn.Linear(flat, Z), nn.Linear(flat, Z)
        self.decoder = nn.Sequential(
            nn.Linear(Z, flat), act(), nn.Unflatten(1, (2 * C, SIZE // 4, SIZE // 4)),
            nn.ConvTranspose2d(2 * C, C, 4, stride=2, padding=1), act(),
            nn.ConvTranspose2d(C, C, 4, stride=2, padding=1), act(),
            nn.Conv2d(C, 1, 3, padding=1),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x):
        h = self.encoder(x)
        mean, logvar = self.to_mean(h), self.to_logvar(h)
        z = mean + (0.5 * logvar).exp() * torch.randn_like(mean)
        return self.decoder(z), mean, logvar


def elbo_terms(logits, x, mean, logvar):
    """Nats per picture."""
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum() / len(x)
    return reconstruction, kl


model = VAE().to(dev)
optimizer = torch.optim.Adam(model.parameters(), lr=LR)

losses, divergences = [], []
start = time.time()
for step in range(STEPS):
    x = images[torch.randint(0, N, (B,), device=dev)]
    logits, mean, logvar = model(x)
    reconstruction, kl = elbo_terms(logits, x, mean, logvar)
    beta = min(1.0, step / (0.5 * STEPS))
    loss = reconstruction + beta * kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(reconstruction.detach() + kl.detach())
    divergences.append(kl.detach())
    if step % 25 == 0:
        print(f"step {step} recon {reconstruction.item():.2f} kl {kl.item():.2f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result["metric"] = torch.stack(divergences[-10:]).mean().item()
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
