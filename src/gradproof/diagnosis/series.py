"""Reads curves: does a loss fall, jump, oscillate or stand still? Robust against noise, NaN and short runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradproof.record.run import Run


@dataclass(frozen=True)
class Track:
    """The steps of one optimizer: a GAN has two, and their losses are two curves."""

    label: str
    rows: np.ndarray  # places in run.steps
    steps: np.ndarray
    loss: np.ndarray
    lr: np.ndarray


def tracks(run: Run) -> Iterator[Track]:
    """One track for each optimizer that stepped, in the order of their first step."""
    columns = run.steps
    owner = np.nan_to_num(columns["optimizer"], nan=0)
    names = [o.get("name", "") for o in run.info.get("optimizers", [])]
    numbers = np.unique(owner)
    for number in numbers:
        rows = np.flatnonzero(owner == number)
        label = names[int(number)] if len(numbers) > 1 and int(number) < len(names) else ""
        yield Track(label, rows, columns["step"][rows], columns["loss"][rows], columns["lr"][rows])


@dataclass(frozen=True)
class Trend:
    """Where a curve began, where it ended, its best, and how far a median of its points is to be trusted."""

    start: float  # the first points alone: a run can leap away within its first tenth
    first: float
    last: float
    best: float
    noise: float
    points: int

    @property
    def fell(self) -> bool:
        """The end is below the beginning by more than the noise explains."""
        return not self.rose and self.first - self.last > max(2 * self.noise, 1e-3 * abs(self.first))

    @property
    def rose(self) -> bool:
        """The end is above the beginning by more than the noise explains."""
        # two medians of normal noise lie 7 × noise apart once in some thousand flat runs, of spiky noise in 200
        leapt = self.last > 3 * abs(self.start) and self.last - self.start > 7 * self.noise
        return leapt or self.last - self.first > max(7 * self.noise, 2e-2 * abs(self.first))


def trend(values: np.ndarray) -> Trend | None:
    """The trend of the finite part of a curve; None where there are under 8 points."""
    values = values[np.isfinite(values)]
    if len(values) < 8:
        return None
    window = min(max(6, len(values) // 20 * 2), len(values) // 3)  # even: an oscillation has no trend
    first, last = float(np.median(values[:window])), float(np.median(values[-window:]))
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    # noise: how far points lie from their neighbours, not from the trend
    spread = float(np.median(np.abs(np.diff(values)))) if len(values) > 2 else 0.0
    return Trend(
        float(np.median(values[:3])), first, last, float(smooth.min()), spread / np.sqrt(window), len(values)
    )


def spikes(values: np.ndarray, steps: np.ndarray, window: int = 50) -> list[tuple[int, float, float]]:
    """Values far above what came before: (step, value, usual value). The new value never judges itself."""
    found = []
    for index in range(10, len(values)):
        before = values[max(0, index - window) : index]
        before = before[np.isfinite(before)]
        if len(before) < 10 or not np.isfinite(values[index]):
            continue
        usual = float(np.median(before))
        spread = float(np.median(np.abs(before - usual))) + 1e-3 * abs(usual) + 1e-12
        if values[index] - usual > 12 * spread and values[index] > 1.5 * usual:
            found.append((int(steps[index]), float(values[index]), usual))
    return found


def first_nonfinite(values: np.ndarray, seen: np.ndarray) -> int | None:
    """The place of the first value that was measured and is not finite."""
    bad = np.flatnonzero(seen & ~np.isfinite(values))
    return int(bad[0]) if len(bad) else None
