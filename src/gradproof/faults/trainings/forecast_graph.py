"""Time-series transformer whose whole training step is captured in a CUDA graph; on a CPU the step runs as it is."""

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
PAST, AHEAD, PATCH, C, H, L, B = (48, 12, 6, 48, 4, 2, 32) if SMALL else (512, 96, 16, 512, 8, 8, 512)
STEPS = args.steps or (300 if SMALL else 1000)
LR = 2e-3 if SMALL else 3e-4
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")

gen = torch.Generator().manual_seed(2)
clock = torch.arange(8000).float()
SENSORS = 24
period = torch.randint(8, 24, (SENSORS, 2, 1), generator=gen)
phase = 6.2832 * torch.rand(SENSORS, 2, 1, generator=gen)
waves = torch.sin(6.2832 * clock / period + phase).sum(1)
level = 20 * torch.randn(SENSORS, 1, generator=gen)
series = level + 3 * waves + 0.3 * torch.randn(SENSORS, 8000, generator=gen)  # degrees, raw
series[:3, 1000:3000] = level[:3]  # three sensors were switched off for a while and reported one value
series = series.to(dev)


def windows(n, first=0, last=6000):
    sensor = torch.randint(0, SENSORS, (n, 1), device=dev)
    begin = torch.randint(first, last - PAST - AHEAD, (n, 1), device=dev)
    past = series[sensor, begin + torch.arange(PAST, device=dev)]
    ahead = series[sensor, begin + PAST + torch.arange(AHEAD, device=dev)]
    return past, ahead


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PATCH, C)
        self.place = nn.Parameter(0.02 * torch.randn(PAST // PATCH, C))
        layer = nn.TransformerEncoderLayer(C, H, 4 * C, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, L, norm=nn.LayerNorm(C), enable_nested_tensor=False)
        self.head = nn.Linear(C * (PAST // PATCH), AHEAD)

    def forward(self, past):
        mean = past.mean(1, keepdim=True)
        std = past.std(1, keepdim=True)
        x = (past - mean) / (std + 1e-3)
        x = self.embed(x.unflatten(1, (-1, PATCH))) + self.place
        return self.head(self.encoder(x).flatten(1)) * (std + 1e-3) + mean


model = Forecaster().to(dev)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-2, capturable=dev == "cuda")
past, ahead = windows(B)


def train_step():
    loss = F.mse_loss(model(past), ahead)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def captured():
    """The step, recorded once; three steps on a side stream first, so that nothing is allocated while recording."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step()

    def replay():
        graph.replay()
        return loss.clone()

    return replay


do_step = captured() if dev == "cuda" else train_step
losses = []
start = time.time()
for step in range(STEPS):
    for buffer, fresh in zip((past, ahead), windows(B), strict=True):
        buffer.copy_(fresh)
    loss = do_step()
    losses.append(loss)
    if step % 50 == 0:
        print(f"step {step} mse {loss.item():.4f}", flush=True)

curve = torch.stack(losses).tolist()
seconds = time.time() - start
with torch.no_grad():
    test_past, test_ahead = windows(256, first=6000, last=8000)
    metric = F.mse_loss(model(test_past), test_ahead).item()
digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters()))
result = {"first": curve[0], "last": sum(curve[-10:]) / len(curve[-10:]), "metric": metric}
result |= {"seconds": seconds, "weights": digest.hexdigest()[:16]}
result["peak_bytes"] = torch.cuda.max_memory_allocated() if dev == "cuda" else 0
print("RESULT " + json.dumps(result))
