"""What watching costs: ratio of a watched step to a plain one, next to what people do by hand.

All variants train the same small GPT in one process, in alternating blocks of steps, timed by CPU time on one
thread; the table shows the median over blocks of the ratio to the plain block of the same round.

    python benchmarks/overhead.py [--rounds 12] [--steps 8] [--tiny] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from gradproof.probes.hooks import attach
from gradproof.probes.names import Names
from gradproof.probes.schedule import EVERYTHING
from gradproof.probes.watch import open_session


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, context: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


class Variant:
    """One way of watching. `begin` is entered around each of its blocks, `after_backward` runs in each step."""

    def __init__(
        self,
        name: str,
        begin: Callable[[], AbstractContextManager] = nullcontext,
        after_backward: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        self.name, self.begin, self.after_backward = name, begin, after_backward
        self.owed: Callable[[], bool] = lambda: False


def watched(name: str, model: nn.Module, schedule: str | None) -> Variant:
    directory = tempfile.mkdtemp()
    session = open_session(f"{directory}/run", command=[name], names=Names([model]), schedule=schedule)
    left = time.perf_counter()

    def begin() -> AbstractContextManager:
        nonlocal left
        session.pace.began += time.perf_counter() - left  # the budget grows only while this variant runs
        stack = attach(session)

        def pause() -> None:
            nonlocal left
            left = time.perf_counter()
            session._outputs.detach()

        stack.callback(pause)
        if session.current.depth == EVERYTHING:
            session._outputs.attach()
        return stack

    variant = Variant(name, begin)
    variant.owed = lambda: session.pace.purse.spent < session.pace.purse.GRACE
    return variant


def norms_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm().item()


def histograms_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            torch.histc(parameter.grad.float().cpu(), bins=64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="d = 32, sequence 16, batch 2: the hard case")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers, width, context, batch = (2, 32, 16, 2) if args.tiny else (4, 256, 128, 8)
    model = GPT(layers, width, context).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(512, (batch, context + 1), device=args.device)

    def block(variant: Variant, steps: int) -> float:
        with variant.begin():
            start = time.process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                variant.after_backward(model)
                optimizer.step()
            if args.device != "cpu":
                torch.cuda.synchronize()
            return time.process_time() - start

    plain = Variant("plain")
    variants = [
        Variant("plain again"),
        watched("gradproof, default", model, None),
        watched("gradproof, gradients + weights + updates, every step", model, "parameters every step"),
        watched("gradproof, everything every step", model, "all every step"),
        Variant("norm().item() of each gradient", after_backward=norms_by_hand),
        Variant("histogram of each gradient", after_backward=histograms_by_hand),
        Variant("torch.autograd.detect_anomaly", lambda: torch.autograd.detect_anomaly(check_nan=True)),
    ]
    ratios: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for variant in [plain, *variants]:
        block(variant, args.steps)
    while variants[1].owed():  # the first quarter of a second is measured whole, once in a run
        block(variants[1], args.steps)
    for _ in range(args.rounds):
        base = block(plain, args.steps)
        for variant in variants:
            ratios[variant.name].append(block(variant, args.steps) / base)
    print(
        f"GPT, {layers} layers, d = {width}, {batch} × {context} tokens, {args.device}, torch {torch.__version__}"
    )
    print(f"plain step {1000 * base / args.steps:.1f} ms\n\n| variant | ratio to plain |\n|---|---|")
    for name, values in ratios.items():
        print(f"| {name} | {statistics.median(values):.3f} |")


if __name__ == "__main__":
    import warnings

    warnings.filterwarnings("ignore", message="Anomaly Detection")
    main()
