"""Do the data stay what they were? The batch at which the loss leaps, against those of the steps recorded before."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradproof.instruments.evidence import Evidence

FEWEST = 6  # steps before: of fewer, how much a batch may differ is not known
BEYOND = 2.0  # times the range of what they had, below or above it: chance goes by a part of that
EVEN = 0.1  # of their spread: batches that hardly differ are allowed as much
WINDOW = 80  # losses that tell what is usual
LEAPT, BY = 3.0, 0.2  # spreads of them, and of their size: the batch is looked at; by itself it is no finding


@dataclass(frozen=True)
class Held:
    """The data of a step at which the loss leaps, against those recorded before: what is out of its range, if any."""

    slot: int
    what: str  # mean, spread, or nothing
    now: float
    low: float
    high: float
    steps: int
    usual_loss: float
    loss: float


def hold_against_before(evidence: Evidence) -> Held | None:
    """Means and spreads of inputs and targets: those of calm steps are remembered, those of a leap compared."""
    flow, leap = evidence.flow, leapt(evidence.losses)
    targets = [comparison.target for comparison in flow.comparisons if not flow.is_learned(comparison.target)]
    slots = [*flow.inputs, *targets]
    found = None
    for number, (slot, value) in enumerate(flow.values(slots).items()):
        if not value.is_floating_point() or value.numel() < 2:
            continue
        wide = value.double()
        now = {"spread": float(wide.std()), "mean": float(wide.mean())}
        known: list[dict[str, float]] = evidence.memory.setdefault(
            f"data {number} {tuple(value.shape[1:])}", []
        )
        if leap is None:
            known.append(now)
        elif len(known) >= FEWEST and (found is None or not found.what):
            found = compared(slot, known, now, leap)
    return found


def leapt(losses: Sequence[float]) -> tuple[float, float] | None:
    """(what was usual, what it is now), where the last loss is far above those before."""
    before = sorted(losses[-WINDOW:-1])
    if len(before) < WINDOW // 2:
        return None
    usual, now = before[len(before) // 2], losses[-1]
    spread = before[-len(before) // 6] - before[len(before) // 6]
    return (usual, now) if now > usual + max(LEAPT * spread, BY * abs(usual)) else None


def compared(
    slot: int, known: list[dict[str, float]], now: dict[str, float], leap: tuple[float, float]
) -> Held:
    usual = statistics.median(each["spread"] for each in known)
    for what, value in now.items():
        low, high = (end(each[what] for each in known) for end in (min, max))
        room = max(BEYOND * (high - low), EVEN * usual)
        if not low - room <= value <= high + room:
            return Held(slot, what, value, low, high, len(known), *leap)
    return Held(slot, "", 0.0, 0.0, 0.0, len(known), *leap)
