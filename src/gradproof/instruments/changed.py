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

FAR = 10.0  # times the range of all before: nothing that is measured comes so far by chance
IDS = " ids"  # the column that holds all of them in one bag
FEW_STEPS = 4  # batches of each side: of fewer there are not enough ways to deal them
DEALS = 64  # of the batches of both sides to two sides, at random
SURE = 5.0  # standard deviations of what chance makes of them
SHOWN = 5  # ids that are rarer, and that come more often

Table = dict[str, np.ndarray]  # by column: one number a sample


@dataclass(frozen=True)
class Change:
    """One thing that is otherwise; `share` says how many of the samples it concerns."""

    column: str
    text: str
    share: float
    far: bool = False  # beyond all that came before by many times its range


def table_of(evidence: Evidence) -> Table:
    """What a step was given, a row a sample: its inputs and targets."""
    flow = evidence.flow
    targets = list(dict.fromkeys(c.target for c in (*flow.comparisons, *flow.picked)))
    # of a batch that is handed over whole and cut into columns, the whole
    inputs = list(dict.fromkeys(_whole_batch(evidence, slot) for slot in flow.inputs))
    spots = [("input", inputs), ("target", [slot for slot in targets if slot not in inputs])]
    values = flow.values([slot for _, slots in spots for slot in slots])
    values = {slot: value for slot, value in values.items() if value.dim() and not value.is_complex()}
    # a row a sample: not the state that a recurrence begins with, nor numbers of positions
    rows = Counter(len(values[slot]) for slot in inputs if slot in values)
    count = max(rows.items(), key=lambda each: each[::-1], default=(0, 0))[0]
    table: Table = {}
    for word, slots in spots:
        for place, slot in enumerate(slots):
            value = values.get(slot, Tensor())
            if word == "target" and count and value.dim() == 1 and len(value) % count == 0:
                value = value.reshape(count, -1)  # of each position
            if len(value) == count > 0:
                name = f"{word} {place}" if len(slots) > 1 else word
                table |= {f"{name}{column}": numbers for column, numbers in columns_of(value)}
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
        for name, part in channels_of(rows):
            flat = part.reshape(len(part), -1)
            yield f"{name} mean", flat.mean(1)
            yield f"{name} deviation", flat.std(1)
            yield f"{name} smallest", flat.min(1)
            yield f"{name} largest", flat.max(1)
            yield f"{name} zeros", (flat == 0).mean(1)
            if whole:
                yield f"{name} different", np.array([len(np.unique(row)) for row in flat], float)
            elif part.ndim == 2:  # a sensor that is stuck says the same again and again
                yield f"{name} repeated", (part[:, 1:] == part[:, :-1]).mean(1)
    if whole and size > 1:
        yield IDS, rows.reshape(-1)


def channels_of(rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The channels of pictures and series, which lie first or last; all of it where there are none, or many."""
    if rows.ndim > 2 and rows.shape[1] <= MOST_CHANNELS:
        yield from ((f"[:, {channel}]", rows[:, channel]) for channel in range(rows.shape[1]))
    elif rows.ndim > 2 and rows.shape[-1] <= MOST_CHANNELS:
        yield from ((f"[..., {channel}]", rows[..., channel]) for channel in range(rows.shape[-1]))
    else:
        yield "", rows


def find_changes(early: Sequence[Table], late: Sequence[Table]) -> list[Change]:
    """What has changed, the most telling first."""
    early, late = _of_one_kind(early, late)
    if not early or not late:
        return []
    names = list(early[0])
    before, now = ({n: np.concatenate([table[n] for table in side]) for n in names} for side in (early, late))
    bags = [name for name in names if name.endswith(IDS)]
    names = [name for name in names if name not in bags]
    found = [change for name in names for change in _of_one(name, early, before[name], now[name], len(names))]
    ids = [name for name in names if _are_ids(before[name])]
    for one, other in permutations(ids, 2):
        found += _of_two(one, other, before, now)
    found += [change for name in bags for change in _of_a_bag(name, early, late)]
    return sorted(found, key=lambda change: (not change.far, -change.share))


def _of_one_kind(early: Sequence[Table], late: Sequence[Table]) -> list[list[Table]]:
    """Those steps that were given the columns that most were given: the first step of an epoch may have others."""
    (columns, _), *_ = Counter(tuple(table) for table in (*early, *late)).most_common(1) or [((), 0)]
    return [[table for table in side if columns and tuple(table) == columns] for side in (early, late)]


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
    span = FAR * (high - low)
    far = (now > high + span) | (now < low - span)
    if span and far.any():
        text = f"{int(far.sum())} of {len(now)} samples lie far outside of all before: {now[far][0]:.6g}, "
        yield Change(name, f"{text}before {low:.6g} to {high:.6g}", float(far.mean()), far=True)
        return
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
        new = now[outside]
        text = f"{len(new)} of {len(now)} samples lie where none of {len(before)} lay before: "
        text += f"{new.min():.6g} to {new.max():.6g}, before {low:.6g} to {high:.6g}"
        yield Change(name, text, float(outside.mean()))


def _of_a_bag(name: str, early: Sequence[Table], late: Sequence[Table]) -> Iterator[Change]:
    """Words, or other ids, that come as often as they came? Batches dealt to two sides at random tell chance."""
    bags = [table[name] for table in (*early, *late)]
    if min(len(early), len(late)) < FEW_STEPS:
        return
    ids, counts = _counted(bags)
    sides = counts[: len(early)].sum(0), counts[len(early) :].sum(0)
    dealt = np.random.default_rng(0)
    orders = [np.split(dealt.permutation(len(bags)), [len(early)]) for _ in range(DEALS)]
    by_chance = np.array([_apart(*(counts[side].sum(0) for side in order)) for order in orders])
    if not _apart(*sides) > max(by_chance.max(), by_chance.mean() + SURE * by_chance.std()):
        return
    shift = sides[1] / sides[1].sum() - sides[0] / sides[0].sum()
    order = np.argsort(shift)
    rarer, more = (
        ", ".join(f"{each:g}" for each in ids[part]) for part in (order[:SHOWN], order[: -SHOWN - 1 : -1])
    )
    share = float(np.abs(shift).sum() / 2)
    text = (
        f"up to {100 * share:.0f} % of them are others than before, more than chance makes of such batches: "
    )
    yield Change(name, f"{text}rarer {rarer}; more often {more}", share)


def _counted(bags: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The ids, and how often each is in each bag."""
    ids, place = np.unique(np.concatenate(bags), return_inverse=True)
    bag = np.repeat(np.arange(len(bags)), [len(each) for each in bags])
    counts = np.zeros((len(bags), len(ids)))
    np.add.at(counts, (bag, place.reshape(-1)), 1)
    return ids, counts


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """How far two counts of the same ids are from being of one kind: chi square, each id in units of its own chance."""
    whole = one + other
    expected = whole * one.sum() / whole.sum()
    return float(((one - expected) ** 2 / np.maximum(expected, 1e-9)).sum())


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
