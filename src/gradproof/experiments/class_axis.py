"""Do the scores of one softmax belong to one place? Views and permutes are followed from the last layer to the loss.

[B, C, H, W] that is reshaped to [-1, C] has the right shape, and rows that hold C neighbours of one class in place of
the C classes of one pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import Flow
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation

ID = "axis-or-shape-error/classes-of-different-places"
MOST = 1 << 24  # scores
SAME_PLACES = {
    "add", "sub", "mul", "div", "neg", "log", "clamp", "tanh", "_softmax", "_log_softmax", "clone", "contiguous",
    "_to_copy", "detach",
}  # fmt: skip
RESHAPED = {"view", "_unsafe_view", "reshape"}
MOVED = RESHAPED | {"transpose", "permute", "t", "squeeze", "unsqueeze", "slice", "select"}
CHANNELS_SECOND = ("convolution", "upsample_", "native_batch_norm", "cudnn_batch_norm")
CHANNELS_LAST = ("addmm", "mm", "linear")


@dataclass(frozen=True)
class Scores:
    """What a softmax of the loss runs over, and the layer it comes from."""

    made: int  # slot: the layer's output
    axis: int  # of it: the classes
    path: list[Operation]  # from there to the softmax
    dim: int  # of the softmax


def do_classes_stay_together(evidence: Evidence) -> Iterator[Verdict]:
    """Each softmax of a loss over classes has to run over the channels of the last layer, at one pixel or position."""
    flow = evidence.flow
    for softmax in softmaxes_of_classes(flow):
        scores = follow_back(flow, softmax)
        reshapes = [op for op in scores.path if op.name in RESHAPED] if scores is not None else []
        if scores is None or not reshapes or math.prod(flow.tape.slots[scores.made].shape) > MOST:
            continue
        shape = flow.tape.slots[scores.made].shape
        rows = [places(flow, scores, axis) for axis in range(len(shape))]
        if not is_mixed(rows, scores.axis, shape):
            continue
        reshape = reshapes[-1]
        before, after = (
            list(flow.tape.slots[s].shape) for s in (flow.reads(reshape)[0], flow.makes(reshape)[0])
        )
        count = rows[0].shape[1]
        of_one = int((rows[scores.axis] == rows[scores.axis][:, :1]).all(1).sum())
        order = [n for n in range(len(before)) if n != scores.axis] + [scores.axis]
        yield confirmed(
            ID,
            f"{reshape.name} makes {after} of {before} without moving the axis of the {shape[scores.axis]} classes: "
            f"each softmax runs over {count} scores of different places",
            f"of {len(rows[0])} rows of scores, {of_one} hold {count} times one and the same class",
            where=place_of(reshape.module, reshape.line),
            fix=f"permute({', '.join(map(str, order))}) before the reshape, or give the loss the scores "
            f"{before} as they are",
            lasting=True,
        )
        return


def softmaxes_of_classes(flow: Flow) -> list[Operation]:
    """Behind each entry that a loss picks by its class."""
    picked = [c.prediction for c in flow.comparisons if c.kind == "class"]
    picked += [flow.reads(op)[0] for op in flow.picks]
    found: dict[int, Operation] = {}
    for slot in picked:
        op = flow.maker(slot)
        while op is not None and op.name in SAME_PLACES and "softmax" not in op.name:
            op = flow.maker(flow.reads(op)[0])
        if op is not None and op.name in ("_log_softmax", "_softmax"):
            found[op.index] = op
    return list(found.values())


def follow_back(flow: Flow, softmax: Operation) -> Scores | None:
    """The layer whose output a softmax runs over, if nothing but views and pointwise operations lie between."""
    path: list[Operation] = []
    slot = flow.reads(softmax)[0]
    layers = {op.index for op in flow.layers}
    while (op := flow.maker(slot)) is not None:
        if op.name.startswith(CHANNELS_SECOND) and len(flow.tape.slots[slot].shape) > 2:
            return Scores(slot, 1, path[::-1], int(softmax.args[1]))
        if op.index in layers and op.name in CHANNELS_LAST:
            return Scores(slot, len(flow.tape.slots[slot].shape) - 1, path[::-1], int(softmax.args[1]))
        before = flow.reads(op)[0] if flow.reads(op) else None
        same = before is not None and flow.tape.slots[before].shape == flow.tape.slots[slot].shape
        if before is None or not (op.name in MOVED or (op.name in SAME_PLACES and same)) or op.writes:
            return None
        path.append(op)
        slot = before
    return None


def places(flow: Flow, scores: Scores, axis: int) -> Tensor:
    """(softmaxes, entries of each): where along an axis of the layer's output each score stood."""
    shape = flow.tape.slots[scores.made].shape
    kind = torch.uint8 if shape[axis] <= 256 else torch.int32
    counted = torch.arange(shape[axis]).to(kind).view(-1, *[1] * (len(shape) - 1 - axis))
    where = counted.expand(shape)
    for op in scores.path:
        if op.name in RESHAPED:
            where = where.reshape(flow.tape.slots[flow.makes(op)[0]].shape)
        elif op.name in MOVED:
            where = op.func(where, *op.args[1:], **op.kwargs)
    where = where.movedim(scores.dim, -1)
    return where.reshape(-1, where.shape[-1])


def is_mixed(rows: list[Tensor], classes: int, shape: tuple[int, ...]) -> bool:
    """Whether a softmax runs over other places, but not over all of an axis: a heat map's may."""
    count, channels = rows[0].shape[1], shape[classes]
    if count < 2 or channels % count:
        return False
    of_class = rows[classes]
    changing = [n for n, row in enumerate(rows) if n != classes and bool((row != row[:, :1]).any())]
    if not changing:
        return False  # each at one place
    if bool((of_class == of_class[:, :1]).all()) and math.prod(shape[n] for n in changing) == count:
        return False
    repeats = of_class.sort(1).values.diff(dim=1) == 0
    return bool(repeats.any()) or (channels == count and bool((of_class != of_class[:1]).any()))
