"""Ways to add up a tensor along a dimension, each in the tensor's own precision and with its error bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gradproof.numerics.formats import format_of

BLOCK = 128  # of blocked_sum


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(s, e) with s = round(a + b) and s + e = a + b exactly (Knuth)."""
    s = a + b
    of_b = s - a
    return s, (a - (s - of_b)) + (b - of_b)


def two_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(p, e) with p = round(a * b) and p + e = a * b exactly, barring overflow and underflow (Dekker)."""
    p = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a sum of two numbers of half its digits (Veltkamp)."""
    carried = x * (2 ** math.ceil(format_of(x.dtype).digits / 2) + 1)
    high = carried - (carried - x)
    return high, x - high


def naive_sum(x: Tensor, dim: int = -1) -> Tensor:
    """One after the other, each partial sum rounded."""
    total = torch.zeros_like(x.select(dim, 0)) if x.shape[dim] else x.sum(dim)
    for term in x.unbind(dim):
        total = total + term
    return total


def kahan_sum(x: Tensor, dim: int = -1) -> Tensor:
    """One after the other; what each addition lost is given to the next."""
    total = lost = torch.zeros_like(x.sum(dim))
    for term in x.unbind(dim):
        more = term - lost
        together = total + more
        lost = (together - total) - more
        total = together
    return total


def neumaier_sum(x: Tensor, dim: int = -1) -> Tensor:
    """One after the other; what the additions lost is summed beside, so that no term is too large for it."""
    total = lost = torch.zeros_like(x.sum(dim))
    for term in x.unbind(dim):
        total, error = two_sum(total, term)
        lost = lost + error
    return total + lost


def pairwise_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Neighbours added until one is left."""
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        even = x.shape[-1] // 2 * 2
        x = torch.cat([x[..., 0:even:2] + x[..., 1:even:2], x[..., even:]], -1)
    return x.sum(-1)


def blocked_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Blocks of 128 one after the other, then their sums one after the other."""
    x = x.movedim(dim, -1)
    short = -x.shape[-1] % BLOCK
    blocks = (
        torch.nn.functional.pad(x, (0, short)).unflatten(-1, (-1, BLOCK)) if x.shape[-1] else x[..., None]
    )
    return naive_sum(naive_sum(blocks))


def error_bound(method: Callable, n: int, dtype: torch.dtype) -> float:
    """Largest |error| of a sum of n terms, relative to the sum of their magnitudes (Higham, chapter 4)."""
    u = format_of(dtype).eps / 2
    steps = {
        naive_sum: n - 1,
        pairwise_sum: math.ceil(math.log2(max(n, 1))),
        blocked_sum: BLOCK - 1 + math.ceil(n / BLOCK) - 1,
    }
    if method in steps:
        return _gamma(max(steps[method], 0), u)
    if method is kahan_sum:
        return 2 * u + 4 * n * u * u
    if method is neumaier_sum:
        return u + 2 * _gamma(n, u) ** 2  # the rounding of the result, and the errors' own errors
    raise ValueError(f"{method} is not one of the sums of this file")


def _gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u) if n * u < 1 else math.inf


def condition_of_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum of magnitudes over magnitude of the sum: what relative errors of the terms grow by."""
    wide = x.double()
    return wide.abs().sum(dim) / wide.sum(dim).abs()


def dynamic_range(x: Tensor) -> float:
    """Powers of two between the largest and the smallest entry that is not zero; 0 for nothing."""
    sizes = x.double().abs()
    sizes = sizes[(sizes > 0) & sizes.isfinite()]
    return math.log2(sizes.max().item() / sizes.min().item()) if len(sizes) else 0.0


SUMS = (naive_sum, blocked_sum, pairwise_sum, kahan_sum, neumaier_sum)
