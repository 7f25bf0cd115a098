"""Do missing entries count? One value that fills a target's gaps, apart from all others, and is learned with them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS, Comparison
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.provenance import say_where_made
from gradproof.tape.operations import Operation
from gradproof.tape.replay import differentiate

ID = "loss-mask-error/missing-entries-count"
FEWEST = 64  # entries that are not filled
SHARE = (0.1, 0.98)  # of the entries that hold the one value
DIFFERENT = 0.3  # of the others are different numbers: measured, not counted or classified
APART = 20  # typical distances between neighbours among the others
FEWEST_GRADES = 4  # different numbers, where there are few: two or three are classes
OUTSIDE = 10  # ranges of the others away: nobody measures that
MASKS = {"ge", "gt", "le", "lt", "ne", "eq", "isnan", "isfinite"}  # made of a target and at most a number
PARTS = VIEWS | {"index", "index_select", "masked_select"}
PASSED_ON = VIEWS | {"logical_not", "bitwise_not", "to"}
IDLE = 3  # examinations at which a mask has let everything pass


def do_missing_entries_count(evidence: Evidence) -> Iterator[Verdict]:
    """Ratings of 1 to 5 with 0 for none, measurements with -999 for none; one-hot rows and sparse signals are not."""
    for comparison in evidence.flow.comparisons:
        if comparison.kind != "value":
            continue
        mask, times = find_idle_mask(evidence, comparison)
        target = evidence.flow.values([comparison.target]).get(comparison.target)
        found = None if target is None else find_filling(target.detach())
        if target is None or found is None:
            continue
        value, share, gap, outside = found
        counting = share_that_counts(evidence, comparison, target == value)
        if counting < 0.9:
            return
        idle = mask is not None and times >= IDLE
        yield confirmed(
            ID,
            f"{100 * share:.0f} % of the {target.numel()} target entries are exactly {value:g}; the others are "
            f"{gap:.3g} or more away from it, and most of them farther: missing entries?",
            f"{100 * counting:.0f} % of those entries have a gradient: the loss learns {value:g} there",
            *say_idle(mask, times),
            *say_where_made(evidence, comparison.target, comparison.operation.line, target=True),
            where=place_of("", (mask if idle and mask is not None else comparison.operation).line),
            fix=f"let them not count: mask = target != {value:g}; (loss * mask).sum() / mask.sum()",
            level="problem" if outside or idle else "warning",
            confidence="likely" if outside or are_scattered(target == value) else "possible",
        )
        return


def find_filling(target: Tensor) -> tuple[float, float, float, bool] | None:
    """(the one value, its share, how far the next one is, whether that is outside of anything measured)."""
    flat = target.flatten().double()
    if not target.is_floating_point() or flat.numel() < 2 * FEWEST or not bool(flat.isfinite().all()):
        return None
    value = torch.mode(flat).values
    rest = flat[flat != value].sort().values
    share = 1 - len(rest) / len(flat)
    if len(rest) < FEWEST or not SHARE[0] < share < SHARE[1]:
        return None
    different, times = torch.unique(rest, return_counts=True)
    if is_inside(value, different):
        return None
    gap, usual = float((different - value).abs().min()), float(different.diff().median())
    span = float(different[-1] - different[0])
    if gap < 0.1 * span:  # the dark pixels of a picture come near its black
        return None
    few = len(different) < DIFFERENT * len(rest)
    if few:
        if not are_grades(value, different, times) or not are_scattered(target == value):
            return None
    elif gap < APART * usual:  # a signal that is cut off at 0 comes near it
        return None
    outside = gap > OUTSIDE * span and (not few or bool(value < 0))  # two prices may be far from none, too
    return float(value), share, gap, outside


def are_grades(value: Tensor, different: Tensor, times: Tensor) -> bool:
    """Few different numbers, most of them well away from the one: counts are most often 1 where they are not 0.

    The last of them, no farther from the others than they are from each other, is but the most common.
    """
    if bool(value > different[-1]) and bool(value - different[-1] <= different.diff().max()):
        return False
    nearest = times[(different - value).abs().argmin()]
    return len(different) >= FEWEST_GRADES and bool(nearest < 0.5 * times.max())


def is_inside(value: Tensor, different: Tensor) -> bool:
    """A value amid the others is the most common measurement; zeros between signs may be silence."""
    return bool(different[0] < value) and bool(value < different[-1])


def share_that_counts(evidence: Evidence, comparison: Comparison, filled: Tensor) -> float:
    slot = comparison.prediction
    gradient = differentiate(evidence.tape, gradients_at=[slot]).slot_gradients.get(slot)
    if gradient is None or gradient.numel() != filled.numel():
        return 0.0
    return float((gradient.reshape(filled.shape) != 0)[filled].double().mean())


def are_scattered(filled: Tensor) -> bool:
    """Whether an entry tells nothing of its neighbour: the background of a picture hangs together."""
    rows = filled.reshape(-1, filled.shape[-1]).double()
    if rows.shape[1] < 2:
        return False
    a, b = rows[:, :-1] - rows[:, :-1].mean(), rows[:, 1:] - rows[:, 1:].mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return scale > 0 and abs(float((a * b).sum())) < 0.3 * scale


def find_idle_mask(evidence: Evidence, comparison: Comparison) -> tuple[Operation | None, float]:
    """What the loss computes of its targets to leave some out, if it has never left out any; and how often it has not.

    One that has ever left something out, at any examination, is no idle mask.
    """
    flow, idle = evidence.flow, evidence.memory.setdefault("idle masks", {})  # times, by line
    data = flow.behind(comparison.target, PARTS)
    masks = [op for op in flow.operations if op.name in MASKS and flow.makes(op)]
    masks = [op for op in masks if {flow.behind(s, PARTS) for s in flow.reads(op)} == {data}]
    masks = [op for op in masks if leads_into_loss(evidence, flow.makes(op)[0])]
    values = flow.values([flow.makes(op)[0] for op in masks]) if masks else {}
    for op in masks:
        nothing = is_one_value(values.get(flow.makes(op)[0]))
        idle[op.line] = idle.get(op.line, 0) + 1 if nothing else -math.inf
    worked = any(idle[op.line] < 0 for op in masks)
    return (None, 0) if worked or not masks else (masks[0], idle[masks[0].line])


def is_one_value(mask: Tensor | None) -> bool:
    return mask is not None and mask.numel() > 1 and bool((mask == mask.flatten()[0]).all())


def leads_into_loss(evidence: Evidence, mask: int) -> bool:
    """Whether it meets, as it is or as a number, something behind the network that carries gradient."""
    flow, derived = evidence.flow, {mask}
    for op in flow.operations:
        reads = flow.reads(op)
        if derived.isdisjoint(reads):
            continue
        if derived.issuperset(reads) and op.name in PASSED_ON:
            derived.update(flow.makes(op))
        elif not flow.tail.isdisjoint(reads) and not flow.tail.isdisjoint(flow.makes(op)):
            return True
    return False


def say_idle(mask: Operation | None, times: float) -> list[str]:
    if mask is None:
        return []
    return [
        f"the mask made of the targets at {place_of('', mask.line)} leaves none out, {times} times of {times}"
    ]
