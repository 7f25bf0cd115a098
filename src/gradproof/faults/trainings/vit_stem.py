"""Vision transformer with a convolutional stem: channels-last, loader with workers, bf16 autocast, AdamW."""

import argparse
import hashlib
import json
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0)
args = parser.parse_args()
SMALL = bool(os.environ.get("SMALL"))
dev = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, C, H, L, B, CLASSES = (16, 48, 4, 3, 64, 6) if SMALL else (64, 512, 8, 12, 256, 16)
STEPS = args.steps or (110 if SMALL else 300)
LR = 3e-3 if SMALL else 5e-4
torch.manual_seed(0)


class Textures(Dataset):
    """Uint8 pictures: the grating of a class at a random phase, on a random background, with noise."""

    def __init__(self, per_class):
        self.labels = torch.arange(CLASSES).repeat_interleave(per_class)
        line = torch.linspace(0, 1, SIZE)
        self.y, self.x = torch.meshgrid(line, line, indexing="ij")

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        gen = torch.Generator().manual_seed(i)
        label = int(self.labels[i])
        angle = math.pi * label / CLASSES
        phase = 2 * math.pi * torch.rand(3, 1, 1, generator=gen)
        wave = torch.sin(16 * (math.cos(angle) * self.x + math.sin(angle) * self.y) + phase)
        tint = torch.rand(3, 1, 1, generator=gen)
        picture = 0.3 * tint + 0.35 + 0.2 * wave + 0.1 * torch.randn(3, SIZE, SIZE, generator=gen)
        return (picture.clamp(0, 1) * 255).to(torch.uint8), label


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        n, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, s, 3, H, C // H).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, s, C))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, C // 2, 3, stride=2, padding=1), nn.BatchNorm2d(C // 2), nn.ReLU(),
            nn.Conv2d(C // 2, C, 3, stride=2, padding=1), nn.BatchNorm2d(C), nn.ReLU(),
        )  # fmt: skip
        self.cls = nn.Parameter(torch.zeros(1, 1, C))
        self.pos = nn.Parameter(0.02 * torch.randn(1, (SIZE // 4) ** 2 + 1, C))
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, CLASSES)

    def forward(self, images):
        x = self.stem(images)  # (N, C, h, w)
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def prepare(images):
    images = images.to(dev, non_blocking=True).float() / 255
    return ((images - 0.5) / 0.25).contiguous(memory_format=torch.channels_last)


workers = 2 if SMALL else 4
train_set = Textures(256 if SMALL else 1024)
loader = DataLoader(
    train_set, batch_size=B, shuffle=True, num_workers=workers, drop_last=True,
    pin_memory=dev == "cuda", persistent_workers=True,
)  # fmt: skip
model = ViT().to(dev, memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=STEPS + 1, pct_start=0.2)
criterion = nn.CrossEntropyLoss()

losses, hits = [], []
start = time.time()
while len(losses) < STEPS:
    for images, labels in loader:
        images, labels = prepare(images), labels.to(dev, non_blocking=True)
        with torch.autocast(dev, dtype=torch.bfloat16):
            outputs = model(images)
            loss = criterion(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        hits.append((outputs.argmax(1) == labels).float().mean())
        if len(losses) % 20 == 1:
            print(f"step {len(losses)} loss {loss.item():.4f} acc {hits[-1].item():.2f}", flush=True)
        if len(losses) == STEPS:
            break

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result["metric"] = torch.stack(hits[-10:]).mean().item()
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
