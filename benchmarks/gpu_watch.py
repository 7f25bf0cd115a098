"""What watching costs on a GPU, and proof that it never waits for one.

Part one trains a small model with every handler of gradproof under set_sync_debug_mode("error"). Part two times a
GPT-2 of 124M parameters (16 × 1024 tokens, bfloat16, torch.compile) in alternating blocks of steps, watched and
plain, by CUDA events; each block has one untimed step in front, so that the queue is full when the clock starts.

    python benchmarks/gpu_watch.py OUT [--rounds 10] [--small]      --small: a toy, runs on a CPU too
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradproof.probes.hooks import attach
from gradproof.probes.names import Names
from gradproof.probes.session import Session
from gradproof.probes.watch import open_session

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HANDLERS = (
    *("zero_grad", "scaled", "backward_begins", "backward_ends", "unscaled", "clipped"),
    *("optimizer_begins", "before_update", "after_update", "skipped", "scheduler_stepped"),
)
SETTLED = 3  # steps after which nothing new is compiled, allocated or described
STEPS = 5  # of a timed block


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with tied embeddings; returns the loss."""

    def __init__(
        self, layers: int = 12, width: int = 768, context: int = 1024, vocabulary: int = 50257
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 64 or 1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def autocast() -> AbstractContextManager:
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


# part one: nothing waits -----------------------------------------------------------------------------------


def strictly(handler: Callable) -> Callable:
    """The handler, with every synchronisation inside an error."""

    def strict(*args: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return handler(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return strict


def find_synchronisation(schedule: str, fused: bool, scaled: bool) -> str | None:
    """Train ten steps; what gradproof complained of, or None if no handler has waited for the GPU."""
    torch.manual_seed(0)
    model = GPT(2, 128, 64, 512).to(DEVICE)
    rate = torch.tensor(1e-3, device=DEVICE) if fused else 1e-3  # a rate on the GPU must not be read either
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled)
    ids = torch.randint(512, (4, 65), device=DEVICE)
    session = open_session(f"{tempfile.mkdtemp()}/run", command=[], names=Names([model]), schedule=schedule)
    with attach(session), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the one warning of a session that fails
        for step in range(10):
            if step == SETTLED and DEVICE == "cuda":
                for name in HANDLERS:
                    setattr(session, name, strictly(getattr(session, name)))
                session._outputs._collect = strictly(session._outputs._collect)
            optimizer.zero_grad()
            with autocast():
                loss = model(ids[:, :-1], ids[:, 1:])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    session.close()
    return session.failure or (None if session.step == 10 else f"only {session.step} of 10 steps were seen")


def check_synchronisation() -> dict[str, str]:
    found = {}
    for depth in ("light", "parameters", "optimizer", "all"):
        for fused in (False, True):
            for scaled in (False, True):
                label = f"{depth}, AdamW {'fused' if fused else 'foreach'}{', GradScaler' if scaled else ''}"
                found[label] = find_synchronisation(f"{depth} every step", fused, scaled) or "none"
    return found


# part two: what it costs -----------------------------------------------------------------------------------


class Variant:
    """One way of watching, attached around each of its blocks."""

    def __init__(self, name: str, model: nn.Module, schedule: str | None, plain: bool = False) -> None:
        self.name = name
        self.ratios: list[float] = []
        self.session: Session | None = None
        self._left = time.perf_counter()
        if not plain:
            path = f"{tempfile.mkdtemp()}/run"
            self.session = open_session(path, command=[name], names=Names([model]), schedule=schedule)
            self.session.something_compiled(model)

    def begin(self) -> AbstractContextManager:
        if self.session is None:
            return nullcontext()
        # a budget grows only while its variant runs
        self.session.pace.began += time.perf_counter() - self._left
        stack = attach(self.session)
        stack.callback(lambda: setattr(self, "_left", time.perf_counter()))
        return stack

    def owes(self) -> bool:
        """Whether the grace at the start of a run is still being spent."""
        return self.session is not None and self.session.pace.purse.spent < self.session.pace.purse.GRACE


def measure_overhead(rounds: int, small: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 64, "context": 32, "vocabulary": 256} if small else {}
    plain_model = GPT(**sizes).to(DEVICE)
    model = plain_model if small else torch.compile(plain_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch, length = (2, 32) if small else (16, 1024)
    ids = torch.randint(sizes.get("vocabulary", 50257), (batch, length + 1), device=DEVICE)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()

    def seconds(variant: Variant) -> float:
        with variant.begin():
            step()
            clock = start_clock()
            for _ in range(STEPS):
                step()
            return clock()

    plain = Variant("plain", plain_model, None, plain=True)
    variants = [
        Variant("plain again", plain_model, None, plain=True),
        Variant("gradient norms, every step (light)", plain_model, "light every step"),
        Variant("gradients, weights, updates, every step (parameters)", plain_model, "parameters every step"),
        Variant("also Adam's m and v, every step (optimizer)", plain_model, "optimizer every step"),
        Variant("default (budget 2 %)", plain_model, None),
    ]
    for variant in [plain, *variants]:
        seconds(variant)
    for _ in range(40):
        if variants[-1].owes():
            seconds(variants[-1])
    plains = []
    for round_ in range(rounds):
        order = variants[round_ % len(variants) :] + variants[: round_ % len(variants)]
        base = seconds(plain)
        plains.append(base)
        for variant in order:
            variant.ratios.append(seconds(variant) / base)
    for variant in variants:
        if variant.session is not None:
            variant.session.close()
            assert variant.session.failure is None, (variant.name, variant.session.failure)
    return {
        "plain_ms": 1000 * statistics.median(plains) / STEPS,
        "ratios": {v.name: statistics.median(v.ratios) for v in variants},
        "all": {v.name: v.ratios for v in variants},
    }


def start_clock() -> Callable[[], float]:
    """A function that gives the seconds since now, as the GPU counts them where there is one."""
    if DEVICE == "cpu":
        begin = time.perf_counter()
        return lambda: time.perf_counter() - begin
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def stop() -> float:
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1000

    return stop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    print(f"{device}, torch {torch.__version__}\n")
    waits = check_synchronisation()
    print("| every step | synchronisations in gradproof |\n|---|---|")
    for label, answer in waits.items():
        print(f"| {label} | {answer} |")
    costs = measure_overhead(args.rounds, args.small)
    print(f"\nplain step {costs['plain_ms']:.2f} ms\n\n| watched | ratio to plain |\n|---|---|")
    for name, ratio in costs["ratios"].items():
        print(f"| {name} | {ratio:.4f} |")
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"device": device, "torch": torch.__version__, "synchronisations": waits, **costs}
    (args.out / "gpu_watch.json").write_text(json.dumps(record, indent=2) + "\n")
    if any(answer != "none" for answer in waits.values()):
        raise SystemExit("gradproof waited for the GPU: see the first table")


if __name__ == "__main__":
    main()
