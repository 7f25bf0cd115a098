"""Is a single value normalised by itself? Less its own mean it is zero, whatever came in."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import Flow
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation, Ref

FIXES = {
    "GroupNorm": "use fewer groups, so that each has several values (GroupNorm(num_groups=4, ...)), or normalise "
    "before pooling",
    "LayerNorm": "give LayerNorm the size of the features, or leave it out where there is one feature",
}
OWN_FIX = "take mean and variance over the features, an axis with more than one value"
MOST_NAMES = 3


def is_one_value_normalised(evidence: Evidence) -> Iterator[Verdict]:
    """A normalisation with one value for each mean and variance; a problem where something can only pass through it."""
    flow = evidence.flow
    for op in flow.operations:
        kind = single_value_norm(flow, op)
        if kind is None or not set(flow.makes(op)) & flow.tracked:
            continue
        shape = list(evidence.slot(flow.reads(op)[0]).shape)
        lines = [
            f"{kind} of {shape} takes each mean and variance of one value: what it puts out is a constant"
        ]
        cut = what_is_cut_off(flow, op)
        if cut:
            lines.append(
                f"{names(evidence, cut)} reach the loss through it only, and have no influence on it"
            )
        yield confirmed(
            "normalization-error/one-value",
            *lines,
            where=place_of(op.module, op.line),
            fix=FIXES.get(kind, OWN_FIX),
            if_troubled=not cut,
            lasting=True,
        )
        return


def single_value_norm(flow: Flow, op: Operation) -> str | None:
    """What an operation is called, if it normalises single values."""
    if op.name == "native_group_norm":
        channels, positions, groups = op.args[4:7]
        return "GroupNorm" if channels * positions == groups else None
    if op.name == "native_layer_norm":
        return "LayerNorm" if math.prod(op.args[1]) == 1 else None
    return "a normalisation" if op.name in ("div", "mul") and is_own_norm_of_one(flow, op) else None


def is_own_norm_of_one(flow: Flow, scaling: Operation) -> bool:
    """x - x.mean(axis), divided by or multiplied with something that is made of x; the axis has length one."""
    pair = [arg.slot for arg in scaling.args[:2] if isinstance(arg, Ref)]
    for difference, scale in (pair, pair[::-1]) if len(pair) == 2 else ():
        source = less_its_own_mean_of_one(flow, flow.maker(difference))
        if source is not None and source not in flow.weights and source in flow.ancestors(scale):
            return True
    return False


def less_its_own_mean_of_one(flow: Flow, op: Operation | None) -> int | None:
    """The tensor that has its mean over an axis of length one (not the batch) taken away, and is zero after that."""
    pair = (
        [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
        if op is not None and op.name == "sub"
        else []
    )
    mean = flow.maker(pair[1]) if len(pair) == 2 else None
    if mean is None or mean.name != "mean" or flow.reads(mean) != pair[:1] or len(mean.args) < 2:
        return None
    shape = flow.tape.slots[pair[0]].shape
    axes = [axis % len(shape) for axis in mean.args[1] or () if shape]
    single = axes and 0 not in axes and math.prod(shape[axis] for axis in axes) == 1
    return pair[0] if single else None


def what_is_cut_off(flow: Flow, norm: Operation) -> list[int]:
    """Trained matrices and inputs from which every way to the loss leads through one operation."""
    other_ways = set(flow.tape.loss_slots)
    for op in reversed(flow.forward):
        if op.index != norm.index and not other_ways.isdisjoint(flow.touches(op)):
            other_ways.update(flow.reads(op))
    before = set().union(*(flow.ancestors(slot) for slot in flow.reads(norm) if slot not in flow.weights))
    matrices = [slot.index for slot in flow.tape.parameters if len(slot.shape) >= 2]
    return [slot for slot in (*matrices, *flow.inputs) if slot in before and slot not in other_ways]


def names(evidence: Evidence, slots: list[int]) -> str:
    known = [evidence.slot(slot).name for slot in slots if evidence.slot(slot).kind == "parameter"]
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return ", ".join(known[:MOST_NAMES]) + more if known else "the inputs"
