"""Do prediction and target have the same shape, or does [N, 1] against [N] compare everyone with everyone?"""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import Flow, squeezed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation, Ref

PAIRWISE = {"sub", "rsub", "mul"}


def do_shapes_meet(evidence: Evidence) -> Iterator[Verdict]:
    """One number a sample, as a column against a row, becomes a square: the mean of it pulls every prediction to the
    mean of all targets."""
    flow = evidence.flow
    for op in flow.operations:
        shapes = _crossed(flow, op)
        if shapes is not None:
            (first, second), count = shapes, max(shapes[0])
            line = (
                f"{op.name} of {list(first)} and {list(second)} gives {[count, count]}: "
                f"each of {count} predictions meets all {count} targets"
            )
            column = list(first if len(first) > len(second) else second)
            fix = f"give both the shape [{count}], for example with .squeeze(-1) on the {column}"
            yield confirmed(
                "axis-or-shape-error/broadcast-into-the-loss",
                line,
                where=place_of("", op.line),
                fix=fix,
                lasting=True,
            )
            return
        if _sums_over_samples(evidence, op):
            shape = list(flow.tape.slots[flow.reads(op)[0]].shape)
            yield confirmed(
                "axis-or-shape-error/over-the-batch",
                f"{op.name} of {shape} runs over its first axis, the {shape[0]} samples of the batch, not over the "
                f"{shape[1]} numbers that each of them has",
                where=place_of("", op.line),
                fix="name the other axis: dim=1 or dim=-1",
                confidence="likely",
                lasting=True,
            )
            return


def _sums_over_samples(evidence: Evidence, op: Operation) -> bool:
    """A logsumexp or softmax of the loss, of (samples, a few) along the samples; all pairs make a square."""
    flow = evidence.flow
    if (
        op.name not in ("logsumexp", "_softmax", "_log_softmax")
        or not flow.inputs
        or flow.tail.isdisjoint(op.makes)
    ):
        return False
    shape = flow.tape.slots[flow.reads(op)[0]].shape
    axis = op.args[1] if len(op.args) > 1 else None
    axes = [axis] if isinstance(axis, int) else list(axis or ())
    batch = evidence.slot(flow.inputs[0]).shape[0]
    return len(shape) == 2 and shape[0] == batch >= 8 and 2 <= shape[1] != batch and axes in ([0], [-2])


def _crossed(flow: Flow, op: Operation) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of two operands of the loss that hold one number a sample and broadcast to a square by accident.

    Ranks differ in an accident; who wants all pairs writes [:, None] - [None, :], and leaves both at one rank.
    """
    refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
    if len(refs) != 2 or not op.makes or flow.tail.isdisjoint(refs):
        return None
    named = op.name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    if op.name not in PAIRWISE and not named:
        return None
    slots = [flow.behind(slot, ("expand",)) for slot in refs] if named else refs
    first, second = (flow.tape.slots[slot].shape for slot in slots)
    if len(first) == len(second) or squeezed(first) != squeezed(second) or len(squeezed(first)) != 1:
        return None
    count = max(first)
    made = flow.tape.slots[refs[0] if named else op.makes[0]].shape
    if squeezed(made) != (count, count):
        return None
    both = all(slot in flow.tracked for slot in refs)  # two predictions: all pairs of them may be meant
    return None if both else (first, second)
