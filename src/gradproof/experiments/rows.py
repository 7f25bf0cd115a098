"""Do the rows meet? One sample is changed, and the rows of the prediction that move are held against its targets.

Time and batch, or draws and batch, that are folded into one axis in one order for the predictions and in another for
the targets give tensors of the right shape in which every row is compared with the target of another sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import Comparison, Flow
from gradproof.experiments.nonfinite import place_of

ID = "axis-or-shape-error/rows-of-another-sample"
FEWEST = 4  # samples
MOST_ROWS = 1_000_000
LONGEST = 16  # operations between a target and the data it was cut from
LOUD = 0.25  # of the largest change: what a batch norm carries to other samples is less


@dataclass(frozen=True)
class Pairing:
    """An axis of an input and one of the targets, as they were before they were folded, that count the same samples."""

    given: int
    axis: int
    origin: int
    origin_axis: int
    count: int


def do_the_rows_meet(evidence: Evidence) -> Iterator[Verdict]:
    """Rows that a sample moves must be the rows at which its own targets stand."""
    flow = evidence.flow
    for comparison in [*flow.comparisons, *picks_of_rows(flow)][:2]:
        for pairing in list(pairings(flow, comparison))[:2]:
            verdict = judge(flow, comparison, pairing)
            if verdict is not None:
                yield verdict
                return


def pairings(flow: Flow, comparison: Comparison) -> Iterator[Pairing]:
    """Of folded targets; sizes must tell which axis is which, unless the target is made of the input itself."""
    slots = flow.tape.slots
    folded = rows_of(slots[comparison.target].shape)
    behind = flow.ancestors(comparison.prediction)
    chain = chain_behind(flow, comparison.target)[::-1]
    for given in flow.inputs:
        for axis in (0, 1) if given in behind and folded else ():
            shape = slots[given].shape[:2]
            count = shape[axis] if axis < len(shape) else 0
            if count < FEWEST or folded % count or folded < 2 * count or folded > MOST_ROWS:
                continue
            if all(slots[s].shape[0] == count for s in (comparison.prediction, comparison.target)):
                continue  # not folded
            for origin in chain:
                other = slots[origin].shape[:2]
                if origin == given:
                    yield Pairing(given, axis, origin, axis, count)
                elif shape.count(count) == 1 and other.count(count) == 1:
                    yield Pairing(given, axis, origin, other.index(count), count)
                else:
                    continue
                break


def picks_of_rows(flow: Flow) -> list[Comparison]:
    """Losses by hand: log_probs.gather(1, labels[:, None])."""
    picks = [op for op in flow.picks if op.name == "gather" and op.args[1] in (1, -1)]
    found = [Comparison(op, "class", *flow.reads(op)[:2]) for op in picks if len(flow.reads(op)) == 2]
    return [c for c in found if len(flow.tape.slots[c.prediction].shape) == 2]


def rows_of(shape: tuple[int, ...]) -> int:
    """How many rows a target has: its last axis is that of features, unless it is the only one."""
    return math.prod(shape[:-1] if len(shape) > 1 else shape)


def chain_behind(flow: Flow, slot: int) -> list[int]:
    """A target, and what it was made from, each from the first operand of the one before."""
    found = [slot]
    maker = flow.maker(slot)
    while maker is not None and maker.reads and len(found) < LONGEST:
        found.append(maker.reads[0])
        maker = flow.maker(maker.reads[0])
    return found


def judge(flow: Flow, comparison: Comparison, pairing: Pairing) -> Verdict | None:
    before = flow.outcome([comparison.prediction]).get(comparison.prediction)
    orders, lines = set(), []
    for sample in (pairing.count // 2, 1) if before is not None else ():
        own = rows_of_target(flow, comparison, pairing, sample)
        order = order_of(own, pairing.count, sample, whole=True) if own is not None else None
        moved = rows_that_move(flow, comparison, pairing, sample, before) if order else None
        if own is None or moved is None or len(own) != len(moved):
            return None
        if bool((own | ~moved).all()):
            return excluded(ID, f"each sample of {pairing.count} moves only the rows of its own targets")
        other = order_of(moved, pairing.count, sample)
        if other is None or int((own & moved).sum()) * 2 > int(moved.sum()):
            return None
        orders.add((order, other))
        lines.append(
            f"of {pairing.count} samples with {int(own.sum())} rows each, sample {sample} moves rows {first(moved)} "
            f"of the prediction, but its targets stand in rows {first(own)}"
        )
    if len(orders) != 1 or every_pair_is_meant(flow, comparison, pairing):
        return None
    return verdict_on(flow, comparison, lines[0])


def rows_of_target(flow: Flow, comparison: Comparison, pairing: Pairing, sample: int) -> Tensor | None:
    """Where the targets of one sample stand in the loss: they are changed at their origin."""
    before = flow.values([pairing.origin, comparison.target])
    if len(before) < len({pairing.origin, comparison.target}):
        return None
    value = before[pairing.origin].clone()
    part = value.select(pairing.origin_axis, sample)
    part.copy_(~part if part.dtype == torch.bool else part + 1)
    after = flow.values([comparison.target], {pairing.origin: value}).get(comparison.target)
    if pairing.origin == comparison.target:
        after = value
    return None if after is None else as_rows(after != before[comparison.target])


def rows_that_move(
    flow: Flow, comparison: Comparison, pairing: Pairing, sample: int, before: Tensor | None
) -> Tensor | None:
    """The rows of the prediction that hear one sample, which is replaced by another of the batch."""
    same = [
        slot
        for slot in flow.inputs
        if flow.tape.slots[slot].shape[pairing.axis : pairing.axis + 1] == (pairing.count,)
    ]
    leaves = {}
    for slot, value in flow.values(same).items():
        leaves[slot] = value.clone()
        other = value.select(pairing.axis, (sample + pairing.count // 3 + 1) % pairing.count)
        leaves[slot].select(pairing.axis, sample).copy_(other)
    after = flow.outcome([comparison.prediction], leaves).get(comparison.prediction)
    if after is None or before is None:
        return None
    change = torch.nan_to_num((after.double() - before.double()).abs(), 0.0, 0.0)
    if comparison.kind == "class":  # (rows, classes, …)
        change = change.amax(1)
    elif change.shape != flow.tape.slots[comparison.target].shape:
        return None
    most = float(change.max())
    return as_rows(change > LOUD * most) if most > 0 else None


def as_rows(changed: Tensor) -> Tensor:
    return changed.reshape(rows_of(changed.shape), -1).any(1).cpu()


def order_of(rows: Tensor, count: int, sample: int, whole: bool = False) -> int | None:
    """How many rows of a sample lie side by side, in an order (outer, samples, inner) that holds exactly these rows
    (or, unless `whole`, at least half of them and no others)."""
    each = len(rows) // count
    numbers = torch.arange(len(rows))
    for inner in (n for n in range(1, each + 1) if each % n == 0):
        place = torch.div(numbers, inner, rounding_mode="floor") % count == sample
        if whole and torch.equal(rows, place):
            return inner
        if not whole and bool((place | ~rows).all()) and int(rows.sum()) >= max(2, each // 2):
            return inner
    return None


def every_pair_is_meant(flow: Flow, comparison: Comparison, pairing: Pairing) -> bool:
    """Each sample against each: as many copies of the predictions or of the targets as there are samples."""
    rows = rows_of(flow.tape.slots[comparison.target].shape)
    if rows != pairing.count**2:
        return False
    found = flow.outcome([comparison.prediction, comparison.target])
    sides = [v.reshape(pairing.count, pairing.count, -1) for v in found.values() if v.shape[0] == rows]
    return any(bool((s == s[:, :1]).all()) or bool((s == s[:1]).all()) for s in sides)


def first(rows: Tensor) -> str:
    return ", ".join(map(str, rows.nonzero().flatten()[:3].tolist())) + ", …"


def verdict_on(flow: Flow, comparison: Comparison, line: str) -> Verdict:
    makers = [flow.maker(slot) for slot in chain_behind(flow, comparison.target)]
    folding = next((op.line for op in makers if op is not None and op.line), comparison.operation.line)
    return confirmed(
        ID,
        line,
        f"{comparison.operation.name} at {place_of('', comparison.operation.line)} compares nearly every row with "
        "the target of another sample",
        where=place_of("", folding),
        fix="fold both in the same order: transpose(0, 1) before reshape on the one that has the samples second, "
        "x.repeat(k, 1) for rows (k, batch), x.repeat_interleave(k, 0) for rows (batch, k)",
        lasting=True,
    )
