"""Where did the signal begin to grow or to die? The module whose gain has changed most between taped steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradproof.diagnosis.findings import Finding
from gradproof.record.run import Run

GROWN = 2.0  # a smaller change is what training does anyway


@dataclass(frozen=True)
class GainChange:
    """One module's gain at two steps."""

    path: str
    way: str  # forward or backward
    first_step: int
    first: float
    last_step: int
    last: float

    @property
    def growth(self) -> float:
        return self.last / self.first

    def __str__(self) -> str:
        return (
            f"the {self.way} gain of {self.path} went from {self.first:.2g} at step {self.first_step} "
            f"to {self.last:.2g} at step {self.last_step}"
        )


def find_gain_change(run: Run, growing: bool = True) -> GainChange | None:
    """The largest growth (or fall) from a module's first known gain to its last, if it is a large one."""
    factors = {change: change.growth if growing else 1 / change.growth for change in gain_changes(run)}
    largest = max(factors, key=factors.__getitem__, default=None)
    return largest if largest is not None and factors[largest] >= GROWN else None


def gain_changes(run: Run) -> Iterator[GainChange]:
    first: dict[tuple[str, str], tuple[int, float]] = {}
    last: dict[tuple[str, str], tuple[int, float]] = {}
    for event in run.events:
        for path, gains in event.get("modules", {}).items() if event.get("event") == "gains" else ():
            for way in ("forward", "backward"):
                gain = gains.get(way)
                if isinstance(gain, (int, float)) and gain > 0 and math.isfinite(gain):
                    first.setdefault((path, way), (event["step"], gain))
                    last[(path, way)] = (event["step"], gain)
    for (path, way), (step, gain) in last.items():
        yield GainChange(path, way, *first[(path, way)], step, gain)


def placed_by_gain(finding: Finding, run: Run) -> Finding:
    """A finding about a growing or dying signal, with the place where gain changed most; others as they are.

    An experiment that has followed the signal from block to block has named the place by gain already.
    """
    if finding.family not in ("exploding-signal", "vanishing-signal"):
        return finding
    change = find_gain_change(run, growing=finding.family == "exploding-signal")
    if change is None:
        return finding
    where = finding.where if finding.confidence == "proven" else change.path
    return replace(finding, where=where, evidence=(*finding.evidence, str(change)))
