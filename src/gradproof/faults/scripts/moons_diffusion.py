"""Denoising diffusion of two moons: predict the noise, sample with an averaged copy of the network."""

import copy
import math

import torch
import torch.nn as nn

T = 40
STEPS = 1000
BATCH = 256


def two_moons(n):
    angle = torch.rand(n) * math.pi
    upper = torch.rand(n) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    points = torch.stack([x - 0.5, y - 0.25], dim=1)
    return (points + 0.03 * torch.randn(n, 2)) / 0.7


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, -5, dim // 2)))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        angles = t.float()[:, None] * self.freqs[None]
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=1))


class Denoiser(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.time = TimeEmbedding(width)
        self.inp = nn.Linear(2, width)
        self.mid1 = nn.Linear(width, width)
        self.mid2 = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)
        self.act = nn.SiLU()

    def forward(self, x, t):
        h = self.inp(x) + self.time(t)
        h = h + self.mid1(self.act(h))
        h = h + self.mid2(self.act(h))
        return self.out(self.act(h))


class EMA:
    def __init__(self, model, decay=0.99):
        self.model = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for slow, fast in zip(self.model.parameters(), model.parameters()):
            slow.mul_(self.decay).add_(fast, alpha=1 - self.decay)


betas = torch.linspace(1e-3, 0.2, T)
alphas = 1 - betas
alpha_bar = torch.cumprod(alphas, dim=0)


@torch.no_grad()
def sample(model, n):
    x = torch.randn(n, 2)
    for i in reversed(range(T)):
        t = torch.full((n,), i)
        noise = model(x, t)
        x = (x - betas[i] / (1 - alpha_bar[i]).sqrt() * noise) / alphas[i].sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
    return x


if __name__ == "__main__":
    torch.manual_seed(8)
    net = Denoiser()
    ema = EMA(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    average = None
    for step in range(1, STEPS + 1):
        x0 = two_moons(BATCH)
        t = torch.randint(0, T, (BATCH,))
        noise = torch.randn_like(x0)
        a = alpha_bar[t].unsqueeze(1)
        xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
        loss = (net(xt, t) - noise).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(net)
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 0:
            print(f"{step:5d} | loss {average:.4f}")

    samples = sample(ema.model, 500)
    reference = two_moons(2000)
    distance = torch.cdist(samples, reference).min(dim=1).values.mean().item()
    print(f"mean distance of samples to data {distance:.4f}")
