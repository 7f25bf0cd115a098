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
    def factor(self) -> float:
        return max(self.last / self.first, self.first / self.last)

    def __str__(self) -> str:
        return (
            f"the {self.way} gain of {self.path} went from {self.first:.2g} at step {self.first_step} "
            f"to {self.last:.2g} at step {self.last_step}"
        )


def find_gain_change(run: Run) -> GainChange | None:
    """The largest change from a module's first known gain to its last, if it is a large one."""
    changes = list(gain_changes(run))
    largest = max(changes, key=lambda change: change.factor, default=None)
    return largest if largest is not None and largest.factor >= GROWN else None


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


def placed_by_gain(findings: list[Finding], run: Run) -> list[Finding]:
    """Findings about a growing or dying signal, with the place where gain changed most; the others as they are."""
    change = find_gain_change(run)
    if change is None:
        return findings
    return [
        replace(finding, where=change.path, evidence=(*finding.evidence, str(change)))
        if finding.family in ("exploding-signal", "vanishing-signal")
        else finding
        for finding in findings
    ]
