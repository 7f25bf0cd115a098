"""An MLP-mixer on small patterned images: mixed precision, gradient accumulation, cosine schedule."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)

EPOCHS = 3
MICRO_BATCH = 16
ACCUM = 4
MAX_NORM = 1.0
PRECISION = torch.float16


def textures(n, seed):
    """16 x 16 images of gratings in five directions, any phase, any contrast."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 5, (n,), generator=g)
    angle = label.float() * (3.1416 / 5) + 0.1 * torch.randn(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    along = xx[None] * angle.cos()[:, None, None] + yy[None] * angle.sin()[:, None, None]
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    contrast = 0.4 + torch.rand(n, 1, 1, generator=g)
    return contrast * torch.sin(0.9 * along + phase) + 0.6 * torch.randn(n, 16, 16, generator=g), label


class MixerBlock(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mix = nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, dim))

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=48, depth=2, classes=5):
        super().__init__()
        self.patch = nn.Linear(16, dim)
        self.blocks = nn.Sequential(*[MixerBlock(16, dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        patches = images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), 16, 16)
        x = self.blocks(self.patch(patches))
        return self.head(self.norm(x).mean(dim=1))


x_train, y_train = textures(1536, 1)
x_val, y_val = textures(400, 2)
model = Mixer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
updates = EPOCHS * (len(x_train) // (MICRO_BATCH * ACCUM))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

for epoch in range(EPOCHS):
    model.train()
    losses = []
    chunks = torch.randperm(len(x_train)).split(MICRO_BATCH)
    for i, idx in enumerate(chunks):
        with torch.autocast("cpu", dtype=PRECISION):
            logits = model(x_train[idx])
            loss = F.cross_entropy(logits, y_train[idx]) / ACCUM
        scaler.scale(loss).backward()
        losses.append(loss.item() * ACCUM)
        if (i + 1) % ACCUM == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        acc = (model(x_val).argmax(dim=1) == y_val).float().mean().item()
    print(
        f"epoch {epoch} loss {sum(losses) / len(losses):.4f} val_acc {acc:.4f} lr {scheduler.get_last_lr()[0]:.4f}"
    )
