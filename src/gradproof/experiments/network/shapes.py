"""Does every axis mean what it is used for? In the loss, in views, in the softmax over classes, in norms and positions.

[N, 1] against [N] compares everyone with everyone; [B, C, H, W] that is reshaped to [-1, C] has the right shape, and
rows that hold C neighbours of one class in place of the C classes of one pixel.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator
from itertools import islice, permutations

import torch
from torch import Tensor

from gradproof.experiments.losses.activation import SUMS_TO_ONE
from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, VIEWS, Flow, place_of, squeezed
from gradproof.instruments.grids import find_grids
from gradproof.instruments.order import another_order, text_runs_along_the_batch
from gradproof.instruments.rows import as_rows, data_behind, row_numbers, rows_behind
from gradproof.instruments.source import cut_line, forward_line, lines_behind, say_where_made
from gradproof.instruments.walk import RESHAPED, ahead, back, carry, operands
from gradproof.tape.operations import Line, Operation
from gradproof.tape.operators import FUSED_ATTENTION

FAMILY = "axis-or-shape-error"
Shape = tuple[int, ...]
PAIRWISE = {"sub", "rsub", "mul"}
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
FEWEST = 4  # samples, results of a softmax: of fewer, an axis of one may be meant
MOST = 1 << 24  # scores that are followed to their places
SAME_PLACES = {
    "add", "sub", "mul", "div", "neg", "log", "clamp", "tanh", "_softmax", "_log_softmax", "clone", "contiguous",
    "_to_copy", "detach",
}  # fmt: skip
MOST_AXES = 5  # of a shape whose orders are tried
MOST_VIEWS = 8  # one after the other
PADDED = {"constant_pad_nd", "cat"}
KEEPS_AN_AXIS = {  # keepdim=True
    "sum", "mean", "amax", "amin", "max", "min", "logsumexp", "linalg_vector_norm", "norm",
}  # fmt: skip
ATTENDS = {"bmm", "baddbmm", *FUSED_ATTENTION}
MOVED = RESHAPES | {"slice", "select"}
OF_CLASSES = ("_log_softmax", "_softmax")
CHANNELS_SECOND = ("convolution", "upsample_", "native_batch_norm", "cudnn_batch_norm")
CHANNELS_LAST = ("addmm", "mm", "linear")


def do_shapes_meet(evidence: Evidence) -> Iterator[Verdict]:
    looks = (
        meet_in_the_loss, summed_over_the_batch, one_row_for_all, view_for_transpose, viewed_before_the_step,
        text_along_the_batch, classes_of_different_places, softmax_along_another_axis, softmax_of_one,
        normalised_over_the_batch,
    )  # fmt: skip
    yield from causes_of(each(evidence, *looks))


# what meets in the loss -------------------------------------------------------------------------------------


def meet_in_the_loss(evidence: Evidence) -> Verdict | None:
    """One number a sample, as a column against a row, becomes a square: the mean of it pulls every prediction to the
    mean of all targets."""
    for op in evidence.flow.operations:
        shapes = _crossed(evidence.flow, op)
        if shapes is not None:
            (first, second), count = shapes, max(shapes[0])
            column = list(first if len(first) > len(second) else second)
            return confirmed(
                f"{FAMILY}/broadcast-into-the-loss",
                f"{op.name} of {list(first)} and {list(second)} gives {[count, count]}: "
                f"each of {count} predictions meets all {count} targets",
                where=place_of("", op.line),
                fix=f"give both the shape [{count}], for example with .squeeze(-1) on the {column}",
                confidence="proven",  # the shapes that meet
            )
    return None


def summed_over_the_batch(evidence: Evidence) -> Verdict | None:
    """A logsumexp or softmax of the loss, of (samples, a few) along the samples; all pairs make a square."""
    flow = evidence.flow
    batch = evidence.slot(flow.inputs[0]).shape[0] if flow.inputs else 0
    for op in flow.operations:
        if op.name not in ("logsumexp", *OF_CLASSES) or flow.tail.isdisjoint(op.makes):
            continue
        shape, axis = evidence.slot(op.reads[0]).shape, op.args[1] if len(op.args) > 1 else None
        axes = [axis] if isinstance(axis, int) else list(axis or ())
        if len(shape) == 2 and shape[0] == batch >= FEWEST and 2 <= shape[1] != batch and axes in ([0], [-2]):
            return confirmed(
                f"{FAMILY}/over-the-batch",
                f"{op.name} of {list(shape)} runs over its first axis, the {shape[0]} samples of the batch, not over "
                f"the {shape[1]} numbers that each of them has",
                where=place_of("", op.line),
                confidence="likely",
            )
    return None


def _crossed(flow: Flow, op: Operation) -> tuple[Shape, Shape] | None:
    """The shapes of two operands of the loss that hold one number a sample and broadcast to a square by accident.

    Ranks differ in an accident; who wants all pairs writes [:, None] - [None, :], and leaves both at one rank.
    """
    pair, named = operands(op), op.name in LOSSES
    if not (named or op.name in PAIRWISE) or len(pair) != 2 or not op.makes or flow.tail.isdisjoint(pair):
        return None
    slots = [flow.behind(slot, ("expand",)) for slot in pair] if named else pair
    first, second = (flow.tape.slots[slot].shape for slot in slots)
    if len(first) == len(second) or squeezed(first) != squeezed(second) or len(squeezed(first)) != 1:
        return None
    made = flow.tape.slots[pair[0] if named else op.makes[0]].shape
    if squeezed(made) != 2 * squeezed(first):
        return None
    column = slots[0] if len(first) > len(second) else slots[1]
    return None if flow.tracked.issuperset(pair) and is_made_a_column(flow, column) else (first, second)


def is_made_a_column(flow: Flow, slot: int) -> bool:
    """Of two predictions all pairs may be meant: whoever means them makes a column of one, or keeps an axis of one."""
    maker = flow.maker(flow.behind(slot, ("neg", "mul", "div", "alias", "clone", "_to_copy")))
    if maker is None or not flow.reads(maker):
        return False
    if maker.name in ("unsqueeze", *RESHAPED):
        return len(squeezed(flow.tape.slots[flow.reads(maker)[0]].shape)) == 1
    return maker.name in KEEPS_AN_AXIS


def one_row_for_all(evidence: Evidence) -> Verdict | None:
    """Two inputs from tables of one length, one with the rows of the batch, the other with one of them alone."""
    flow = evidence.flow
    shapes = {slot: evidence.slot(slot).shape for slot in flow.inputs if len(evidence.slot(slot).shape) > 1}
    batches = [slot for slot, shape in shapes.items() if shape[0] >= FEWEST]
    for single in (slot for slot, shape in shapes.items() if shape[0] == 1):
        tables = row_of_one(flow, single)
        for other in batches if tables else ():
            for leaf, rows in rows_behind(evidence, other).items():
                row = tables.get(evidence.slot(leaf).shape[0])
                if row is not None and row in rows.tolist():
                    return confirmed(
                        f"{FAMILY}/one-row-for-all",
                        f"the input {list(shapes[single])} is row {row} of its data, and is used for all {len(rows)} "
                        f"samples of {list(shapes[other])}: it is that of sample {rows.tolist().index(row)} alone",
                        where=flow.origin(single),
                        confidence="likely",  # a context may be shared on purpose
                    )
    return None


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


def view_for_transpose(evidence: Evidence) -> Verdict | None:
    """[T, B, C].view(B, T, C), heads split or joined without a transpose, [layers, B, H].view(B, layers * H)."""
    flow = evidence.flow
    # attention of PyTorch's own folds heads into the batch, and unfolds them as it folded
    folds = {call.path or call.kind for call in evidence.tape.modules if call.kind == "MultiheadAttention"}
    read_first = {slot for op in flow.layers for slot in op.reads}
    for op in flow.operations:
        if op.name not in RESHAPED or op.line is None or not op.makes or op.module in folds:
            continue
        if op.makes[0] not in flow.tracked | read_first or comes_padded(flow, op.reads[0]):
            continue
        before, after = evidence.slot(op.reads[0]).shape, evidence.slot(op.makes[0]).shape
        if scrambles(before, after) or (folds_parts_into_the_batch(before, after) and is_attended(flow, op)):
            return confirmed(
                f"{FAMILY}/view-for-transpose",
                f"view makes {list(after)} of {list(before)} without moving a number: rows of different axes are mixed",
                at=op,
                fix="transpose or permute to the new order of axes first, then reshape",
                confidence="likely",  # the shapes alone tell
            )
    return None


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


def is_attended(flow: Flow, view: Operation) -> bool:
    """Whether the rows of what a view makes meet each other in a product of batches, perhaps scaled or turned before.
    What looks at each row alone (a norm of every head) may look at them in any order."""
    users = ahead(flow, view.makes, VIEWS | {"mul", "div"}, within=flow.operations)
    return any(op.name in ATTENDS and op.index > view.index for op in users)


def comes_padded(flow: Flow, slot: int) -> bool:
    """Whether something was put in front of each of its rows, or behind, perhaps viewed and cut since: a column more,
    and each row begins one later, which is how relative positions are shifted."""
    width = lambda slot: flow.tape.slots[slot].shape[-1:]  # noqa: E731
    makers = islice(back(flow, slot, MOVED | RESHAPED | {"clone", "_to_copy"}), MOST_VIEWS)
    pads = (op for op in makers if op.name in PADDED)
    return any(width(read) != width(flow.makes(op)[0]) for op in pads for read in flow.reads(op))


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


def viewed_before_the_step(evidence: Evidence) -> Verdict | None:
    """[N, T, C] that was viewed as [N, C, T] when the data were made: only the numbers tell."""
    for slot in (slot for slot in evidence.flow.inputs if len(evidence.slot(slot).shape) > 2):
        batch = evidence.flow.values([slot]).get(slot)
        found = another_order(batch.detach()) if batch is not None else None
        if batch is not None and found is not None:
            before, over, at = found
            return confirmed(
                f"{FAMILY}/view-for-transpose",
                f"the numbers of the input {list(batch.shape)} lie as in {[len(batch), *before]}: its rows go on in "
                f"the next one (correlation {over:.2f}), and break off where rows of that shape would end ({at:.2f})",
                *say_where_made(evidence, slot),
                where=where_viewed(evidence, slot),
                fix="transpose or permute to the new order of axes, not view or reshape, where the data are made",
                confidence="likely",  # neighbours are what looks like neighbours
            )
    return None


def text_along_the_batch(evidence: Evidence) -> Verdict | None:
    """A text that is cut by view(-1, B) in place of view(B, -1): each row holds every B-th token."""
    for grid in (grid for grid in find_grids(evidence) if grid.is_of_next_tokens):
        found = text_runs_along_the_batch(grid.tokens.cpu())
        if found is not None:
            return confirmed(
                f"{FAMILY}/view-for-transpose",
                f"the text runs along the batch: a token knows {found[0]:.2g} bits of the one in the next row, and "
                f"{found[1]:.2g} of the one that is to be predicted; it goes on from the last row to the first",
                *say_where_made(evidence, grid.token_slot),
                where=where_viewed(evidence, grid.token_slot),
                fix="cut the text into rows that stay together: data.view(batch_size, -1), .t() if time is first",
                confidence="likely",  # counted, of one batch
            )
    return None


def where_viewed(evidence: Evidence, slot: int) -> str | None:
    """The line of the source that reshapes what a batch is cut from, or the one that cuts it."""
    cut = cut_line(evidence.flow, slot) or forward_line(evidence)
    file = cut.file if cut is not None else ""
    for number in lines_behind(cut):
        if any(f".{name}(" in linecache.getline(file, number) for name in ("view", "reshape")):
            return place_of("", Line(file, number, "<data>"))
    return evidence.flow.origin(slot)


# classes ----------------------------------------------------------------------------------------------------


def classes_of_different_places(evidence: Evidence) -> Verdict | None:
    """Each softmax of a loss over classes has to run over the channels of the last layer, at one pixel or position."""
    flow = evidence.flow
    for softmax in softmaxes_of_classes(flow):
        layer, classes, path = follow_back(flow, softmax)
        reshape = next((op for op in reversed(path) if op.name in RESHAPED), None)
        shape = flow.tape.slots[flow.makes(layer)[0]].shape if layer is not None else ()
        if reshape is None or not shape or math.prod(shape) > MOST:
            continue
        rows = [places(flow, path, shape, axis, softmax.args[1]) for axis in range(len(shape))]
        if not is_mixed(rows, classes, shape):
            continue
        ends = (flow.reads(reshape)[0], flow.makes(reshape)[0])
        before, after = (list(flow.tape.slots[slot].shape) for slot in ends)
        count = rows[0].shape[1]
        of_one = int((rows[classes] == rows[classes][:, :1]).all(1).sum())
        order = [n for n in range(len(before)) if n != classes] + [classes]
        return confirmed(
            f"{FAMILY}/classes-of-different-places",
            f"{reshape.name} makes {after} of {before} without moving the axis of the {shape[classes]} classes: "
            f"each softmax runs over {count} scores of different places",
            f"of {len(rows[0])} rows of scores, {of_one} hold {count} times one and the same class",
            at=reshape,
            fix=f"permute({', '.join(map(str, order))}) before the reshape, or give the loss the scores "
            f"{before} as they are",
            confidence="proven",  # each score was followed to its place
        )
    return None


def softmaxes_of_classes(flow: Flow) -> list[Operation]:
    """Behind each entry that a loss picks by its class."""
    picked = [c.prediction for c in flow.comparisons if c.kind == "class"]
    picked += [flow.reads(op)[0] for op in flow.picks]
    ends = (list(back(flow, slot, SAME_PLACES - set(OF_CLASSES)))[-1:] for slot in picked)
    return list({op.index: op for end in ends for op in end if op.name in OF_CLASSES}.values())


def follow_back(flow: Flow, softmax: Operation) -> tuple[Operation | None, int, list[Operation]]:
    """The layer whose output a softmax runs over, its axis of classes, and the views and pointwise operations from
    there on; no layer where anything else lies between."""
    slots, layers = flow.tape.slots, {op.index for op in flow.layers}

    def axis_of(op: Operation) -> int | None:
        rank = len(slots[flow.makes(op)[0]].shape)
        if op.name.startswith(CHANNELS_SECOND) and rank > 2:
            return 1
        return rank - 1 if op.index in layers and op.name in CHANNELS_LAST else None

    def keeps_places(op: Operation) -> bool:
        if axis_of(op) is not None or op.writes or not flow.reads(op):
            return False
        shapes = {slots[slot].shape for slot in (flow.reads(op)[0], flow.makes(op)[0])}
        return op.name in MOVED or (op.name in SAME_PLACES and len(shapes) == 1)

    path = list(back(flow, flow.reads(softmax)[0], keeps_places))
    axis = axis_of(path[-1]) if path else None
    return (None, 0, []) if axis is None else (path[-1], axis, path[-2::-1])


def places(flow: Flow, path: list[Operation], shape: Shape, axis: int, dim: int) -> Tensor:
    """(softmaxes, entries of each): where along an axis of the layer's output each score stood."""
    kind = torch.uint8 if shape[axis] <= 256 else torch.int32
    counted = torch.arange(shape[axis]).to(kind).view(-1, *[1] * (len(shape) - 1 - axis))
    where = carry(flow, path, counted.expand(shape)).movedim(dim, -1)
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


def softmax_along_another_axis(evidence: Evidence) -> Verdict | None:
    """A log_softmax over time or over the batch, and a loss that picks along the classes: they do not sum to one."""
    flow = evidence.flow
    for comparison in (c for c in flow.comparisons if c.kind == "class"):
        made = flow.maker(flow.behind(comparison.prediction, RESHAPES))
        if made is None or made.name != "_log_softmax":
            continue
        scores = flow.values([comparison.prediction]).get(comparison.prediction)
        sums = scores.double().exp().sum(comparison.axis) if scores is not None else None
        if scores is None or sums is None or float(((sums - 1).abs() > SUMS_TO_ONE).double().mean()) < 0.5:
            continue
        return confirmed(
            f"{FAMILY}/softmax-axis",
            f"the log_softmax runs over axis {made.args[1]} of {list(evidence.slot(made.makes[0]).shape)}, and the "
            f"loss picks one of {scores.shape[comparison.axis]} classes along another: their probabilities sum to "
            f"{float(sums.median()):.3g}, not to 1",
            at=made,
            fix="take the log_softmax along the axis of the classes, as a rule dim=-1",
            confidence="proven",  # they were summed
        )
    return None


def softmax_of_one(evidence: Evidence) -> Verdict | None:
    """A softmax over the one score that a layer gives, or that a top-k left: its result is 1, whatever it says."""
    flow = evidence.flow
    for op in flow.operations:
        if op.name != "_softmax" or not flow.makes(op) or flow.reads(op)[0] not in flow.tracked:
            continue
        shape = flow.tape.slots[flow.makes(op)[0]].shape
        maker = flow.maker(flow.behind(flow.reads(op)[0], ("_to_copy", "alias", "view", "_unsafe_view")))
        over_one = shape[-1:] == (1,) and op.args[1] % len(shape) == len(shape) - 1
        if (
            over_one
            and math.prod(shape) >= FEWEST
            and maker is not None
            and maker.name in (*CHANNELS_LAST, "topk", "sort")
        ):
            return confirmed(
                f"{FAMILY}/softmax-of-one",
                f"the softmax runs over axis {op.args[1]} of {list(shape)}, which has one entry: all "
                f"{math.prod(shape)} results are 1, and no gradient goes back to the scores that {maker.name} gives",
                at=op,
                confidence="proven",  # exp(x) / exp(x)
            )
    return None


def normalised_over_the_batch(evidence: Evidence) -> Verdict | None:
    """Vectors brought to length one along the batch: each feature then depends on who else is in the batch."""
    flow = evidence.flow
    batch = evidence.slot(flow.inputs[0]).shape[0] if flow.inputs else 1
    for op in flow.operations:
        if op.name not in ("linalg_vector_norm", "norm") or len(op.args) < 3 or op.args[2] != [0]:
            continue
        slot, shape = op.reads[0], evidence.slot(op.reads[0]).shape
        embeddings = len(shape) == 2 and shape[1] > 1 and batch > 1 and shape[0] % batch == 0
        behind = ahead(flow, op.makes, VIEWS | {"clamp_min", "add", "clamp"}, flow.operations)
        divided = any(reader.name == "div" and slot in reader.reads for reader in behind)
        if embeddings and slot in flow.tracked and slot not in flow.weights and divided:
            return confirmed(
                f"{FAMILY}/normalised-over-the-batch",
                f"{list(shape)} is divided by its norm over axis 0, the batch of {batch}: columns have length one, "
                "not the vectors of the samples",
                at=op,
                confidence="likely",  # some losses want it so
            )
    return None
