"""Does every axis mean what it is used for? In the loss, in views, in the softmax over classes, in norms and positions.

[N, 1] against [N] compares everyone with everyone; [B, C, H, W] that is reshaped to [-1, C] has the right shape, and
rows that hold C neighbours of one class in place of the C classes of one pixel.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from gradproof.experiments.losses.logarithms import SUMS_TO_ONE
from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, first_said
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, VIEWS, Flow, place_of, squeezed
from gradproof.instruments.grids import find_grids
from gradproof.instruments.order import another_order, text_runs_along_the_batch
from gradproof.instruments.rows import as_rows, data_behind, row_numbers, rows_behind
from gradproof.instruments.source import cut_line, forward_line, lines_behind, say_where_made
from gradproof.tape.operations import Line, Operation, Ref
from gradproof.tape.operators import FUSED_ATTENTION

FAMILY = "axis-or-shape-error"
Shape = tuple[int, ...]
PAIRWISE = {"sub", "rsub", "mul"}
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
FEWEST_SAMPLES = 8  # of fewer, an axis of the same length may be another one
FEWEST = 4  # samples, positions that are counted: fewer go up by one by chance
RARE = 0.25  # up by one, of neighbouring places: positions of a sequence nearly always go up
MOST = 1 << 24  # scores that are followed to their places
COUNTERS = ("cumsum", "arange")
SAME_PLACES = {
    "add", "sub", "mul", "div", "neg", "log", "clamp", "tanh", "_softmax", "_log_softmax", "clone", "contiguous",
    "_to_copy", "detach",
}  # fmt: skip
MOST_AXES = 5  # of a shape whose orders are tried
MOST_VIEWS = 8  # one after the other
PADDED = {"constant_pad_nd", "cat"}
KEEPS_AN_AXIS = {
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "logsumexp",
    "linalg_vector_norm",
    "norm",
}  # keepdim=True
RESHAPED = {"view", "_unsafe_view", "reshape"}
ATTENDS = {"bmm", "baddbmm", *FUSED_ATTENTION}
MOVED = RESHAPES | {"slice", "select"}
CHANNELS_SECOND = ("convolution", "upsample_", "native_batch_norm", "cudnn_batch_norm")
CHANNELS_LAST = ("addmm", "mm", "linear")


def do_shapes_meet(evidence: Evidence) -> Iterator[Verdict]:
    looks = (
        meet_in_the_loss, one_row_for_all, view_for_transpose, viewed_before_the_step, text_along_the_batch,
        classes_of_different_places, softmax_along_another_axis, softmax_of_one, normalised_over_the_batch,
        positions_along_the_batch,
    )  # fmt: skip
    yield from causes_of(each(evidence, *map(first_said, looks)))


# what meets in the loss -------------------------------------------------------------------------------------


def meet_in_the_loss(evidence: Evidence) -> Iterator[Verdict]:
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
                f"{FAMILY}/broadcast-into-the-loss",
                line,
                where=place_of("", op.line),
                fix=fix,
                confidence="proven",  # the shapes that meet
            )
        elif _sums_over_samples(evidence, op):
            shape = list(flow.tape.slots[flow.reads(op)[0]].shape)
            yield confirmed(
                f"{FAMILY}/over-the-batch",
                f"{op.name} of {shape} runs over its first axis, the {shape[0]} samples of the batch, not over the "
                f"{shape[1]} numbers that each of them has",
                where=place_of("", op.line),
                confidence="likely",
            )


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
    return (
        len(shape) == 2
        and shape[0] == batch >= FEWEST_SAMPLES
        and 2 <= shape[1] != batch
        and axes in ([0], [-2])
    )


def _crossed(flow: Flow, op: Operation) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of two operands of the loss that hold one number a sample and broadcast to a square by accident.

    Ranks differ in an accident; who wants all pairs writes [:, None] - [None, :], and leaves both at one rank.
    """
    refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
    if len(refs) != 2 or not op.makes or flow.tail.isdisjoint(refs):
        return None
    named = op.name in LOSSES
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
    column = slots[0] if len(first) > len(second) else slots[1]
    both = all(slot in flow.tracked for slot in refs)
    return None if both and is_made_a_column(flow, column) else (first, second)


def is_made_a_column(flow: Flow, slot: int) -> bool:
    """Of two predictions all pairs may be meant: whoever means them makes a column of one, or keeps an axis of one."""
    maker = flow.maker(flow.behind(slot, ("neg", "mul", "div", "alias", "clone", "_to_copy")))
    if maker is None or not flow.reads(maker):
        return False
    if maker.name in ("unsqueeze", *RESHAPED):
        return len(squeezed(flow.tape.slots[flow.reads(maker)[0]].shape)) == 1
    return maker.name in KEEPS_AN_AXIS


def one_row_for_all(evidence: Evidence) -> Iterator[Verdict]:
    """Two inputs from tables of one length, one with the rows of the batch, the other with one of them alone."""
    flow = evidence.flow
    for single in flow.inputs:
        shape = evidence.slot(single).shape
        if len(shape) < 2 or shape[0] != 1:
            continue
        tables = row_of_one(flow, single)
        for other in flow.inputs if tables else ():
            if len(evidence.slot(other).shape) < 2 or evidence.slot(other).shape[0] < FEWEST:
                continue
            for leaf, rows in rows_behind(evidence, other).items():
                table = tables.get(evidence.slot(leaf).shape[0])
                if table is None or table not in rows.tolist():
                    continue
                yield confirmed(
                    f"{FAMILY}/one-row-for-all",
                    f"the input {list(shape)} is row {table} of its data, and is used for all {len(rows)} samples of "
                    f"{list(evidence.slot(other).shape)}: it is that of sample {rows.tolist().index(table)} alone",
                    where=flow.origin(single),
                    confidence="likely",  # a context may be shared on purpose
                )
                return


def row_of_one(flow: Flow, slot: int) -> dict[int, int]:
    """{rows of a table: the one of them that an input of one row was cut from}."""
    found = {}
    for leaf in data_behind(flow, slot):
        rows = flow.tape.slots[leaf].shape[0]
        numbers = flow.values([slot], {leaf: row_numbers(flow, leaf, rows)}).get(slot)
        arrived = as_rows(numbers, rows) if numbers is not None else None
        if arrived is not None and rows > FEWEST:
            found[rows] = int(arrived[0])
    return found


# views ------------------------------------------------------------------------------------------------------


def view_for_transpose(evidence: Evidence) -> Iterator[Verdict]:
    """[T, B, C].view(B, T, C), heads split or joined without a transpose, [layers, B, H].view(B, layers * H)."""
    kinds = {call.path or call.kind: call.kind for call in evidence.tape.modules}
    for op in evidence.flow.operations:
        if op.name not in RESHAPED or op.line is None or not op.makes:
            continue
        if kinds.get(op.module) == "MultiheadAttention":
            continue  # folds heads into the batch, and unfolds them as it folded
        if comes_padded(evidence.flow, op.reads[0]):
            continue  # a column more, and each row begins one later: how relative positions are shifted
        before, after = evidence.slot(op.reads[0]).shape, evidence.slot(op.makes[0]).shape
        folded = folds_parts_into_the_batch(before, after) and is_attended(evidence, op)
        wrong = folded or scrambles(before, after)
        if wrong and op.makes[0] in evidence.flow.tracked | data_slots(evidence):
            yield confirmed(
                f"{FAMILY}/view-for-transpose",
                f"view makes {list(after)} of {list(before)} without moving a number: rows of different axes are mixed",
                where=place_of(op.module, op.line),
                fix="transpose or permute to the new order of axes first, then reshape",
                confidence="likely",  # the shapes alone tell
            )


def folds_parts_into_the_batch(before: Shape, after: Shape) -> bool:
    """Whether (batch, positions, heads · width) becomes (batch · heads, positions, width): a row of it holds all heads
    of a few positions, where one head of all positions was meant. Of as many heads as positions, those may be meant.

    >>> folds_parts_into_the_batch((8, 32, 60), (40, 32, 12)), folds_parts_into_the_batch((8, 5, 60), (40, 5, 12))
    (True, False)
    """
    if len(before) != 3 or len(after) != 3 or before[1] != after[1] or before[1] < 2 or not before[0]:
        return False
    parts = after[0] // before[0]
    return parts > 1 and parts != before[1] and (before[0] * parts, before[2]) == (after[0], parts * after[2])


def is_attended(evidence: Evidence, view: Operation) -> bool:
    """Whether the rows of what a view makes meet each other in a product of batches, perhaps scaled or turned before.
    What looks at each row alone (a norm of every head) may look at them in any order."""
    reached = set(view.makes)
    for op in evidence.flow.operations:
        if op.index > view.index and not reached.isdisjoint(evidence.flow.reads(op)):
            if op.name in ATTENDS:
                return True
            if op.name in VIEWS | {"mul", "div"}:
                reached.update(op.makes)
    return False


def comes_padded(flow: Flow, slot: int) -> bool:
    """Whether something was put in front of each of its rows, or behind, perhaps viewed and cut since."""
    shape_of = lambda slot: flow.tape.slots[slot].shape  # noqa: E731
    for _ in range(MOST_VIEWS):
        maker = flow.maker(slot)
        if maker is None:
            return False
        if maker.name in PADDED:
            return any(shape_of(read)[-1:] != shape_of(slot)[-1:] for read in maker.reads)
        if maker.name not in MOVED | RESHAPED | {"clone", "_to_copy"}:
            return False
        slot = maker.reads[0]
    return False


def data_slots(evidence: Evidence) -> set[int]:
    """What the first layers read."""
    return {slot for op in evidence.flow.layers for slot in op.reads}


def scrambles(before: Shape, after: Shape) -> bool:
    """Whether a reshape of one into the other puts an axis where another was.

    >>> scrambles((8, 64, 4, 4), (8, 16, 64)), scrambles((8, 64, 4, 4), (8, 64, 16)), scrambles((5, 8, 3), (8, 15))
    (True, False, True)
    """
    before, after = tuple(n for n in before if n != 1), tuple(n for n in after if n != 1)
    parts, whole = sorted((before, after), key=len, reverse=True)
    if len(parts) - len(whole) > 1 or len(parts) > MOST_AXES or len(whole) < 2 or whole in _joined(parts):
        return False
    if len(parts) > len(whole) and parts[0] != whole[0]:
        # samples and places as one axis are asked of classes; here, of layers and samples
        return len(parts) == 3 and whole == (parts[1], parts[0] * parts[2])
    return any(whole in _joined(order) for order in permutations(parts) if order != parts)


def _joined(shape: Shape) -> list[Shape]:
    """A shape, and what becomes of it where two neighbouring axes are made one."""
    pairs = range(len(shape) - 1)
    return [shape, *((*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]) for i in pairs)]


def viewed_before_the_step(evidence: Evidence) -> Iterator[Verdict]:
    """[N, T, C] that was viewed as [N, C, T] when the data were made: only the numbers tell."""
    for slot in evidence.flow.inputs:
        batch = evidence.flow.values([slot]).get(slot) if len(evidence.slot(slot).shape) > 2 else None
        found = another_order(batch.detach()) if batch is not None else None
        if batch is not None and found is not None:
            before, over, at = found
            yield confirmed(
                f"{FAMILY}/view-for-transpose",
                f"the numbers of the input {list(batch.shape)} lie as in {[len(batch), *before]}: its rows go on in "
                f"the next one (correlation {over:.2f}), and break off where rows of that shape would end ({at:.2f})",
                *say_where_made(evidence, slot),
                where=where_viewed(evidence, slot),
                fix="transpose or permute to the new order of axes, not view or reshape, where the data are made",
                confidence="likely",  # neighbours are what looks like neighbours
            )


def text_along_the_batch(evidence: Evidence) -> Iterator[Verdict]:
    """A text that is cut by view(-1, B) in place of view(B, -1): each row holds every B-th token."""
    for grid in find_grids(evidence):
        found = text_runs_along_the_batch(grid.tokens.cpu()) if grid.is_of_next_tokens else None
        if found is not None:
            down, along = found
            yield confirmed(
                f"{FAMILY}/view-for-transpose",
                f"the text runs along the batch: a token knows {down:.2g} bits of the one in the next row, and "
                f"{along:.2g} of the one that is to be predicted; it goes on from the last row to the first",
                *say_where_made(evidence, grid.token_slot),
                where=where_viewed(evidence, grid.token_slot),
                fix="cut the text into rows that stay together: data.view(batch_size, -1), .t() if time is first",
                confidence="likely",  # counted, of one batch
            )
            return


def where_viewed(evidence: Evidence, slot: int) -> str | None:
    """The line of the source that reshapes what a batch is cut from, or the one that cuts it."""
    cut = cut_line(evidence.flow, slot) or forward_line(evidence)
    file = cut.file if cut is not None else ""
    for number in lines_behind(cut):
        if any(f".{name}(" in linecache.getline(file, number) for name in ("view", "reshape")):
            return place_of("", Line(file, number, "<data>"))
    return evidence.flow.origin(slot)


# classes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What a softmax of the loss runs over, and the layer it comes from."""

    made: int  # slot: the layer's output
    axis: int  # of it: the classes
    path: list[Operation]  # from there to the softmax
    dim: int  # of the softmax


def classes_of_different_places(evidence: Evidence) -> Iterator[Verdict]:
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
            f"{FAMILY}/classes-of-different-places",
            f"{reshape.name} makes {after} of {before} without moving the axis of the {shape[scores.axis]} classes: "
            f"each softmax runs over {count} scores of different places",
            f"of {len(rows[0])} rows of scores, {of_one} hold {count} times one and the same class",
            where=place_of(reshape.module, reshape.line),
            fix=f"permute({', '.join(map(str, order))}) before the reshape, or give the loss the scores "
            f"{before} as they are",
            confidence="proven",  # each score was followed to its place
        )


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


def softmax_along_another_axis(evidence: Evidence) -> Iterator[Verdict]:
    """A log_softmax over time or over the batch, and a loss that picks along the classes: they do not sum to one."""
    flow = evidence.flow
    for comparison in flow.comparisons:
        made = (
            flow.maker(flow.behind(comparison.prediction, RESHAPES)) if comparison.kind == "class" else None
        )
        if made is None or made.name != "_log_softmax":
            continue
        scores = flow.values([comparison.prediction]).get(comparison.prediction)
        sums = scores.double().exp().sum(comparison.axis) if scores is not None else None
        if sums is None or float(((sums - 1).abs() > SUMS_TO_ONE).double().mean()) < 0.5:
            continue
        shape = evidence.slot(made.makes[0]).shape
        yield confirmed(
            f"{FAMILY}/softmax-axis",
            f"the log_softmax runs over axis {made.args[1]} of {list(shape)}, and the loss picks one of "
            f"{scores.shape[comparison.axis] if scores is not None else 0} classes along another: their probabilities "
            f"sum to {float(sums.median()):.3g}, not to 1",
            where=place_of(made.module, made.line),
            fix="take the log_softmax along the axis of the classes, as a rule dim=-1",
            confidence="proven",  # they were summed
        )


def softmax_of_one(evidence: Evidence) -> Iterator[Verdict]:
    """A softmax over the one score that a layer gives, or that a top-k left: its result is 1, whatever it says."""
    flow = evidence.flow
    for op in flow.operations:
        if op.name != "_softmax" or not flow.makes(op) or flow.reads(op)[0] not in flow.tracked:
            continue
        shape = flow.tape.slots[flow.makes(op)[0]].shape
        axis = op.args[1] % max(1, len(shape))
        maker = flow.maker(flow.behind(flow.reads(op)[0], ("_to_copy", "alias", "view", "_unsafe_view")))
        scored = maker is not None and maker.name in (*CHANNELS_LAST, "topk", "sort")
        if math.prod(shape) < FEWEST or axis != len(shape) - 1 or shape[axis] != 1 or not scored:
            continue
        yield confirmed(
            f"{FAMILY}/softmax-of-one",
            f"the softmax runs over axis {op.args[1]} of {list(shape)}, which has one entry: all {math.prod(shape)} "
            f"results are 1, and no gradient goes back to the scores that {maker.name if maker else ''} gives",
            where=place_of(op.module, op.line),
            confidence="proven",  # exp(x) / exp(x)
        )


# norms and positions ----------------------------------------------------------------------------------------


def normalised_over_the_batch(evidence: Evidence) -> Iterator[Verdict]:
    """Vectors brought to length one along the batch: each feature then depends on who else is in the batch."""
    flow = evidence.flow
    if not flow.inputs:
        return
    batch = evidence.slot(flow.inputs[0]).shape[0]
    for op in flow.operations:
        if op.name not in ("linalg_vector_norm", "norm") or len(op.args) < 3 or op.args[2] != [0]:
            continue
        slot = op.reads[0]
        shape = evidence.slot(slot).shape
        embeddings = len(shape) == 2 and shape[1] > 1 and batch > 1 and shape[0] % batch == 0
        if embeddings and slot in flow.tracked and slot not in flow.weights and divides(flow, op, slot):
            yield confirmed(
                f"{FAMILY}/normalised-over-the-batch",
                f"{list(shape)} is divided by its norm over axis 0, the batch of {batch}: columns have length one, "
                "not the vectors of the samples",
                where=place_of(op.module, op.line),
                confidence="likely",  # some losses want it so
            )


def divides(flow: Flow, norm: Operation, slot: int) -> bool:
    """Whether the tensor whose norm it is gets divided by it."""
    reach = set(norm.makes)
    for op in flow.operations:
        reads = set(flow.reads(op))
        if op.index <= norm.index or not reads & reach:
            continue
        if op.name == "div" and slot in reads:
            return True
        if op.name in VIEWS or op.name in ("clamp_min", "add", "clamp"):
            reach.update(op.makes)
    return False


def positions_along_the_batch(evidence: Evidence) -> Iterator[Verdict]:
    """Position numbers (B, T) that go up by one from sample to sample say nothing about the order of a sequence."""
    flow = evidence.flow
    batches = {evidence.slot(c.target).shape for c in flow.comparisons}
    for op in evidence.forward:
        if op.name != "embedding" or len(op.reads) < 2:
            continue
        shape = evidence.slot(op.reads[1]).shape
        # one answer a sample says which axis the samples are on
        if len(shape) != 2 or min(shape) < FEWEST or shape[0] == shape[1] or (shape[0],) not in batches:
            continue
        behind = flow.ancestors(op.reads[1])
        counters = [o for o in evidence.forward if o.name in COUNTERS and not behind.isdisjoint(o.makes)]
        numbers = evidence.values([op.reads[1]]).get(op.reads[1])
        if counters and numbers is not None and runs_along_the_batch(numbers):
            yield confirmed(
                f"{FAMILY}/positions-along-the-batch",
                f"the positions (shape {tuple(shape)}) looked up beside the tokens go from {int(numbers[0, 0])} "
                f"to {int(numbers[-1, 0])} over the {shape[0]} samples, and from {int(numbers[0, 0])} to "
                f"{int(numbers[0, -1])} over the {shape[1]} places of the first",
                where=place_of(counters[-1].module, counters[-1].line),
                confidence="likely",  # numbers that look like positions
            )


def runs_along_the_batch(numbers: Tensor) -> bool:
    """Up by one or not at all from each sample to the next, mostly by one; hardly ever from place to place."""
    down, along = numbers.diff(dim=0), numbers.diff(dim=1)
    steady = bool(((down == 0) | (down == 1)).all()) and int(numbers[0].max()) <= 1
    return steady and float((down == 1).double().mean()) > 0.5 and float((along == 1).double().mean()) < RARE
