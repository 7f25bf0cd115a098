"""A variational autoencoder of 8 x 8 glyphs made of strokes."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_glyphs(count, seed):
    g = torch.Generator().manual_seed(seed)
    glyphs = torch.zeros(count, 8, 8)
    rows = torch.randint(0, 8, (count,), generator=g)
    columns = torch.randint(0, 8, (count,), generator=g)
    for i in range(count):
        glyphs[i, rows[i], :] = 1.0
        glyphs[i, :, columns[i]] = 1.0
    flips = torch.rand(count, 8, 8, generator=g) < 0.02
    glyphs[flips] = 1.0 - glyphs[flips]
    return glyphs.view(count, 64)


class VAE(nn.Module):
    def __init__(self, hidden=128, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.to_mu = nn.Linear(hidden, latent)
        self.to_logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 64)
        )

    def encode(self, x):
        h = self.encoder(x)
        return self.to_mu(h), self.to_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.decoder(z), mu, logvar


def elbo_terms(logits, x, mu, logvar):
    recon = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / x.size(0)
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
    return recon, kl


torch.manual_seed(21)
train_loader = DataLoader(TensorDataset(make_glyphs(2000, 1)), batch_size=50, shuffle=True)
test = make_glyphs(500, 2)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
beta = 0.5

for epoch in range(12):
    model.train()
    recon_sum = kl_sum = 0.0
    for (x,) in train_loader:
        logits, mu, logvar = model(x)
        recon, kl = elbo_terms(logits, x, mu, logvar)
        loss = recon + beta * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recon_sum += recon.item()
        kl_sum += kl.item()
    n = len(train_loader)
    print(
        f"====> Epoch: {epoch + 1} Average loss: {(recon_sum + beta * kl_sum) / n:.3f} kl: {kl_sum / n:.3f}"
    )

model.eval()
with torch.no_grad():
    mu, _ = model.encode(test)
    pixels = model.decoder(mu) > 0
    pixels_off = (pixels != (test > 0.5)).float().sum(dim=1).mean().item()
print(f"pixels off per glyph: {pixels_off:.3f}")
