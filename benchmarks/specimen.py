"""What recording a step costs a training, how large its specimen is, and how long all questions of it take.

    python benchmarks/specimen.py OUT [--sizes 124M,1.5B] [--minute]      on a GPU
    python benchmarks/specimen.py OUT --sizes small                       on a CPU

Each size is trained in a process of its own, plain and under `gradproof run`, one after the other; then its first
landmark is examined. --minute trains for a minute, for the share of it that training loses. Bars: the recorded step at
most 5 plain ones, the steps after it 1.01, memory 1.10, a minute 1.03, the specimen 1.1 times its weights, states and
batch, all questions within a minute (124M) and five (1.5B) on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# layers, width, heads, vocabulary, batch, context, steps
SIZES = {
    "small": (4, 128, 4, 512, 8, 64, 60),
    "124M": (12, 768, 12, 50257, 16, 512, 120),
    "1.5B": (48, 1600, 25, 50257, 8, 512, 60),
}

TRAINING = """
import json, sys, time
import torch, torch.nn as nn, torch.nn.functional as F

L, C, H, V, B, T, STEPS, SECONDS = json.loads(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, H, C // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, C)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


with torch.device(device):
    model = GPT()
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
data = torch.randint(0, V, (16, B, T + 1), device=device)
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
times, began = [], time.perf_counter()
while len(times) < STEPS or time.perf_counter() - began < SECONDS:
    wait()
    start = time.perf_counter()
    batch = data[len(times) % 16]
    with torch.autocast(device, torch.bfloat16):
        logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    wait()
    times.append(time.perf_counter() - start)
peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print("RESULT", json.dumps({"times": times, "peak": peak, "bytes": 3 * weights + 2 * B * T * 8, "loss": loss.item()}))
"""


def train(script: Path, size: str, seconds: float, run: Path | None) -> dict:
    command = [sys.executable]
    if run is not None:
        command += ["-m", "gradproof", "run", "--quiet", "--examine", "off", "--out", str(run)]
    command += [str(script), json.dumps([*SIZES[size], seconds])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def examine(run: Path, step: int) -> tuple[float, dict[str, int], list[tuple[float, str]]]:
    """Seconds that all questions of a step took, what became of them, and the slowest."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "gradproof", "examine", str(run), "--step", str(step)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, env=environment, capture_output=True, check=True)
    seconds = time.perf_counter() - start
    outcomes: dict[str, int] = {}
    slowest = []
    for text in (run / "examination.jsonl").read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "asked":
            outcomes[event["outcome"]] = outcomes.get(event["outcome"], 0) + 1
            slowest.append((event["seconds"], event["question"]))
    return seconds, outcomes, sorted(slowest, reverse=True)[:8]


def measure(size: str, out: Path, seconds: float) -> dict:
    script = out / f"train_{size.replace('.', '_')}.py"
    script.write_text(TRAINING)
    run = out / f"run-{size}-{time.strftime('%H%M%S')}"
    plain, watched = train(script, size, seconds, None), train(script, size, seconds, run)
    again = train(script, size, seconds, None)  # how far two plain ones are apart
    step = statistics.median(plain["times"][3:])
    labels = [json.loads(label.read_text()) for label in sorted((run / "specimens").glob("*/label.json"))]
    recorded = [label["step"] for label in labels]
    first = next(label for label in labels if label["landmark"])
    after = [t for i, t in enumerate(watched["times"]) if i > 3 and i not in recorded]
    print(f"{size}: trained, now all questions of step {first['step']}", flush=True)
    asked, outcomes, slowest = examine(run, first["step"])
    size_on_disk = sum(f.stat().st_size for f in (run / "specimens").glob(f"step-{first['step']:08d}/*"))
    count = min(len(plain["times"]), len(watched["times"]))
    return {
        "size": size,
        "plain step ms": 1e3 * step,
        "recorded steps": recorded,
        "recorded step, plain ones": max(watched["times"][s] for s in recorded if s) / step,
        "steps after": statistics.median(after) / step,
        "plain again": statistics.median(again["times"][3:]) / step,
        "memory": watched["peak"] / plain["peak"] if plain["peak"] else None,
        "loop": sum(watched["times"][:count]) / sum(plain["times"][:count]),
        "lost seconds": sum(watched["times"][:count]) - sum(plain["times"][:count]),
        "same loss": watched["loss"] == plain["loss"]
        if again["loss"] == plain["loss"]
        else "plain ones differ",
        "first steps ms": [round(1e3 * t) for t in watched["times"][:8]],
        "first plain steps ms": [round(1e3 * t) for t in again["times"][:8]],
        "specimen": size_on_disk / plain["bytes"],
        "examined s": asked,
        "outcomes": outcomes,
        "slowest": slowest,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default="124M,1.5B")
    parser.add_argument("--minute", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for size in args.sizes.split(","):
        rows.append(measure(size, args.out, 60.0 if args.minute else 0.0))
        (args.out / "specimen.json").write_text(json.dumps(rows, indent=1))
        for name, value in rows[-1].items():
            print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}", flush=True)


if __name__ == "__main__":
    main()
