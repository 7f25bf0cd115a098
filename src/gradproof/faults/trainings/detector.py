"""One-stage, anchor-free detector: focal loss for the classes, GIoU for the boxes, SGD with momentum, bf16 autocast."""

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
SIZE, C, B, N, CLASSES = (32, 8, 16, 256, 3) if SMALL else (256, 96, 32, 1024, 6)
STRIDE = 8
G = SIZE // STRIDE
STEPS = args.steps or (120 if SMALL else 500)
LR = 0.05 if SMALL else 0.02
torch.manual_seed(0)


def make_scenes(n, seed):
    """Two bright rectangles a picture; the cell with the centre of one is told its class and its four sides."""
    gen = torch.Generator().manual_seed(seed)
    colours = 2 * torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(99))
    images = 0.3 * torch.randn(n, 3, SIZE, SIZE, generator=gen)
    classes = torch.zeros(n, CLASSES, G, G)
    sides = torch.ones(n, 4, G, G)
    for i in range(n):
        for _ in range(2):
            k = int(torch.randint(0, CLASSES, (1,), generator=gen))
            w, h = torch.randint(SIZE // 6, SIZE // 3, (2,), generator=gen).tolist()
            x, y = torch.randint(0, SIZE - SIZE // 3, (2,), generator=gen).tolist()
            images[i, :, y : y + h, x : x + w] = colours[k][:, None, None]
            column, row = int((x + w / 2) / STRIDE), int((y + h / 2) / STRIDE)
            cx, cy = (column + 0.5) * STRIDE, (row + 0.5) * STRIDE
            classes[i, :, row, column] = 0
            classes[i, k, row, column] = 1
            sides[i, :, row, column] = torch.tensor([cx - x, cy - y, x + w - cx, y + h - cy]) / STRIDE
    return images, classes, sides


def conv(cin, cout, stride=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.GroupNorm(4, cout), nn.SiLU())


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            conv(3, C), conv(C, C, 2), conv(C, 2 * C), conv(2 * C, 2 * C, 2), conv(2 * C, 4 * C, 2)
        )
        self.cls_tower, self.box_tower = conv(4 * C, 4 * C), conv(4 * C, 4 * C)
        self.cls_out = nn.Conv2d(4 * C, CLASSES, 3, padding=1)
        self.box_out = nn.Conv2d(4 * C, 4, 3, padding=1)
        nn.init.normal_(self.cls_out.weight, std=0.01)
        nn.init.constant_(self.cls_out.bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, images):
        features = self.backbone(images)
        scores = self.cls_out(self.cls_tower(features))
        boxes = self.box_out(self.box_tower(features))
        return scores.float(), boxes.float().clamp(max=4).exp()


def focal_loss(scores, target, alpha=0.25, gamma=2.0):
    p = scores.sigmoid()
    ce = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - p_t) ** gamma * ce).sum() / target.sum().clamp(min=1)


def giou(a, b):
    """Of boxes as distances from one point to their left, upper, right and lower sides."""
    inter = (torch.min(a[:, :2], b[:, :2]) + torch.min(a[:, 2:], b[:, 2:])).prod(1)
    hull = (torch.max(a[:, :2], b[:, :2]) + torch.max(a[:, 2:], b[:, 2:])).prod(1)
    union = (a[:, :2] + a[:, 2:]).prod(1) + (b[:, :2] + b[:, 2:]).prod(1) - inter
    return inter / union - (hull - union) / hull


images, classes, sides = (part.to(dev) for part in make_scenes(N, seed=1))
images = images.contiguous(memory_format=torch.channels_last)
model = Detector().to(dev, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)

losses, overlaps = [], []
start = time.time()
for step in range(STEPS):
    rows = torch.randint(0, N, (B,), device=dev)
    with torch.autocast(dev, dtype=torch.bfloat16):
        scores, boxes = model(images[rows])
    positive = classes[rows].amax(1, keepdim=True)
    overlap = giou(boxes, sides[rows])[:, None]
    cls_loss = focal_loss(scores, classes[rows])
    box_loss = ((1 - overlap) * positive).sum() / positive.sum()
    loss = cls_loss + box_loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
    losses.append(loss.detach())
    overlaps.append(((overlap * positive).sum() / positive.sum()).detach())
    if step % 20 == 0:
        print(f"step {step} cls {cls_loss.item():.4f} box {box_loss.item():.4f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:])}
result["metric"] = torch.stack(overlaps[-10:]).mean().item()
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
