"""What format and order of summation do to a softmax cross-entropy: each way beside an exact reference."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.numerics.summation import kahan_sum, naive_sum, neumaier_sum, pairwise_sum

DIGITS = 40  # of the reference
KINDS = ("realistic", "peaked", "adversarial")

# a way to compute: logits (V,) in float32 and a target -> (sum of exp(x - max), loss, gradient)
Way = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Errors:
    """Relative errors of one way at one vocabulary; the gradient's is relative to its largest entry."""

    way: str
    vocab: int
    denominator: float
    loss: float
    confident_loss: float  # of a target that is 15 ahead of the rest
    gradient: float


def make_logits(kind: str, vocab: int) -> Tensor:
    """Logits in float32: realistic (normal, std 3), peaked (one of 20) or adversarial (tiny terms)."""
    if kind == "realistic":
        return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "peaked":
        return torch.zeros(vocab).index_fill(0, torch.tensor([vocab // 2]), 20.0)
    if (
        kind == "adversarial"
    ):  # each of the many is just under half an ulp of the first: a running sum drops it
        return torch.full((vocab,), math.log(2.0**-24) - 0.01).index_fill(0, torch.tensor([0]), 0.0)
    raise UserError(f"logits are {kind!r}; they are one of {', '.join(KINDS)}, or a file that ends in .npy")


def read_logits(path: str) -> Tensor:
    """One row of logits from a .npy file."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read logits from {path}: {error}") from error
    if array.size == 0 or not np.issubdtype(array.dtype, np.floating) or not np.isfinite(array).all():
        raise UserError(
            f"{path} holds {array.dtype} of shape {array.shape}; it must be finite floats, one row"
        )
    return torch.from_numpy(array.astype(np.float32)).flatten()


def _by_sum(dtype: torch.dtype, add: Callable[[Tensor], Tensor], subtract_max: bool = True) -> Way:
    def way(logits: Tensor, target: int) -> tuple[Tensor, Tensor, Tensor]:
        x = logits.to(dtype)
        largest = x.max() if subtract_max else torch.zeros((), dtype=dtype)
        e = torch.exp(x - largest)
        d = add(e)
        loss = d.log() - (x[target] - largest)
        gradient = e / d
        gradient[target] -= 1
        return d * torch.exp(largest - x.max()), loss, gradient

    return way


def _by_torch(logits: Tensor, target: int) -> tuple[Tensor, Tensor, Tensor]:
    x = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(x[None], torch.tensor([target]))
    loss.backward()
    assert x.grad is not None
    return torch.exp(torch.logsumexp(logits, 0) - logits.max()), loss.detach(), x.grad


WAYS: tuple[tuple[str, Way], ...] = (
    ("float32, one after the other", _by_sum(torch.float32, naive_sum)),
    ("float32, max not subtracted", _by_sum(torch.float32, naive_sum, subtract_max=False)),
    ("float32, pairwise", _by_sum(torch.float32, pairwise_sum)),
    ("float32, Kahan", _by_sum(torch.float32, kahan_sum)),
    ("float32, Neumaier", _by_sum(torch.float32, neumaier_sum)),
    ("bfloat16, one after the other", _by_sum(torch.bfloat16, naive_sum)),
    ("float64, one after the other", _by_sum(torch.float64, naive_sum)),
    ("torch cross_entropy, float32", _by_torch),
)


def exact_cross_entropy(
    logits: Sequence[float], target: int
) -> tuple[decimal.Decimal, decimal.Decimal, list[decimal.Decimal]]:
    """Sum of exp(x - max), loss and gradient to 40 digits."""
    with decimal.localcontext() as context:
        context.prec = DIGITS
        x = [decimal.Decimal(number) for number in logits]
        largest = max(x)
        known: dict[decimal.Decimal, decimal.Decimal] = {}
        e = [known[u] if u in known else known.setdefault(u, (u - largest).exp()) for u in x]
        d = sum(e, decimal.Decimal(0))
        others = d - e[target]
        gradient = [number / d for number in e]
        gradient[target] = -others / d
        return d, (1 + others / e[target]).ln() if others else decimal.Decimal(0), gradient


def compare_ways(logits: Tensor, ways: Sequence[tuple[str, Way]] = WAYS) -> list[Errors]:
    """The errors of each way for one row of logits, with a target of median size and with a confident one."""
    target = int(logits.argsort()[len(logits) // 2])
    ahead = logits.clone()
    ahead[target] = logits.max() + 15
    d, loss, gradient = exact_cross_entropy(logits.tolist(), target)
    confident = exact_cross_entropy(ahead.tolist(), target)[1]
    exact = torch.tensor([float(g) for g in gradient], dtype=torch.float64)
    found = []
    for name, way in ways:
        got_d, got_loss, got_gradient = way(logits, target)
        off = (got_gradient.double() - exact).abs().max() / exact.abs().max()
        losses = (_relative(got_loss, loss), _relative(way(ahead, target)[1], confident))
        found.append(Errors(name, len(logits), _relative(got_d, d), *losses, off.item()))
    return found


def _relative(got: Tensor, exact: decimal.Decimal) -> float:
    number = got.item()
    if not math.isfinite(number):
        return math.inf
    return float(abs(decimal.Decimal(number) - exact) / abs(exact)) if exact else abs(number)


def render_errors(errors: Sequence[Errors]) -> str:
    """A table for each vocabulary, with the loss's error as a bar: a mark is half a digit."""
    lines = []
    for vocab in dict.fromkeys(e.vocab for e in errors):
        lines += [
            f"vocabulary {vocab}",
            f"  {'':30} {'sum of exp':>10} {'gradient':>10} {'confident':>10} {'loss':>10}",
        ]
        for e in (e for e in errors if e.vocab == vocab):
            numbers = " ".join(f"{n:10.1e}" for n in (e.denominator, e.gradient, e.confident_loss, e.loss))
            lines.append(f"  {e.way:30} {numbers}  {_bar(e.loss)}")
        lines.append("")
    lines += [
        "Relative errors; the gradient's relative to its largest entry. confident: the loss of a target 15",
        "ahead of the rest. The sum of exp of the last two is from their log-sum-exp. The bar is the error",
        "of the loss, from 1e-17; a mark is half a digit.",
    ]
    return "\n".join(lines)


def _bar(error: float) -> str:
    if error == 0:
        return ""
    return "#" * max(0, round(2 * (math.log10(min(error, 1.0)) + 17)))
