"""CLIP-like training of two towers, pictures and captions: symmetric contrastive loss, learned temperature."""

import argparse
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
SIZE, C, L, H, D, B, N, KINDS = (
    (12, 32, 2, 4, 32, 32, 1024, 6) if SMALL else (64, 384, 6, 6, 256, 512, 8192, 24)
)
STEPS = args.steps or (200 if SMALL else 800)
LR = 3e-3 if SMALL else 5e-4
torch.manual_seed(0)


def make_pairs(n, seed):
    """Four quarters, each of a colour; the caption names the four colours in order, after a start token."""
    gen = torch.Generator().manual_seed(seed)
    colours = torch.randn(KINDS, 3, generator=torch.Generator().manual_seed(4))
    named = torch.randint(0, KINDS, (n, 4), generator=gen)
    grid = colours[named].view(n, 2, 2, 3).permute(0, 3, 1, 2)
    pictures = F.interpolate(grid, size=(SIZE, SIZE)) + 0.3 * torch.randn(n, 3, SIZE, SIZE, generator=gen)
    captions = torch.cat([torch.full((n, 1), KINDS), named], dim=1)
    return pictures.to(dev), captions.to(dev)


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        layers, cin, side = [], 3, SIZE
        for cout in (C // 2, C, 2 * C):
            layers += [nn.Conv2d(cin, cout, 3, stride=2, padding=1), nn.GroupNorm(4, cout), nn.GELU()]
            cin, side = cout, (side + 1) // 2
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.proj = nn.Linear(4 * cin, D, bias=False)

    def forward(self, pictures):
        return self.proj(self.body(pictures))


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(KINDS + 1, C), nn.Parameter(0.1 * torch.randn(5, C))
        layer = nn.TransformerEncoderLayer(C, H, 4 * C, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, L, norm=nn.LayerNorm(C), enable_nested_tensor=False)
        self.proj = nn.Linear(C, D, bias=False)

    def forward(self, captions):
        return self.proj(self.encoder(self.tok(captions) + self.pos)[:, 0])


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = ImageTower(), TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pictures, captions):
        image = F.normalize(self.image(pictures).float(), dim=-1)
        text = F.normalize(self.text(captions).float(), dim=-1)
        return self.logit_scale.exp() * image @ text.T


pictures, captions = make_pairs(N, seed=1)
val_pictures, val_captions = make_pairs(B, seed=2)
model = TwoTowers().to(dev)
matrices = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    lr=LR, betas=(0.9, 0.98), eps=1e-6, fused=True,
)  # fmt: skip
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, STEPS - 20), eta_min=LR / 20),
    ],
    milestones=[20],
)
own = torch.arange(B, device=dev)

losses = []
start = time.time()
for step in range(STEPS):
    rows = torch.randperm(N, device=dev)[:B]
    with torch.autocast(dev, dtype=torch.bfloat16):
        logits = model(pictures[rows], captions[rows])
    loss = (F.cross_entropy(logits.float(), own) + F.cross_entropy(logits.float().T, own)) / 2
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    losses.append(loss.detach())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {model.logit_scale.exp().item():.1f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
with torch.no_grad():
    metric = (model(val_pictures, val_captions).argmax(1) == own).float().mean().item()
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": metric}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
