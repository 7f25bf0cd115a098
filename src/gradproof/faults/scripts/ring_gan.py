"""A GAN on eight Gaussians arranged in a ring."""

import math

import torch
import torch.nn as nn

LATENT = 8
BATCH = 128
ITERATIONS = 900


def sample_ring(n, generator=None):
    k = torch.randint(0, 8, (n,), generator=generator)
    angle = k * (2 * math.pi / 8)
    centres = torch.stack([angle.cos(), angle.sin()], dim=1) * 2
    return centres + 0.08 * torch.randn(n, 2, generator=generator)


def make_generator():
    return nn.Sequential(
        nn.Linear(LATENT, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2)
    )


def make_discriminator():
    return nn.Sequential(
        nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def ring_quality(G):
    """Share of samples within 0.4 of a centre, and how many of the eight centres are visited."""
    with torch.no_grad():
        points = G(torch.randn(1000, LATENT))
    angle = torch.arange(8) * (2 * math.pi / 8)
    centres = torch.stack([angle.cos(), angle.sin()], dim=1) * 2
    distance, nearest = torch.cdist(points, centres).min(dim=1)
    near = distance < 0.4
    modes = sum(int((near & (nearest == k)).sum() > 15) for k in range(8))
    return near.float().mean().item(), modes


def main():
    torch.manual_seed(5)
    G, D = make_generator(), make_discriminator()
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.99))
    bce = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

    for it in range(ITERATIONS):
        opt_d.zero_grad()
        opt_g.zero_grad()

        # discriminator
        real = sample_ring(BATCH)
        fake = G(torch.randn(BATCH, LATENT))
        d_real = D(real)
        d_fake = D(fake.detach())
        d_loss = bce(d_real, ones) + bce(d_fake, zeros)
        d_loss.backward()
        opt_d.step()

        # generator
        g_loss = bce(D(fake), ones)
        g_loss.backward()
        opt_g.step()

        if it % 100 == 99:
            near, modes = ring_quality(G)
            print(
                f"[{it + 1}/{ITERATIONS}] d_loss={d_loss.item():.3f} g_loss={g_loss.item():.3f} near={near:.3f} modes={modes}"
            )


if __name__ == "__main__":
    main()
