"""How do the batches of now differ from those of before? Column by column, and in what one column says of another.

A sample is a row. Ids and features are columns; of what is longer (images, series, texts) each channel gives a few
numbers a sample. What differs between the batches of before themselves, as they come, is not said to have changed.

    find_changes([table_of(step) for step in before], [table_of(step) for step in after])
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS

FEW = 64  # numbers of a sample that are columns; more are a series, an image or a text
MOST_CHANNELS = 16  # that are told apart: in what has more along its second axis, that is time or space
CHANCE = 1e-6  # of all that is compared: one in a million is no chance
APART = 0.1  # of the samples: distributions that differ in less are not shown
TWICE = 2.0  # times what batches of before differ among each other
OUTSIDE = 10.0  # times as often as numbers that never came before may come
TELLS, TOLD = 0.99, 0.9  # of the rows in which a column says what another is: before, and no longer
FEWEST = 20  # rows that are counted for that
ALL_OF_THEM, FEW_OTHERS = 0.95, 0.5  # of the odd rows, and of the others: what the odd ones have in common

Table = dict[str, np.ndarray]  # by column: one number a sample


@dataclass(frozen=True)
class Change:
    """One thing that is otherwise; `share` says how many of the samples it concerns."""

    column: str
    text: str
    share: float


def table_of(evidence: Evidence) -> Table:
    """What a step was given, a row a sample: its inputs and targets."""
    flow = evidence.flow
    targets = list(dict.fromkeys(c.target for c in (*flow.comparisons, *flow.picked)))
    # of a batch that is handed over whole and cut into columns, the whole
    inputs = list(dict.fromkeys(_whole_batch(evidence, slot) for slot in flow.inputs))
    spots = [("input", inputs), ("target", [slot for slot in targets if slot not in inputs])]
    values = flow.values([slot for _, slots in spots for slot in slots])
    table: Table = {}
    for word, slots in spots:
        for place, slot in enumerate(slots):
            if slot in values and values[slot].dim() and not values[slot].is_complex():
                name = f"{word} {place}" if len(slots) > 1 else word
                table |= {f"{name}{column}": numbers for column, numbers in columns_of(values[slot])}
    return table


def _whole_batch(evidence: Evidence, slot: int) -> int:
    whole = evidence.flow.behind(slot, VIEWS)
    return whole if evidence.slot(whole).shape[:1] == evidence.slot(slot).shape[:1] else slot


def columns_of(value: Tensor) -> Iterator[tuple[str, np.ndarray]]:
    """The columns of a batch, by how they are written."""
    whole = not value.is_floating_point()
    rows = value.detach().cpu().double().numpy()
    size = math.prod(rows.shape[1:])
    if size == 1:
        yield "", rows.reshape(len(rows))
    elif size <= FEW and rows.ndim == 2:
        for column in range(size):
            yield f"[:, {column}]", rows[:, column]
    elif size:
        channels = rows.ndim > 2 and rows.shape[1] <= MOST_CHANNELS
        for channel in range(rows.shape[1] if channels else 1):
            part = (rows[:, channel] if channels else rows).reshape(len(rows), -1)
            name = f"[:, {channel}]" if channels else ""
            yield f"{name} mean", part.mean(1)
            yield f"{name} deviation", part.std(1)
            yield f"{name} smallest", part.min(1)
            yield f"{name} largest", part.max(1)
            yield f"{name} zeros", (part == 0).mean(1)
            if whole:
                yield f"{name} different", np.array([len(np.unique(row)) for row in part], float)


def find_changes(early: Sequence[Table], late: Sequence[Table]) -> list[Change]:
    """What has changed, the most telling first."""
    names = [name for name in early[0] if all(name in table for table in (*early, *late))] if early else []
    if not names or not late:
        return []
    before, now = ({n: np.concatenate([table[n] for table in side]) for n in names} for side in (early, late))
    found = [change for name in names for change in _of_one(name, early, before[name], now[name], len(names))]
    ids = [name for name in names if _are_ids(before[name])]
    for one, other in permutations(ids, 2):
        found += _of_two(one, other, before, now)
    return sorted(found, key=lambda change: -change.share)


def _of_one(
    name: str, early: Sequence[Table], before: np.ndarray, now: np.ndarray, tests: int
) -> Iterator[Change]:
    bad = ~np.isfinite(now)
    if bad.mean() > OUTSIDE * max((~np.isfinite(before)).mean(), 1 / len(before)):
        yield Change(name, f"{int(bad.sum())} of {len(now)} samples are NaN or Inf", float(bad.mean()))
    before, now = before[np.isfinite(before)], now[~bad]
    if not len(before) or not len(now):
        return
    low, high = before.min(), before.max()
    outside = (now < low) | (now > high)
    distance = _distance(before, now)
    pooled = len(before) * len(now) / (len(before) + len(now))
    chance = 2 * math.exp(-2 * pooled * distance**2)
    between = (_distance(np.concatenate(rest), one) for one, rest in _leaving_one_out(name, early))
    usual = max(between, default=0.0)
    if chance < CHANCE / tests and distance > max(APART, TWICE * usual):
        text = f"{_describe(before)} before, {_describe(now)} now"
        if outside.any():
            text += f"; {100 * outside.mean():.0f} % lie outside of all before"
        yield Change(name, text, distance)
    elif outside.sum() >= 5 and outside.mean() > OUTSIDE / len(before):
        far = now[outside]
        text = f"{len(far)} of {len(now)} samples lie where none of {len(before)} lay before: "
        text += f"{far.min():.6g} to {far.max():.6g}, before {low:.6g} to {high:.6g}"
        yield Change(name, text, float(outside.mean()))


def _of_two(one: str, other: str, before: Table, now: Table) -> Iterator[Change]:
    """What one column said of another, and no longer says."""
    known: dict[float, float] = {}
    kept = again = 0
    for a, b in zip(before[one], before[other], strict=True):
        if a in known:
            again += 1
            kept += known[a] == b
        known.setdefault(a, b)
    if again < FEWEST or kept < TELLS * again or len(set(known.values())) < 3:
        return
    met = np.array([a in known for a in now[one]])
    odd = np.array([known.get(a, b) != b for a, b in zip(now[one], now[other], strict=True)])
    if met.sum() < FEWEST or odd.sum() < (1 - TOLD) * met.sum():
        return
    text = f"said what {other} is, in {100 * kept / again:.0f} % of {again} samples before; now in "
    text += f"{100 * (1 - odd.sum() / met.sum()):.0f} % of {int(met.sum())}"
    common = _in_common(odd, met, {name: values for name, values in now.items() if name not in (one, other)})
    yield Change(one, text + (f"; {common}" if common else ""), float(odd.sum() / met.sum()))


def _in_common(odd: np.ndarray, met: np.ndarray, columns: Table) -> str:
    """`those that break it have 2 in input[:, 5], of the others 14 %`"""
    others = met & ~odd
    for name, values in columns.items():
        value, count = Counter(values[odd].tolist()).most_common(1)[0]
        elsewhere = float((values[others] == value).mean()) if others.any() else 0.0
        if count >= ALL_OF_THEM * odd.sum() and elsewhere < FEW_OTHERS:
            share = f"{100 * count / odd.sum():.0f} % have {value:g} in {name}"
            return f"of those that break it {share}, of the others {100 * elsewhere:.0f} %"
    return ""


def _are_ids(values: np.ndarray) -> bool:
    return bool((values == np.round(values)).all()) and len(np.unique(values)) >= 3


def _leaving_one_out(name: str, early: Sequence[Table]) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    for place, table in enumerate(early):
        rest = [other[name] for number, other in enumerate(early) if number != place]
        if rest:
            yield table[name], rest


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest gap between two cumulative distributions (Kolmogorov and Smirnov's): 0 alike, 1 wholly apart."""
    one, other = np.sort(one), np.sort(other)
    every = np.concatenate([one, other])
    below, below_other = (np.searchsorted(side, every, "right") / len(side) for side in (one, other))
    return float(np.abs(below - below_other).max())


def _describe(values: np.ndarray) -> str:
    return f"{values.mean():.4g} ± {values.std():.2g} ({values.min():.4g} to {values.max():.4g})"
