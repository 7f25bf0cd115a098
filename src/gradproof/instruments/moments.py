"""Can gradients have made what an optimizer remembers? Finite ones make nothing infinite, and Adam's two averages are
of the same gradients, and bind each other.

By Cauchy and Schwarz |m| ≤ (1 - β₁) / √((1 - β₂)(1 - β₁² / β₂)) · √v, entry by entry, whatever the gradients were: 7.3
times with the usual betas. What is beyond that was written by somebody else: a memory that lost a bit, a library that
writes where it must not, a checkpoint whose parts do not belong together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import named_parameters

ROOM = 4.0  # times the bound: a schedule may turn the betas while it trains
LEAST = 30.0  # the bound with the usual betas and room: whoever loads a state may go on with others
TINY = 1e-15  # a mean: of less, the mean of squares may be rounded to zero in float32


@dataclass(frozen=True)
class Impossible:
    """Of one parameter: entries that no gradients make, and the worst of them."""

    name: str
    line: str
    count: int
    entries: int
    place: tuple[int, ...]
    mean: float
    square: float


def beyond_the_bound(evidence: Evidence) -> tuple[list[Impossible], int]:
    """What no gradients make, the tensors with most of it first; and how many tensors were looked at."""
    found, looked_at = [], 0
    for name, line, mean, square, allowed in moments(evidence):
        looked_at += 1
        wrong = (square < 0) | ((mean.abs() > allowed * square.sqrt()) & (mean.abs() > TINY))
        if bool(wrong.any()):
            at = int(torch.where(wrong, mean.abs(), -1.0).argmax())
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), mean.shape))
            numbers = float(mean.flatten()[at]), float(square.flatten()[at])
            found.append(Impossible(name, line, int(wrong.sum()), mean.numel(), place, *numbers))
    return sorted(found, key=lambda each: -each.count / each.entries), looked_at


def outgrown(evidence: Evidence) -> Iterator[tuple[str, str, str, Tensor]]:
    """What was finite at an earlier step and is infinite now, while its weight is finite: name, line, key, tensor."""
    known: set[tuple[str, str]] = evidence.memory.setdefault("finite states", set())
    for name, line, key, value, weight in states(evidence):
        if not bool(torch.isinf(value).any()):
            known.add((name, key))
        elif (name, key) in known and bool(torch.isfinite(weight).all()):
            yield name, line, key, value


def states(evidence: Evidence) -> Iterator[tuple[str, str, str, Tensor, Tensor]]:
    """All that optimizers remember of their parameters, entry by entry or row by row."""
    names = {id(parameter): name for name, parameter in named_parameters(evidence).items()}
    for optimizer in evidence.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(parameter, Tensor) else ():
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.dim()
                    and not value.is_meta
                ):
                    yield names.get(id(parameter), "a parameter"), optimizer.line, str(key), value, parameter


def moments(evidence: Evidence) -> Iterator[tuple[str, str, Tensor, Tensor, float]]:
    """Of all parameters that an Adam holds, those that wait for their turn, too: both averages, and what is allowed."""
    names = {id(parameter): name for name, parameter in named_parameters(evidence).items()}
    for optimizer in evidence.optimizers:
        for group in optimizer.param_groups:
            betas = group.get("betas") or ()
            if len(betas) != 2 or not all(isinstance(beta, float) for beta in betas):
                continue
            allowed = max(LEAST, ROOM * bound(*betas))
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                mean, square = state.get("exp_avg"), state.get("exp_avg_sq")
                if is_wide(mean) and is_wide(square) and mean.shape == square.shape:
                    yield names.get(id(parameter), "a parameter"), optimizer.line, mean, square, allowed


def is_wide(tensor: Any) -> bool:
    """One whose small numbers are not rounded away."""
    return (
        isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64) and tensor.numel() > 0
    )


def bound(first: float, second: float) -> float:
    """How many times the root of the mean square a mean can be, at most.

    >>> round(bound(0.9, 0.999), 2), bound(0.99, 0.9)
    (7.27, inf)
    """
    if not first**2 < second < 1:
        return math.inf
    return (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
