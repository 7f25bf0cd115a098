"""The second witness of a wrong gradient: a difference quotient in float64, along the error that was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradproof.tape.pattern import wide

DERIVATIVE = "its derivative in float64"
DIFFERENCE = "a difference quotient in float64"
STEPS = (
    1e-4,
    1e-5,
    1e-6,
    1e-7,
)  # of the operand's own size: truncation is their square, rounding 1e-16 over them
SURE = 0.25  # of the error: two quotients that are nearer together, and nearer to the derivative, decide


def second_witness(
    outputs_at: Callable[[Tensor], Sequence[Tensor | None]],
    weights: Sequence[Tensor | None],
    at: Tensor,
    got: Tensor | None,
    derived: Tensor,
) -> bool | None:
    """Does a difference quotient side with the derivative (True), or with what came back (False)? None: it cannot say.

    `outputs_at(x)` is the taped forward in float64, `weights` the gradients that came in. The direction is that of the
    error: along it the two slopes are farthest apart, and one number decides between them.
    """
    if at.is_complex() or (got is not None and got.shape != derived.shape):
        return None
    error = wide(torch.zeros_like(derived) if got is None else got) - wide(derived)
    apart = float(torch.linalg.vector_norm(error))
    if not math.isfinite(apart) or apart == 0:
        return None
    direction = error / apart
    slope = float((wide(derived) * direction).sum())
    size = float(torch.linalg.vector_norm(at.double())) or math.sqrt(at.numel())
    before = None
    for step in STEPS:
        quotient = _quotient(outputs_at, weights, at.double(), direction, step * size)
        if quotient is None:
            return None
        if before is not None and abs(quotient - before) <= SURE * apart / 2:
            return abs(quotient - slope) <= SURE * apart
        before = quotient
    return None


def _quotient(
    outputs_at: Callable, weights: Sequence[Tensor | None], at: Tensor, direction: Tensor, step: float
) -> float | None:
    """Σ⟨g, F(x + hv) − F(x − hv)⟩ / 2h: differences first, so that what does not change does not round."""
    try:
        with torch.no_grad():
            plus, minus = outputs_at(at + step * direction), outputs_at(at - step * direction)
    except Exception:
        return None  # what cannot be run has nothing to say
    total = 0.0
    for ahead, behind, weight in zip(plus, minus, weights, strict=False):
        if weight is not None:
            if ahead is None or behind is None or ahead.dtype != torch.float64:
                return None
            total += float((weight.double() * (ahead - behind)).sum())
    return total / (2 * step) if math.isfinite(total) else None
