"""Makes long records short enough to be drawn, without losing what matters: the extremes of every stretch are kept."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from gradproof.record.run import Run
from gradproof.record.schema import STATISTICS

PLACE = {name: place for place, name in enumerate(STATISTICS)}
NOT_MEASURED = -1.0  # no size is negative; a NaN is a NaN

# What is kept of each tensor in each stretch of steps: its size (see `sizes`) at its highest and lowest, the rest as
# it was last. The third of each is the statistic that only some kinds have: cosine, ε share, dead units.
EXTRA = {"gradient": "cosine", "adam_v": "eps_share", "output": "dead"}
DETAILS = ("min", "max", "mean", "std", "zero", "extra")


def thin_curve(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about `most` points of a curve: of each stretch its lowest, its highest and its first non-finite one.

    >>> thin_curve(np.arange(9), np.array([0, 0, 0, 0, 9.0, 0, 0, 0, 0]), 6)[1]
    array([0., 9., 0., 0.])
    """
    count = len(values)
    if count <= most:
        return steps, values
    edges = np.linspace(0, count, most // 2, dtype=np.int64)  # two points a stretch
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, count - 1}
    for start, end in itertools.pairwise(edges):
        if finite[start:end].any():
            kept.update((start + int(np.argmin(low[start:end])), start + int(np.argmax(high[start:end]))))
        if not finite[start:end].all():
            kept.add(start + int(np.argmin(finite[start:end])))
    places = np.array(sorted(kept))
    return steps[places], values[places]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the finite values around each place; nan where there is none."""
    finite = np.isfinite(values)
    ones = np.ones(max(1, window))
    count = np.convolve(finite, ones, mode="same")
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.convolve(np.where(finite, values, 0.0), ones, mode="same") / count


@dataclass(frozen=True)
class History:
    """All tensors over stretches of measured steps: `high[t, b]` of tensor t from step first[b] to last[b]."""

    first: np.ndarray  # (bins,)
    last: np.ndarray
    high: np.ndarray  # (tensors, bins)
    low: np.ndarray
    bad: np.ndarray  # (tensors, bins): 1 a NaN was there, 2 an Inf, 3 both


@dataclass(frozen=True)
class Details:
    """The other statistics over fewer, longer stretches: `values[s]` is (tensors, bins) of DETAILS[s]."""

    first: np.ndarray
    last: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Last:
    """What each tensor was when it was last measured, exactly; step −1: never."""

    step: np.ndarray  # (tensors,)
    values: np.ndarray  # (tensors, statistics)


def thin_tensors(run: Run, fine: int, coarse: int) -> tuple[History, Details, Last]:
    """Statistics of every tensor, in at most so many stretches; one pass over the file."""
    tensors = len(run.tensors)
    steps = run.frames.steps
    fine_of, coarse_of = _stretches(len(steps), fine), _stretches(len(steps), coarse)
    fine_bins, coarse_bins = (int(places[-1]) + 1 if len(places) else 0 for places in (fine_of, coarse_of))
    high = np.full((fine_bins, tensors), -np.inf, dtype=np.float32)
    low = np.full((fine_bins, tensors), np.inf, dtype=np.float32)
    bad = np.zeros((fine_bins, tensors), dtype=np.uint8)
    details = np.full((coarse_bins, tensors, len(DETAILS)), np.nan, dtype=np.float32)
    last = np.full((tensors, len(STATISTICS)), np.nan, dtype=np.float32)
    when = np.full(tensors, -1, dtype=np.int64)
    is_output = np.array([t["kind"].startswith("output") for t in run.tensors], dtype=bool)
    extra_of = np.array([PLACE[EXTRA.get(t["kind"], "cosine")] for t in run.tensors], dtype=np.int64)
    for index, frame in enumerate(run.frames):
        known = (
            frame.numbers < tensors
        )  # a growing run may have frames of tensors that run.json does not name yet
        numbers, values = frame.numbers[known], frame.values[known]
        size, flags = sizes(values, is_output[numbers])
        row = fine_of[index]
        measured = np.isfinite(size)
        high[row, numbers] = np.fmax(high[row, numbers], np.where(measured, size, -np.inf))
        low[row, numbers] = np.fmin(low[row, numbers], np.where(measured, size, np.inf))
        bad[row, numbers] |= flags
        chosen = values[:, [PLACE[name] for name in DETAILS[:-1]]]
        details[coarse_of[index], numbers, :-1] = chosen
        details[coarse_of[index], numbers, -1] = values[np.arange(len(numbers)), extra_of[numbers]]
        last[numbers], when[numbers] = values, frame.step
    unmeasured = np.isinf(high)
    high[unmeasured], low[unmeasured] = NOT_MEASURED, NOT_MEASURED
    return (
        History(*_edges(steps, fine_of), high.T, low.T, bad.T),
        Details(*_edges(steps, coarse_of), details.transpose(2, 1, 0)),
        Last(when, last),
    )


def sizes(values: np.ndarray, is_output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One number a tensor: the RMS of an output or its gradient, else the norm; and what of it was not finite.

    A step that was measured lightly has nothing but a norm, which is itself not finite if an entry is.
    """
    norm, mean, std = (values[:, PLACE[name]] for name in ("norm", "mean", "std"))
    with np.errstate(over="ignore", invalid="ignore"):
        size = np.where(is_output, np.hypot(mean, std), norm)
    light = np.isnan(values[:, PLACE["nan"]])
    nan = np.where(light, np.isnan(norm), values[:, PLACE["nan"]] > 0)
    inf = np.where(light, np.isinf(norm), values[:, PLACE["inf"]] > 0)
    return size, nan.astype(np.uint8) | (inf.astype(np.uint8) << 1)


def _stretches(count: int, most: int) -> np.ndarray:
    """To which of at most so many stretches each of the frames belongs."""
    return np.arange(count) * min(count, most) // max(count, 1)


def _edges(steps: np.ndarray, stretch_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and last step of each stretch."""
    if not len(steps):
        return steps, steps
    begins = np.flatnonzero(np.diff(stretch_of, prepend=-1))
    ends = np.append(begins[1:], len(steps)) - 1
    return steps[begins], steps[ends]
