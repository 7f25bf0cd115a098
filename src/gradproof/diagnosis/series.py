"""Reads curves: does a loss fall, jump, oscillate or stand still? Robust against noise, NaN and short runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradproof.record.run import Run

PIECE = 20_000  # values that are looked at together
TURNED = 6.0  # times what neighbouring medians move by: of fifty of them, chance moves none so far
HARDLY = 0.03  # of a loss: a rise by less is nobody's trouble


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
    end: float  # the last points alone: a run can be on its way back when it ends
    opening: float  # the first point of all

    @property
    def fell(self) -> bool:
        """The end is below the beginning by more than the noise explains."""
        return not self.rose and self.first - self.last > max(2 * self.noise, 1e-3 * abs(self.first))

    @property
    def rose(self) -> bool:
        """The end is above the beginning by more than the noise explains."""
        # two medians of normal noise lie 7 × noise apart once in some thousand flat runs, of spiky noise in 200
        return self.leapt or self.last - self.first > max(7 * self.noise, 2e-2 * abs(self.first))

    @property
    def leapt(self) -> bool:
        """It has left its first points far behind, perhaps within its first tenth; not where it began as high."""
        far = self.last > 3 * abs(self.start) and self.last - self.start > 7 * self.noise
        return far and self.last > self.opening

    @property
    def beginning(self) -> float:
        """What the end is above, where it rose: the first tenth, or where that had leapt already, the first points."""
        return self.start if self.leapt and self.start < self.first else self.first


def trend(values: np.ndarray) -> Trend | None:
    """The trend of the finite part of a curve; None where there are under 8 points."""
    values = values[np.isfinite(values)]
    if len(values) < 8:
        return None
    window = min(max(6, len(values) // 20 * 2), len(values) // 3)  # even: an oscillation has no trend
    first, last = float(np.median(values[:window])), float(np.median(values[-window:]))
    smooth = _running_means(values, window)
    # noise: how far points lie from their neighbours, not from the trend
    spread = float(np.median(np.abs(np.diff(values)))) if len(values) > 2 else 0.0
    return Trend(
        float(np.median(values[:3])),
        first,
        last,
        float(smooth.min()),
        spread / np.sqrt(window),
        len(values),
        float(np.median(values[-3:])),
        float(values[0]),
    )


def _running_means(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of every `window` values in a row, in one pass whatever the window."""
    unit = float(np.abs(values).max()) or 1.0  # so that no sum overflows
    sums = np.concatenate([[0.0], np.cumsum(values / unit)])
    return unit * (sums[window:] - sums[:-window]) / window


@dataclass(frozen=True)
class Turn:
    """Where a curve that had fallen leaps or begins to rise, for good: a place, what it was before and is after."""

    place: int
    before: float
    after: float
    leaps: bool


def turn(values: np.ndarray) -> Turn | None:
    """The largest leap from one fiftieth of a curve to the next that its noise does not explain; or else its lowest
    one, where the end is far above it.

    >>> curve = np.concatenate([np.linspace(2, 1, 900), np.linspace(1.6, 1.7, 100)])
    >>> turn(curve + np.tile([0.0, 0.1], 500)).place, turn(curve[:900])
    (900, None)
    """
    known = np.flatnonzero(np.isfinite(values))
    size = max(20, len(known) // 50)
    parts = values[known[: len(known) // size * size]].reshape(-1, size)
    if len(parts) < 10:
        return None
    middles = np.median(parts, axis=1)
    moves = np.diff(middles)
    noise = 1.5 * float(np.median(np.abs(moves - np.median(moves)))) + 1e-12
    if not middles[-1] - middles.min() > max(TURNED * noise, HARDLY * abs(middles.min())):
        return None  # in the end it is where it had been before
    over_two = middles[2:] - middles[:-2]  # a leap may fall into the middle of one
    at, lowest = int(over_two.argmax()), int(middles.argmin())
    if over_two[at] > TURNED * noise and at + 1 >= lowest:
        place = at * size + split(parts[at : at + 3].ravel())
        return Turn(int(known[place]), float(middles[at]), float(np.median(middles[at + 2 :])), True)
    return Turn(int(known[lowest * size + size // 2]), float(middles[lowest]), float(middles[-1]), False)


def split(values: np.ndarray) -> int:
    """Where the means before and after lie farthest apart, for what chance moves them by."""
    places = np.arange(2, len(values) - 1)
    sums = np.cumsum(values)
    before, after = sums[places - 1] / places, (sums[-1] - sums[places - 1]) / (len(values) - places)
    return int(places[np.argmax(np.abs(after - before) * np.sqrt(places * (len(values) - places)))])


def calls(run: Run, letter: str) -> np.ndarray:
    """How often something was called at each step; the letters are those of the column `order`."""
    orders = run.steps["order"]
    counts = {order: order.count(letter) for order in set(orders)}
    return np.array([counts[order] for order in orders], dtype=np.int64)


def spikes(values: np.ndarray, steps: np.ndarray, window: int = 50) -> list[tuple[int, float, float]]:
    """Values far above what came before: (step, value, usual value). The new value never judges itself."""
    found = []
    for start in range(0, len(values), PIECE):
        end = min(start + PIECE, len(values))
        # the values before each, as rows; there are none before the first
        padded = np.concatenate(
            [np.full(max(0, window - start), np.nan), values[max(0, start - window) : end]]
        )
        before = np.lib.stride_tricks.sliding_window_view(padded, window)[: end - start]
        known = np.isfinite(before)
        judged = (known.sum(axis=1) >= 10) & np.isfinite(values[start:end])
        usual = _medians(before, known, judged)
        for row in np.flatnonzero(judged & (values[start:end] > np.where(usual > 0, 1.5, 1.0) * usual)):
            value, middle = float(values[start + row]), float(usual[row])
            spread = float(np.median(np.abs(before[row][known[row]] - middle))) + 1e-3 * abs(middle) + 1e-12
            if value - middle > 12 * spread and value > 1.5 * middle:
                found.append((int(steps[start + row]), value, middle))
    return found


def _medians(rows: np.ndarray, known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The median of what is known of each row; NaN where it is not wanted."""
    found = np.full(len(rows), np.nan)
    whole = known.all(axis=1) & wanted
    found[whole] = np.median(rows[whole], axis=1)
    for row in np.flatnonzero(wanted & ~whole):
        found[row] = np.median(rows[row][known[row]])
    return found


def first_nonfinite(values: np.ndarray, seen: np.ndarray) -> int | None:
    """The place of the first value that was measured and is not finite."""
    bad = np.flatnonzero(seen & ~np.isfinite(values))
    return int(bad[0]) if len(bad) else None
