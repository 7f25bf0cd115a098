"""ResNet in fp16 with a GradScaler: SGD with Nesterov momentum, cosine schedule, clipping, validation on the way."""

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
SIZE, W, DEPTH, B, CLASSES = (12, 8, 1, 32, 4) if SMALL else (64, 96, 3, 256, 12)
STEPS = args.steps or (60 if SMALL else 320)
EPOCH = 20  # steps between two validations
LR = 0.1
torch.manual_seed(7)


def make_pictures(n, seed):
    """A class is a pair of coloured blobs at an angle; place, size and noise are random."""
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (n,), generator=gen)
    angle = 3.1416 * labels / CLASSES
    centre = 0.5 + 0.2 * (torch.rand(n, 2, generator=gen) - 0.5)
    line = torch.linspace(0, 1, SIZE)
    images = 0.8 * torch.randn(n, 3, SIZE, SIZE, generator=gen)
    for colour, sign in ((0, 1.0), (2, -1.0)):
        x = (centre[:, 0] + sign * 0.25 * angle.cos())[:, None, None]
        y = (centre[:, 1] + sign * 0.25 * angle.sin())[:, None, None]
        blob = torch.exp(-((line[None, :, None] - y) ** 2 + (line[None, None] - x) ** 2) / 0.01)
        images[:, colour] += 2 * blob
    return images, labels


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut = nn.Identity()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


def resnet():
    layers = [nn.Conv2d(3, W, 3, padding=1, bias=False), nn.BatchNorm2d(W), nn.ReLU()]
    cin = W
    for stage in range(3):
        for i in range(DEPTH):
            cout = W * 2**stage
            layers.append(BasicBlock(cin, cout, 2 if stage and i == 0 else 1))
            cin = cout
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, CLASSES))


def validate(model):
    model.eval()
    with torch.no_grad(), torch.autocast(dev, dtype=torch.float16):
        accuracy = (model(val_x).argmax(1) == val_y).float().mean().item()
    model.train()
    return accuracy


train_x, train_y = (part.to(dev) for part in make_pictures(1024 if SMALL else 8192, seed=1))
val_x, val_y = (part.to(dev) for part in make_pictures(256 if SMALL else 1024, seed=2))
train_x = train_x.contiguous(memory_format=torch.channels_last)
model = resnet().to(dev, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
scaler = torch.amp.GradScaler(dev, init_scale=2.0**14)

losses, accuracy = [], 0.0
start = time.time()
for step in range(STEPS):
    rows = torch.randint(0, len(train_x), (B,), device=dev)
    with torch.autocast(dev, dtype=torch.float16):
        output = model(train_x[rows])
        loss = F.cross_entropy(output, train_y[rows])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    losses.append(loss.detach())
    if (step + 1) % EPOCH == 0:
        accuracy = validate(model)
        print(f"step {step + 1} loss {loss.item():.4f} val acc {accuracy:.3f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": accuracy}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
