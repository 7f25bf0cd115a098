"""What left its course, and when? Every series of a record, the loss and each statistic of each tensor, is tried for
the step at which it leaps, or begins to go another way, and stays there.

Where a training turns late, what went wrong shows first where it began: a weight that leaps two steps before the
loss, a gradient that dies out a thousand steps before. A course is a smooth curve (a cubic); to leave it is a
leap, a bend, or both, that is far beyond what the series strays by otherwise.

    find_departures(run)[0]     # absmax of weight blocks.1.down.weight leaps at step 15391: 0.31 before, 2.4e5 after
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradproof.diagnosis.curves import loss_turned
from gradproof.diagnosis.series import split, tracks
from gradproof.record.run import Run
from gradproof.record.schema import STATISTICS

COLUMNS = (
    "lr",
    "loss",
    "norm_before_clip",
    "grad_norm",
    "update_norm",
    "weight_norm",
    "cosine",
    "loss_scale",
)
SET = ("lr", "loss_scale")  # by the script: they go another way as it wants
SIZES, SHARES = ("norm", "absmax"), ("zero", "dead", "eps_share")
POINTS = 300  # of a series: enough to see a course, and quick to try every break of thousands of them
FEWEST = 16  # points of a series: a curve, a leap and a bend are fitted to them
EDGE = 3  # points on either side of a break: fewer may be a passing thing
REACH = (
    0.35  # of the run before the turn: the course that was left is the one of late, not of the first steps
)
LATE = 0.4  # of the run, where nothing turns: before, everything is on its way
CHANCE = 1e-10  # of a break that explains as much of normal noise: of thousands of series, each tried at every point
RECENT = 60  # points before a break: the line that they lie on is where it would have gone
FURTHER = (
    3.0  # times as far from that line as any of them: what wanders, as weights do, goes once or twice as far
)
NOTICED = 0.05  # of a series' size or of its range, or of all entries: less is nobody's trouble
DECADE = 0.18  # of a size's logarithm: half as much again, or a third less


@dataclass(frozen=True)
class Departure:
    """One series that leaves its course at a step, and stays off it."""

    what: str  # a column of steps.csv, or kind and name of a tensor
    statistic: str  # of a tensor
    last: int  # the last measured step at which it was on its course
    step: int  # the first at which it is off it
    before: float
    after: float
    leaps: bool
    strays: float  # how far it goes, by how far it has strayed before

    def __str__(self) -> str:
        name = f"{self.statistic} of {self.what}" if self.statistic else self.what
        how = "leaps" if self.leaps else "goes another way"
        when = (
            f"at step {self.step}"
            if self.last + 1 >= self.step
            else f"between steps {self.last} and {self.step}"
        )
        return f"{name} {how} {when}: {self.before:.4g} before, {self.after:.4g} after"


@dataclass(frozen=True)
class Bundle:
    """Series that were measured at the same steps."""

    steps: np.ndarray  # (points,)
    names: list[tuple[str, str]]  # (what, statistic)
    values: np.ndarray  # (points, series)


def find_departures(run: Run, around: int | None = None) -> list[Departure]:
    """What leaves its course about where the loss turns (or about another step), the first one first."""
    steps = run.steps["step"]
    if len(steps) < FEWEST:
        return []
    if around is None:
        around = next((symptom.step for symptom in loss_turned(run)), None)
    first = LATE * steps[-1] if around is None else around - REACH * steps[-1]
    found = [
        departure
        for bundle in (*bundles_of_steps(run, first), *bundles_of_tensors(run, first))
        for departure in departures(run, bundle)
    ]
    best: dict[str, Departure] = {}
    for departure in sorted(found, key=lambda each: -each.strays):
        best.setdefault(departure.what, departure)
    ranks = {name: place for place, name in enumerate(COLUMNS)}
    return sorted(best.values(), key=lambda each: (each.last, ranks.get(each.what, len(ranks)), -each.strays))


# the series -------------------------------------------------------------------------------------------------


def bundles_of_steps(run: Run, first: float) -> Iterator[Bundle]:
    """The columns of steps.csv from a step on, each point the middle one of many steps."""
    for track in tracks(run):
        rows = track.rows[track.steps >= first]
        size = max(1, len(rows) // POINTS)
        parts = rows[: len(rows) // size * size].reshape(-1, size)
        for column in COLUMNS if len(parts) >= FEWEST else ():
            values = run.steps[column][parts]
            known = np.isfinite(values).any(axis=1)
            if known.sum() >= FEWEST:
                points = np.array([np.median(row[np.isfinite(row)]) for row in values[known]])
                name = f"{column} of {track.label}" if track.label else column
                yield Bundle(run.steps["step"][parts[known, 0]], [(name, "")], points[:, None])


def bundles_of_tensors(run: Run, first: float) -> Iterator[Bundle]:
    """The statistics of tensors from a step on, by the tensors that were measured together."""
    frames = run.frames
    chosen = np.flatnonzero(frames.steps >= first)
    for rows in np.unique(frames.sizes[chosen]) if len(chosen) else ():
        alike = chosen[frames.sizes[chosen] == rows]
        alike = alike[np.linspace(0, len(alike) - 1, min(POINTS, len(alike))).round().astype(int)]
        layouts: dict[bytes, list[int]] = {}
        for place in alike if len(alike) >= FEWEST else ():
            layouts.setdefault(frames[int(place)].numbers.tobytes(), []).append(int(place))
        for places in layouts.values():
            if len(places) >= FEWEST:
                yield bundle_of(run, places)


def bundle_of(run: Run, places: list[int]) -> Bundle:
    """What frames with the same tensors have measured."""
    frames = [run.frames[place] for place in places]
    steps = np.array([frame.step for frame in frames])
    names, columns = [], []
    shape_of = {tensor["name"]: tensor["shape"] for tensor in run.tensors if tensor.get("shape")}
    for statistic in (*SIZES, *SHARES):
        values = np.stack([frame.values[:, STATISTICS.index(statistic)] for frame in frames])
        for row in np.flatnonzero(np.isfinite(values).all(axis=0)):
            tensor = run.tensors[int(frames[0].numbers[row])]
            entries = math.prod(shape_of.get(tensor["name"]) or [0]) if statistic == "zero" else 1
            if entries:  # zeros are counted
                columns.append(values[:, row] / entries)
                names.append((f"{tensor['kind'].replace('_', ' ')} {tensor['name']}", statistic))
    moving = [place for place, column in enumerate(columns) if np.ptp(column) > 0]
    values = np.stack([columns[place] for place in moving], axis=1) if moving else np.empty((len(steps), 0))
    return Bundle(steps, [names[place] for place in moving], values)


# breaks -----------------------------------------------------------------------------------------------------


def departures(run: Run, bundle: Bundle) -> Iterator[Departure]:
    values = bundle.values.astype(np.float64)
    scaled = np.empty_like(values)
    for place, (what, statistic) in enumerate(bundle.names):
        scaled[:, place] = on_its_scale(values[:, place], what, statistic)
    smooth = smoothed(scaled)
    for place, at in find_breaks(bundle.steps, smooth):
        what, statistic = bundle.names[place]
        strays, leaps = leaves_its_line(bundle.steps, smooth[:, place], at)
        if strays < FURTHER or not is_noticed(values[:, place], scaled[:, place], at, statistic):
            continue
        if what.startswith(SET) and not leaps:
            continue
        before, after = (float(np.median(part)) for part in around(values[:, place], at))
        last, step = int(bundle.steps[at - 1]), int(bundle.steps[at])
        if leaps and what in run.steps:
            step = first_step(run, what, last, step)
            last = step - 1
        yield Departure(what, statistic, last, step, before, after, leaps, strays)


def on_its_scale(values: np.ndarray, what: str, statistic: str) -> np.ndarray:
    """Sizes by their logarithm, numbers with a sign by a scale that bends for large ones, shares as they are."""
    if statistic in SHARES or what.startswith("cosine"):
        return values
    size = np.abs(values)
    if (values < 0).any():
        return np.arcsinh(values / (np.median(size) or size.max() or 1.0))
    floor = max(1e-9 * float(size.max()), 1e-30)
    return np.log10(np.maximum(size, floor))


def smoothed(values: np.ndarray) -> np.ndarray:
    """The middle one of each three neighbours: a single odd point is no course."""
    padded = np.concatenate([values[:1], values, values[-1:]])
    return np.median([padded[:-2], padded[1:-1], padded[2:]], axis=0)


def find_breaks(steps: np.ndarray, values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Of series (points, series), those that leave a smooth course, and the first point that is off it.

    >>> t = np.arange(100.0)
    >>> straight = t / 100 + 0.01 * np.sin(7.3 * t)
    >>> list(find_breaks(t, np.stack([straight, straight + (t >= 60)], axis=1)))
    [(1, 60)]
    """
    count, t = len(values), steps - steps[0]
    t = 2 * t / max(1e-9, float(t[-1])) - 1
    course, _ = np.linalg.qr(np.vander(t, 4))
    left = values - course @ (course.T @ values)
    gain, at = np.zeros(values.shape[1]), np.zeros(values.shape[1], dtype=int)
    for here in range(EDGE, count - EDGE + 1):
        broken = np.stack([t >= t[here], np.maximum(t - t[here], 0.0)], axis=1)
        part, _ = np.linalg.qr(broken - course @ (course.T @ broken))
        told = ((part.T @ left) ** 2).sum(axis=0)
        gain, at = np.maximum(gain, told), np.where(told > gain, here, at)
    whole = np.maximum((left**2).sum(axis=0), 1e-300)
    free = count - 6  # four numbers of the course, a leap and a bend
    # what an F of 2 and `free` degrees of freedom is beyond by chance
    chance = np.maximum(1 - gain / whole, 1e-12) ** (free / 2)
    yield from ((int(place), int(at[place])) for place in np.flatnonzero(chance < CHANCE))


def leaves_its_line(steps: np.ndarray, values: np.ndarray, at: int) -> tuple[float, bool]:
    """How far it goes from the line that it was on, by the farthest it had strayed from it; and whether at once."""
    recent = slice(max(0, at - RECENT), at)
    line = np.polynomial.Polynomial.fit(steps[recent], values[recent], 1)
    strayed = np.abs(values[recent] - line(steps[recent])).max() + 1e-9 * (1 + np.abs(values).max())
    away = np.abs(values[at:] - line(steps[at:]))
    far, at_once = np.median(away), np.median(away[:EDGE])
    return float(far / strayed), bool(at_once > max(FURTHER * strayed, far / 2))


def is_noticed(values: np.ndarray, scaled: np.ndarray, at: int, statistic: str) -> bool:
    """Whether it matters: a part of its size, a quarter of a weight, a twentieth of all units."""
    before, after = (float(np.median(part)) for part in around(scaled, at))
    if statistic in SHARES:
        return abs(after - before) > NOTICED
    if statistic in SIZES:
        return abs(after - before) > DECADE
    early = np.ptp(np.percentile(values[:at], (10, 90)))
    moved = abs(float(np.median(values[at:])) - float(np.median(values[:at])))
    return moved > NOTICED * max(float(np.median(np.abs(values))), early)


def around(values: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
    """Some points before a break, and as many behind it."""
    return values[max(0, at - 10) : at], values[at : at + 10]


def first_step(run: Run, column: str, low: int, high: int) -> int:
    """The very step, between two points of a series, from which a column is another."""
    steps = run.steps["step"]
    rows = np.flatnonzero((steps >= low) & (steps < 2 * high - low) & np.isfinite(run.steps[column]))
    return int(steps[rows[split(run.steps[column][rows])]]) if len(rows) > 4 else high
