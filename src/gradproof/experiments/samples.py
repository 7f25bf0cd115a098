"""Are samples independent? One sample of the batch is changed, and the predictions for the others are watched."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import VIEWS, Flow
from gradproof.experiments.grids import find_grids
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.spread import Confined, find_first_spread, has_changed
from gradproof.tape.operations import ModuleCall, Operation

FAMILY = "axis-or-shape-error"
BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "batch_norm_update_stats")
RECURRENT = ("LSTM", "GRU", "RNN")
ATTENTION = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")
# what couples samples by mistake, and the words for it; anything else may be meant
BY_MISTAKE = {
    "_softmax": "softmax-over-the-batch", "_log_softmax": "softmax-over-the-batch",
    "_safe_softmax": "softmax-over-the-batch", "linalg_vector_norm": "normalised-over-the-batch",
    "norm": "normalised-over-the-batch", "view": "view-for-transpose", "_unsafe_view": "view-for-transpose",
    "native_layer_norm": "normalised-over-the-batch", "cumsum": "sum-over-the-batch",
}  # fmt: skip
WALK = VIEWS | {"clamp_min", "clamp", "add", "sqrt", "div", "mul", "rsqrt", "exp", "sub"}


def are_samples_independent(evidence: Evidence) -> Iterator[Verdict]:
    """BatchNorm and losses over pairs couple samples by design; a softmax over the batch is a mistake."""
    flow = evidence.flow
    predictions = list(dict.fromkeys(c.prediction for c in flow.comparisons))
    if not predictions or any(op.name in BATCH_NORMS and _is_training(op) for op in flow.operations):
        return
    coupled = []
    for axis in likely_axes(evidence, predictions[0]):
        change = change_one_sample(evidence, axis)
        if change is None:
            continue
        leaves, count = change
        confined = keeps_to_one_sample(count)
        before, after = flow.outcome(predictions), flow.outcome(predictions, leaves)
        kept = [confined(has_changed(before[s], after[s])) for s in predictions if s in before and s in after]
        if not kept or None in kept:
            continue
        if all(kept):
            text = f"changing one of {count} samples changes no prediction for another"
            yield excluded(f"{FAMILY}/coupled-samples", text)
            return
        coupled.append((leaves, confined, count))
    if coupled:
        leaves, confined, count = coupled[0]
        op = find_first_spread(evidence, leaves, confined)
        if op is not None:
            yield from verdict_on(evidence, op, count)


def verdict_on(evidence: Evidence, op: Operation, count: int) -> Iterator[Verdict]:
    call = next((call for call in evidence.tape.modules if (call.path or call.kind) == op.module), None)
    kind = call.kind if call is not None else ""
    line = f"changing one of {count} samples changes the predictions for the others, first through {op.name}"
    if kind in RECURRENT or kind in ATTENTION or "rnn" in op.name or "lstm" in op.name:
        if any(other.name == "_pack_padded_sequence" for other in evidence.forward):
            return  # time steps of all samples lie in one column
        yield confirmed(
            f"{FAMILY}/batch-first",
            line,
            f"{kind or op.name} takes the axis of the batch for that of time",
            where=place_of(op.module, op.line),
            fix="pass batch_first=True, or transpose batch and time before and after",
            level="warning" if is_one_sequence(evidence, call) else "problem",
            confidence="likely" if is_one_sequence(evidence, call) else "proven",
            lasting=True,
        )
        return
    guilty = (
        op if op.name in BY_MISTAKE else _reduction_behind(evidence.flow, op) if op.name in WALK else None
    )
    if guilty is not None:
        yield confirmed(
            f"{FAMILY}/{BY_MISTAKE[guilty.name]}",
            line if guilty is op else f"{line}, made by {guilty.name}",
            where=place_of(guilty.module, guilty.line),
            fix="name the axis of the features or classes (dim=-1 or dim=1), not that of the batch",
            lasting=True,
        )


def is_one_sequence(evidence: Evidence, call: ModuleCall | None) -> bool:
    """Whether a recurrence is given no batch, or a batch of one: its rows may well be one series."""
    shape = evidence.slot(call.inputs[0]).shape if call is not None and call.inputs else ()
    return len(shape) == 2 or 1 in shape[:2]


def _reduction_behind(flow: Flow, op: Operation) -> Operation | None:
    """The norm or softmax whose result an elementwise operation spreads; None when it is a mean or a variance."""
    waiting, seen = list(op.reads), 0
    while waiting and seen < 12:
        seen += 1
        maker = flow.maker(waiting.pop(0))
        if maker is None:
            continue
        if maker.name in ("linalg_vector_norm", "norm"):
            return maker
        if maker.name in WALK:
            waiting += maker.reads
    return None


def likely_axes(evidence: Evidence, prediction: int) -> list[int]:
    """Which axis of the inputs is that of the batch: told by the targets' order in time, or by the sizes."""
    for grid in find_grids(evidence):
        if grid.share_at(1) >= 0.98:
            return [1 if grid.time_first else 0]
    shape = evidence.slot(prediction).shape
    rows = shape[0] if shape else 0
    shapes = [evidence.slot(slot).shape for slot in evidence.flow.inputs]
    exact = [axis for axis in (0, 1) if any(len(s) > axis and s[axis] == rows for s in shapes)]
    return exact[:1] if len(exact) == 1 else [0, 1]


def change_one_sample(evidence: Evidence, axis: int) -> tuple[dict[int, Tensor], int] | None:
    """The inputs with the first sample replaced by another of the same batch."""
    slots = [s for s in evidence.flow.inputs if len(evidence.slot(s).shape) > axis]
    if not slots:
        return None
    count = evidence.slot(slots[0]).shape[axis]
    slots = [s for s in slots if evidence.slot(s).shape[axis] == count]
    if count < 4:
        return None
    leaves, differs = {}, False
    for slot, value in evidence.flow.values(slots).items():
        value = value.clone()
        first, other = value.select(axis, 0), value.select(axis, count // 2)
        differs = differs or not bool((first == other).all())
        first.copy_(other)
        leaves[slot] = value
    return (leaves, count) if differs else None


def keeps_to_one_sample(count: int) -> Confined:
    def confined(changed: Tensor) -> bool | None:
        if not bool(changed.any()):
            return True
        known = False
        for dim, size in enumerate(changed.shape):
            if size % count:
                continue
            known = True
            others = [d for d in range(changed.dim()) if d != dim]
            touched = changed.any(dim=others) if others else changed
            if int(touched.sum()) <= size // count:
                return True
        return False if known else None

    return confined


def _is_training(op: Operation) -> bool:
    flags = [arg for arg in op.args if isinstance(arg, bool)]
    return not flags or flags[0] or op.name == "batch_norm_update_stats"
