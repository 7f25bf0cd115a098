"""Are samples independent, and does each meet its own target? One is exchanged: which predictions move, which should?

Time and batch, or draws and batch, that are folded into one axis in one order for the predictions and in another for
the targets give tensors of the right shape in which every row is compared with the target of another sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, Flow, place_of
from gradproof.instruments.grids import Grid, find_grids
from gradproof.instruments.hearing import (
    Confined,
    HeldOrders,
    Statistics,
    alike_along,
    along,
    exchange,
    find_first_spread,
    how_far,
    outcome,
    predictions_of,
    who_moves,
)  # fmt: skip
from gradproof.instruments.rows import chain_behind
from gradproof.instruments.walk import behind
from gradproof.tape.operations import ModuleCall, Operation
from gradproof.tape.operators import FUSED_ATTENTION
from gradproof.tape.replay import Player

FAMILY = "axis-or-shape-error"
FEWEST = 4  # samples: of fewer, a size does not tell which axis is theirs
RECURRENT = ("LSTM", "GRU", "RNN")
ATTENTION = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer")
# what couples samples by mistake, and the words for it; anything else may be meant
BY_MISTAKE = {
    "_softmax": "softmax-over-the-batch", "_log_softmax": "softmax-over-the-batch",
    "_safe_softmax": "softmax-over-the-batch", "linalg_vector_norm": "normalised-over-the-batch",
    "norm": "normalised-over-the-batch", "view": "view-for-transpose", "_unsafe_view": "view-for-transpose",
    "native_layer_norm": "normalised-over-the-batch", "cumsum": "sum-over-the-batch",
    "cumprod": "sum-over-the-batch", "logcumsumexp": "sum-over-the-batch",
}  # fmt: skip
PERMUTE = "transpose or permute to the new order of axes first, then reshape"
NAME_THE_AXIS = "name the axis of the features or classes (dim=-1 or dim=1), not that of the batch"
# products of what is trained with what is trained, where it is attention; a head or a loss over pairs comes later
ATTENDS = ("bmm", "mm", "baddbmm", "matmul", *FUSED_ATTENTION)
WALK = VIEWS | {"clamp_min", "clamp", "add", "sqrt", "div", "mul", "rsqrt", "exp", "sub"}
WALKED = 12  # operations from a division back to the norm that it is by
# as shares of the distance of any two cells: neighbours in time, and neighbours in a shuffled batch
SMOOTH, ROUGH = 0.6, 0.85
MOST_ROWS = 1_000_000  # of a folded target: more take too long to count
LOUD = 0.25  # of the largest change: what a batch norm carries to other samples is less


def are_samples_independent(evidence: Evidence) -> Iterator[Verdict]:
    """Who else moves when one sample is exchanged; and whether what moves is compared with that sample's targets."""
    yield from causes_of(each(evidence, do_rows_come_back, do_others_move, do_the_rows_meet))


# who else moves ---------------------------------------------------------------------------------------------


def do_others_move(evidence: Evidence) -> Verdict | None:
    """BatchNorm and losses over pairs couple samples by design; a softmax over the batch is a mistake."""
    flow, statistics, orders = evidence.flow, Statistics(evidence.flow), HeldOrders(evidence.flow)
    predictions = predictions_of(flow)
    if not predictions:
        return None
    if statistics.out_of_reach:
        return undecided(
            FAMILY, "BatchNorm's statistics come from elsewhere: by them each sample hears all others"
        )

    def held(player: Player, op: Operation) -> None:
        statistics.put_back(player, op)
        orders.put_back(player, op)

    said = "no sample could be exchanged for another: fewer than 4, all alike, or no axis that is the batch's"
    coupled = None
    for axis in likely_axes(evidence, predictions[0]):
        slots = alike_along(flow, axis)
        count = evidence.slot(slots[0]).shape[axis] if slots else 0
        leaves = exchange(flow, slots, axis, 0, count // 2) if count >= FEWEST else {}
        if not leaves:
            continue
        confined = keeps_to_one_sample(count)
        changed = who_moves(flow, predictions, leaves, statistics.keep, held).values()
        kept = [confined(change) for change in changed]
        if not kept or None in kept:
            continue
        # where not even its own prediction moves, it may have gone to the others on the way
        heard = any(bool(change.any()) for change in changed)
        if all(kept) and heard:
            text = f"changing one of {count} samples changes no prediction for another{statistics.held}"
            return excluded(f"{FAMILY}/coupled-samples", text)
        coupled = coupled or (leaves, confined, count, heard)
    if coupled is not None:
        leaves, confined, count, heard = coupled
        op = find_first_spread(flow, leaves, confined, held)
        if op is not None:
            return judge_coupling(evidence, op, count, heard)
        said = f"changing one of {count} samples changes no prediction at all, not its own either"
    return undecided(FAMILY, said)


def judge_coupling(evidence: Evidence, op: Operation, count: int, heard: bool) -> Verdict | None:
    what = "the predictions for" if heard else "no prediction, not even its own, but what is made of"
    call = next((call for call in evidence.tape.modules if (call.path or call.kind) == op.module), None)
    kind = call.kind if call is not None else ""
    line = f"changing one of {count} samples changes {what} the others, first through {op.name}"
    guilty = op if op.name in BY_MISTAKE else _norm_behind(evidence.flow, op)
    if kind in RECURRENT or kind in ATTENTION or "rnn" in op.name or "lstm" in op.name:
        if any(other.name == "_pack_padded_sequence" for other in evidence.forward):
            return None  # time steps of all samples lie in one column
        series = is_one_sequence(evidence, call) or not is_told_from_time(evidence, call)
        return confirmed(
            f"{FAMILY}/batch-first",
            line,
            f"{kind or op.name} takes the axis of the batch for that of time",
            at=op,
            level="note" if series else "problem",
            confidence="possible" if series else "proven",
        )
    if guilty is not None:
        return confirmed(
            f"{FAMILY}/{BY_MISTAKE[guilty.name]}",
            line if guilty is op else f"{line}, made by {guilty.name}",
            at=guilty,
            fix=PERMUTE if "view" in guilty.name else NAME_THE_AXIS,
            confidence="proven",  # a sample was changed
        )
    if op.name in ATTENDS and next_token_grid(evidence) is not None:
        return confirmed(
            f"{FAMILY}/coupled-samples",
            line,
            "the samples are texts, and each token attends to those of all texts of the batch",
            at=op,
            confidence="proven",  # a sample was changed
        )
    return None


def is_one_sequence(evidence: Evidence, call: ModuleCall | None) -> bool:
    """Whether a recurrence is given no batch, or a batch of one: its rows may well be one series."""
    shape = evidence.slot(call.inputs[0]).shape if call is not None and call.inputs else ()
    return len(shape) == 2 or 1 in shape[:2]


def is_told_from_time(evidence: Evidence, call: ModuleCall | None) -> bool:
    """Whether the first axis is known to be the batch's: by targets for each sample, by texts, or by the data.

    Where each cell of both axes has a prediction of its own, either may be time; a series is smooth along it.
    """
    if call is None or not call.inputs or next_token_grid(evidence) is not None:
        return True
    cells = evidence.slot(call.inputs[0]).shape[:2]
    if not any(evidence.slot(slot).shape[:2] == cells for slot in predictions_of(evidence.flow)):
        return True
    alike = [slot for slot in evidence.flow.inputs if evidence.slot(slot).shape[:2] == cells]
    given = evidence.flow.values(alike).values()  # a batch may have been stacked within the step
    rough = [[roughness(x, axis) for axis in (0, 1)] for x in given if x.is_floating_point()]
    return any(second < SMOOTH and first > ROUGH for first, second in rough)


def roughness(x: Tensor, axis: int) -> float:
    """How far neighbours along an axis are apart, against any two cells of it: 1 for rows that were shuffled."""
    x = x.double().nan_to_num()
    near, any_two = (x - x.roll(1, axis)).norm(), math.sqrt(2) * (x - x.mean(axis, keepdim=True)).norm()
    return float(near / any_two) if float(any_two) else 1.0


def _norm_behind(flow: Flow, op: Operation) -> Operation | None:
    """The norm whose result an elementwise operation spreads; None when it is a mean or a variance."""

    def onwards(maker: Operation) -> list[int]:
        return maker.reads if maker.name in WALK else []

    makers = islice(behind(flow, onwards(op), onwards), WALKED)
    return next((maker for maker in makers if maker.name in ("linalg_vector_norm", "norm")), None)


def next_token_grid(evidence: Evidence) -> Grid | None:
    """Texts whose targets are the next tokens: their axes are known, and no text has anything to do with another."""
    return next((grid for grid in find_grids(evidence, by_hand=True) if grid.is_of_next_tokens), None)


def likely_axes(evidence: Evidence, prediction: int) -> list[int]:
    """Which axis of the inputs is that of the batch: told by the targets' order in time, or by the sizes."""
    grid = next_token_grid(evidence)
    if grid is not None:
        return [1 if grid.time_first else 0]
    shape = evidence.slot(prediction).shape
    rows = shape[0] if shape else 0
    shapes = [evidence.slot(slot).shape for slot in evidence.flow.inputs]
    exact = [axis for axis in (0, 1) if any(len(s) > axis and s[axis] == rows for s in shapes)]
    return exact[:1] if len(exact) == 1 else [0, 1]


def keeps_to_one_sample(count: int) -> Confined:
    def confined(changed: Tensor) -> bool | None:
        sizes = {dim: size for dim, size in enumerate(changed.shape) if size % count == 0}
        if not bool(changed.any()):
            return True
        if any(int(along(changed, [dim]).sum()) <= size // count for dim, size in sizes.items()):
            return True
        return False if sizes else None

    return confined


# rows that are sorted and put back ---------------------------------------------------------------------------


def do_rows_come_back(evidence: Evidence) -> Verdict | None:
    """Rows that were taken in some order, and are put back by that order in place of its inverse."""
    flow, held = evidence.flow, HeldOrders(evidence.flow)
    predictions, slots = predictions_of(flow)[:1], alike_along(flow, 0)
    count = evidence.slot(slots[0]).shape[0] if slots else 0
    sample = held.astray(count)
    if sample is None or not predictions or evidence.slot(predictions[0]).shape[:1] != (count,):
        return None
    leaves = exchange(flow, slots, 0, sample, (sample + count // 2) % count)
    ways = (held.put_back, held.put_back_by_the_inverse)
    moved = [change for way in ways for change in who_moves(flow, predictions, leaves, way, way).values()]
    found = [along(change, [0]).nonzero().flatten().tolist() for change in moved]
    if len(found) < 2 or found[0] == [sample] or found[1] != [sample]:
        return None
    op = flow.tape.operations[min(held.again)]
    return confirmed(
        f"{FAMILY}/rows-of-another-sample",
        f"exchanging sample {sample} of {count} moves the predictions of {', '.join(map(str, found[0][:4]))}; with the "
        f"inverse of the order in {op.name}, its own alone",
        "rows that were sorted are put back by the order itself: at the places of others",
        at=op,
        fix="put them back by the inverse: out[order.argsort()], or back[order] = out",
        confidence="proven",  # a sample was changed, with the order and with its inverse
    )


# who meets whose target -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairing:
    """An axis of an input and one of the targets, as they were before they were folded, that count the same samples."""

    axis: int
    origin: int
    origin_axis: int
    count: int


def do_the_rows_meet(evidence: Evidence) -> Verdict | None:
    """Rows that a sample moves must be the rows at which its own targets stand."""
    flow = evidence.flow
    by_hand = [c for c in flow.picked if c.operation.name == "gather" and c.axis == 1]
    by_hand = [c for c in by_hand if len(flow.tape.slots[c.prediction].shape) == 2]
    compared = [*flow.comparisons, *by_hand][:2]
    said = (judge_rows(flow, c, pairing) for c in compared for pairing in islice(pairings(flow, c), 2))
    return next(filter(None, said), None)


def pairings(flow: Flow, comparison: Comparison) -> Iterator[Pairing]:
    """Of folded targets; sizes must tell which axis is which, unless the target is made of the input itself."""
    slots = flow.tape.slots
    folded = rows_of(slots[comparison.target].shape)
    behind = flow.ancestors(comparison.prediction)
    chain = chain_behind(flow, comparison.target)[::-1]
    for given in flow.inputs:
        shape = slots[given].shape[:2]
        for axis, count in enumerate(shape) if given in behind and folded else ():
            if count < FEWEST or folded % count or folded < 2 * count or folded > MOST_ROWS:
                continue
            if all(slots[s].shape[0] == count for s in (comparison.prediction, comparison.target)):
                continue  # not folded
            for origin in chain:
                other = slots[origin].shape[:2]
                if origin == given or (shape.count(count) == 1 and other.count(count) == 1):
                    yield Pairing(axis, origin, axis if origin == given else other.index(count), count)
                    break


def rows_of(shape: tuple[int, ...]) -> int:
    """How many rows a target has: its last axis is that of features, unless it is the only one."""
    return math.prod(shape[:-1] if len(shape) > 1 else shape)


def judge_rows(flow: Flow, comparison: Comparison, pairing: Pairing) -> Verdict | None:
    before = outcome(flow, [comparison.prediction])
    orders, lines = set(), []
    for sample in (pairing.count // 2, 1):
        own = rows_of_target(flow, comparison, pairing, sample)
        order = order_of(own, pairing.count, sample, whole=True) if own is not None else None
        moved = rows_that_move(flow, comparison, pairing, sample, before) if order else None
        if own is None or moved is None or len(own) != len(moved):
            return None
        if bool((own | ~moved).all()):
            said = f"each sample of {pairing.count} moves only the rows of its own targets"
            return excluded(f"{FAMILY}/rows-of-another-sample", said)
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
    makers = [flow.maker(slot) for slot in chain_behind(flow, comparison.target)]
    folding = next((op.line for op in makers if op is not None and op.line), comparison.operation.line)
    return confirmed(
        f"{FAMILY}/rows-of-another-sample",
        lines[0],
        f"{comparison.operation.name} at {place_of('', comparison.operation.line)} compares nearly every row with "
        "the target of another sample",
        where=place_of("", folding),
        confidence="proven",  # the sample was changed
    )


def rows_of_target(flow: Flow, comparison: Comparison, pairing: Pairing, sample: int) -> Tensor | None:
    """Where the targets of one sample stand in the loss: they are changed at their origin."""
    before = flow.values([pairing.origin, comparison.target])
    if len(before) < len({pairing.origin, comparison.target}):
        return None
    value = before[pairing.origin].clone()
    if value.shape != flow.tape.slots[pairing.origin].shape:
        return None  # a recurrent layer has transposed it in place since
    part = value.select(pairing.origin_axis, sample)
    part.copy_(~part if part.dtype == torch.bool else part + 1)
    after = flow.values([comparison.target], {pairing.origin: value}) | {pairing.origin: value}
    end = comparison.target
    return as_rows(after[end] != before[end]) if end in after else None


def rows_that_move(
    flow: Flow, comparison: Comparison, pairing: Pairing, sample: int, before: dict[int, Tensor]
) -> Tensor | None:
    """The rows of the prediction that hear one sample, which is replaced by another of the batch."""
    same = [s for s in flow.inputs if flow.tape.slots[s].shape[pairing.axis :][:1] == (pairing.count,)]
    other = (sample + pairing.count // 3 + 1) % pairing.count
    leaves = exchange(flow, same, pairing.axis, sample, other)
    change = how_far(before, outcome(flow, [comparison.prediction], leaves)).get(comparison.prediction)
    if change is not None and comparison.kind == "class":  # (rows, classes, …)
        change = change.amax(1)
    elif change is None or change.shape != flow.tape.slots[comparison.target].shape:
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
    found = outcome(flow, [comparison.prediction, comparison.target])
    sides = [v.reshape(pairing.count, pairing.count, -1) for v in found.values() if v.shape[0] == rows]
    return any(bool((s == s[:, :1]).all()) or bool((s == s[:1]).all()) for s in sides)


def first(rows: Tensor) -> str:
    return ", ".join(map(str, rows.nonzero().flatten()[:3].tolist())) + ", …"
