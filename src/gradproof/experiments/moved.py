"""Do the data stay what they were? The batch at which the loss leaps, against those of the steps recorded before."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.instruments.source import say_where_made

ID = "input-or-target-scale/moved"
FEWEST = 6  # steps before: of fewer, how much a batch may differ is not known
BEYOND = 2.0  # times the range of what they had, below or above it: chance goes by a part of that
EVEN = 0.1  # of their spread: batches that hardly differ are allowed as much
WINDOW = 80  # losses that tell what is usual
LEAPT, BY = 3.0, 0.2  # spreads of them, and of their size: the batch is looked at; by itself it is no finding


def have_the_data_moved(evidence: Evidence) -> Verdict | None:
    """Means and spreads of inputs and targets: those of calm steps are remembered, those of a leap compared."""
    flow, leap = evidence.flow, leapt(evidence.losses)
    slots = [*flow.inputs, *(comparison.target for comparison in flow.comparisons)]
    said = None
    for number, (slot, value) in enumerate(flow.values(slots).items()):
        if not value.is_floating_point() or value.numel() < 2:
            continue
        wide = value.double()
        now = {"mean": float(wide.mean()), "spread": float(wide.std())}
        known: list[dict[str, float]] = evidence.memory.setdefault(
            f"data {number} {tuple(value.shape[1:])}", []
        )
        if leap is None:
            known.append(now)
        elif len(known) >= FEWEST and (said is None or said.verdict == "excluded"):
            said = compared(evidence, slot, known, now, leap)
    return said


def leapt(losses: Sequence[float]) -> tuple[float, float] | None:
    """(what was usual, what it is now), where the last loss is far above those before."""
    before = sorted(losses[-WINDOW:-1])
    if len(before) < WINDOW // 2:
        return None
    usual, now = before[len(before) // 2], losses[-1]
    spread = before[-len(before) // 6] - before[len(before) // 6]
    return (usual, now) if now > usual + max(LEAPT * spread, BY * abs(usual)) else None


def compared(
    evidence: Evidence,
    slot: int,
    known: list[dict[str, float]],
    now: dict[str, float],
    leap: tuple[float, float],
) -> Verdict:
    usual = statistics.median(each["spread"] for each in known)
    for what in ("spread", "mean"):
        low, high = (end(each[what] for each in known) for end in (min, max))
        room = max(BEYOND * (high - low), EVEN * usual)
        if not low - room <= now[what] <= high + room:
            shape = list(evidence.slot(slot).shape)
            return confirmed(
                ID,
                f"the {what} of the numbers {shape} is {now[what]:.4g}; at the {len(known)} steps recorded before it "
                f"was {low:.4g} to {high:.4g}",
                f"the loss leaps with it, from {leap[0]:.4g} to {leap[1]:.4g}",
                *say_where_made(evidence, slot),
                where=evidence.flow.origin(slot),
                level="warning",
                confidence="likely",
                lasting=False,
            )
    return excluded(
        ID, f"where the loss leaps, inputs and targets have the size they had at {len(known)} steps before"
    )
