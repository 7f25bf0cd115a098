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

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.instruments.update import named_parameters

ROOM = 4.0  # times the bound: a schedule may turn the betas while it trains
LEAST = 30.0  # the bound with the usual betas and room: whoever loads a state may go on with others
TINY = 1e-15  # a mean: of less, the mean of squares may be rounded to zero in float32
A_FEW = 8  # entries of a tensor: so many are a slip of memory, more are a state that was put together


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


def impossible_moments(evidence: Evidence) -> Verdict | None:
    found, looked_at = [], 0
    for name, line, mean, square, allowed in moments(evidence):
        looked_at += 1
        wrong = (square < 0) | ((mean.abs() > allowed * square.sqrt()) & (mean.abs() > TINY))
        if bool(wrong.any()):
            at = int(torch.where(wrong, mean.abs(), -1.0).argmax())
            place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), mean.shape))
            numbers = float(mean.flatten()[at]), float(square.flatten()[at])
            found.append(Impossible(name, line, int(wrong.sum()), mean.numel(), place, *numbers))
    if not looked_at:
        return None
    if not found:
        said = f"every entry of Adam's averages of {looked_at} tensors is one that gradients can make"
        return excluded("weights-state-error/impossible-moments", said)
    worst = max(found, key=lambda each: each.count / each.entries)
    few = all(each.count <= A_FEW for each in found)
    entry, most = f"{worst.name}{list(worst.place)}", bound(0.9, 0.999)
    return confirmed(
        "weights-state-error/impossible-moments",
        f"Adam's average of the gradient at {entry} is {worst.mean:.3g}, of its square {worst.square:.3g}: with the "
        f"usual betas no gradients make the first more than {most:.2g} times the root of the second",
        f"so it is with {worst.count} of {worst.entries} entries of {worst.name}"
        + (f" and with {len(found) - 1} other tensors" if found[1:] else ""),
        "single entries: something else has written into this memory, a library or the hardware"
        if few
        else "whole tensors: the two averages were not saved together, or one of them was set by itself",
        where=f"{worst.name}, {worst.line}" if worst.line else worst.name,
        confidence="proven",  # an inequality
    )


def overflown_state(evidence: Evidence) -> Verdict | None:
    """What was finite at an earlier step and is infinite now, while the weights are finite: it has outgrown its format.

    Who divides by the root of it moves these weights no more.
    """
    known: set[tuple[str, str]] = evidence.memory.setdefault("finite states", set())
    for name, line, key, value, weight in states(evidence):
        infinite = torch.isinf(value)
        if not bool(infinite.any()):
            known.add((name, key))
        elif (name, key) in known and bool(torch.isfinite(weight).all()):
            count = int(infinite.sum())
            return confirmed(
                "low-precision-error/state-overflow",
                f"{count} of {value.numel()} entries of the optimizer's {key!r} of {name} are infinite "
                f"({value.dtype}); at an earlier step none was, and the weights are finite",
                where=f"{name}, {line}" if line else name,
                confidence="proven",  # it is infinite, and was not
            )
    return None


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
