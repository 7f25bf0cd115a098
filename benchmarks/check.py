"""What a gradient check costs: gradproof against torch.autograd.gradcheck, and a whole model of 124 million.

python benchmarks/check.py            the table
python benchmarks/check.py --model    and the model, about half a minute and 6 GB
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradproof import check_gradient, check_module

INPUTS = 10_000


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# function and inputs, 10,000 numbers each; outputs are kept few enough for gradcheck's slow mode to end
FUNCTIONS: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
    "cross-entropy": (lambda x: F.cross_entropy(x, torch.arange(100)), (leaf(100, 100),)),
    "layer norm, tanh": (lambda x: F.layer_norm(x, (100,)).tanh().sum(-1), (leaf(100, 100),)),
    "linear": (F.linear, (leaf(4, 90), leaf(107, 90))),
    "attention": (
        lambda q, k, v: attention(q, k, v).sum(-1),
        (leaf(2, 52, 32), leaf(2, 52, 32), leaf(2, 52, 32)),
    ),
}


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """CPU time of the best of some runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def compare_with_gradcheck() -> None:
    print(
        f"| {INPUTS:,} inputs | gradproof | gradcheck, fast mode | gradcheck, slow mode | slow / gradproof |"
    )
    print("|---|---|---|---|---|")
    for name, (fn, inputs) in FUNCTIONS.items():
        own = seconds(lambda: check_gradient(fn, *inputs), 3)  # noqa: B023
        fast = seconds(lambda: torch.autograd.gradcheck(fn, inputs, fast_mode=True), 3)  # noqa: B023
        slow = seconds(lambda: torch.autograd.gradcheck(fn, inputs))  # noqa: B023
        print(f"| {name} | {1e3 * own:.0f} ms | {1e3 * fast:.0f} ms | {slow:.1f} s | {slow / own:.0f} × |")


class Block(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.up, self.act, self.down = (
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, channels = x.shape
        q, k, v = (z.view(batch, time, self.heads, -1).mT for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(attention(q.mT, k.mT, v.mT).reshape(batch, time, channels))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """The shape of GPT-2 small: 12 blocks of 768 channels, 50,257 tokens, 1,024 places, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.blocks = nn.Sequential(*(Block(768, 12) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def check_124_million() -> None:
    model = GPT2()
    tokens = torch.randint(50257, (1, 17))
    count = sum(p.numel() for p in model.parameters())
    start = time.process_time()
    table = check_module(model, (tokens[:, :-1], tokens[:, 1:]), lambda x, y: F.cross_entropy(x.mT, y))
    print(f"\n{count:,} parameters, 16 tokens: {time.process_time() - start:.0f} s of CPU time\n\n{table}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true", help="check a model of 124 million parameters too")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    compare_with_gradcheck()
    if options.model:
        check_124_million()
