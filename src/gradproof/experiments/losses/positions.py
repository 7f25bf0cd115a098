"""Which targets count? The gradient at each position or entry, against padding, masks, classes and gaps."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, Flow, place_of, place_of_data
from gradproof.instruments.grids import EXACT, Grid, find_grids, find_padding
from gradproof.instruments.source import read, say_where_made
from gradproof.instruments.walk import users
from gradproof.instruments.weights import pull, take_apart
from gradproof.tape.operations import Line, Operation, Ref


def which_positions_count(evidence: Evidence) -> Iterator[Verdict]:
    """Padding, or what fills a gap, that is learned; text, sequences and classes that are not; a mask turned round."""
    looks = (of_sequences, of_alignments, mean_over_all, filling_counts)
    yield from causes_of(each(evidence, *looks))


FAMILY = "loss-mask-error"
MOST = 0.9  # of rows or positions: what a rule makes, with some exceptions
SHARE = 0.1  # of the positions that count being padding: more than a slip
FEWEST_ROWS, MANY_ROWS = 8, 0.5  # without targets: more than a few that are too short for anything
SHORTER = 0.95  # of the pairs of a row without and one with targets, the first is the shorter
FEWEST = 8  # positions that do not count: of fewer, all may be of one class by chance
HIDDEN = 0.6  # of the positions to fill in: of ten chosen ones BERT hides eight, and changes one
CHOSEN = 0.6  # of the real positions: beyond that it is what counts that is chosen
INSIDE = 0.4  # of them with positions that count before and behind them: no prompt, no tail
MASKED = ("mul", "masked_fill", "index", "masked_select", "where")
SEEN = 0.1  # of them whose token counts somewhere else: no special tokens, no second halves of words


def of_sequences(evidence: Evidence) -> Iterator[Verdict]:
    pulls: dict[int, Tensor | None] = {}
    said: list[Verdict | None] = []
    for grid in find_grids(evidence):
        slot = grid.comparison.prediction
        gradient = pulls[slot] = pulls[slot] if slot in pulls else pull(evidence, slot)
        counts = grid.by_position(gradient.abs().amax(1)) > 0 if gradient is not None else None
        if counts is not None and bool(counts.any()):
            looks = (padding_or_words, sequences_without_targets, class_left_out)
            said += [look(grid, counts) for look in looks]
    yield from first_of(said)


def padding_or_words(grid: Grid, counts: Tensor) -> Verdict | None:
    if grid.time_first and not grid.is_of_next_tokens:
        return None
    pad = find_padding(grid.tokens)
    pad = find_padding(grid.targets, front=False) if pad is None else pad
    made = grid.evidence.flow.origin(grid.comparison.target, grid.comparison.operation.line)
    tokens = grid.tokens[:, : grid.targets.shape[1]]
    hidden = masked_token(tokens, counts)
    if hidden is not None and float(((grid.targets == tokens) & counts).sum()) >= EXACT * float(counts.sum()):
        return confirmed(
            f"{FAMILY}/inverted",
            f"the positions replaced by token {hidden} are the only ones that do not count; "
            "everywhere else the target is the input itself",
            where=made,
            confidence="likely",  # a mask is what looks like one
        )
    if rest_left_out(grid, pad, counts):
        return confirmed(
            f"{FAMILY}/rest-left-out",
            "in every row the loss counts from the first token on and ends before the text does: what comes last, as a "
            "rule the answer, is never learned",
            where=made,
            level="warning",
            confidence="likely",
        )
    return padding_counts(grid, pad, tokens, counts) if pad is not None else None


def padding_counts(grid: Grid, pad: int, tokens: Tensor, counts: Tensor) -> Verdict:
    # a target may be the padding token; a tag of another vocabulary is padding where its token is
    is_pad = grid.targets == pad if grid.classes >= grid.vocabulary else tokens == pad
    learned = is_pad & counts
    if grid.classes >= grid.vocabulary:  # the first may be the end of the text: many use one token for both
        learned[:, 1:] &= is_pad[:, :-1]
    share = float(learned.sum()) / float(counts.sum())
    said = f"{100 * share:.0f} % of the positions that count in the loss are padding (token {pad})"
    said += f" (ignore_index is {grid.ignored})"
    if not share > SHARE:
        return excluded(f"{FAMILY}/padding-counts", said)
    real = float((counts & ~is_pad).sum()) / max(1.0, float((~is_pad & grid.valid).sum()))
    lost = int((~grid.valid & ~is_pad).sum())
    return confirmed(
        f"{FAMILY}/{'inverted' if real < 1 - EXACT else 'padding-counts'}",
        f"{said}; {lost} real positions do not count" if lost else said,
        where=place_of("", grid.comparison.operation.line),
        fix=f"cross_entropy(..., ignore_index={pad}), or multiply by the mask and divide by its sum",
        confidence="likely",  # padding is what looks like padding
    )


def masked_token(tokens: Tensor, counts: Tensor) -> int | None:
    """The one token that stands at most positions that do not count, and nowhere else."""
    hidden, seen = tokens[~counts], tokens[counts]
    if hidden.numel() < 4 or not seen.numel():
        return None
    token = int(torch.mode(hidden).values)
    alone = float((hidden == token).double().mean()) > HIDDEN and not bool((seen == token).any())
    return token if alone and token != find_padding(tokens) else None


def rest_left_out(grid: Grid, pad: int | None, counts: Tensor) -> bool:
    """Of next tokens, only those at the beginning of each row count, though the text goes on for two more at least.

    One token that is repeated to the end of the row is no text, whatever else it stands for (a name's start and end).
    """
    if not grid.is_of_next_tokens:
        return False
    length, tokens = grid.targets.shape[1], grid.tokens
    real = torch.ones_like(tokens, dtype=torch.bool) if pad is None else tokens != pad
    goes_on = real & (tokens != tokens.roll(-1, 1)) & real.roll(-1, 1)
    goes_on[:, -1] = False
    ends = counts.long().cumsum(1) == counts.sum(1, keepdim=True)  # from the last position that counts on
    behind = (goes_on[:, :length] & ends & ~counts).sum(1)
    begins = counts[:, 0] & (counts.long().diff(dim=1) <= 0).all(1)
    return bool((behind >= 2).double().mean() > MOST) and bool(begins.double().mean() > MOST)


# sequences --------------------------------------------------------------------------------------------------


def sequences_without_targets(grid: Grid, counts: Tensor) -> Verdict | None:
    """A mask that is counted from the end of the padded row leaves only padding of all but the longest sequences.

    Those that lost their answers because they were cut off are the longest of a batch, not the shortest.
    """
    pad = find_padding(grid.tokens, front=False) if grid.is_of_next_tokens else None
    if pad is None:
        return None
    lengths, counted = (grid.tokens != pad).sum(1), (counts & grid.valid & (grid.targets != pad)).any(1)
    empty, full = lengths[~counted], lengths[counted]
    if not len(empty):
        said = f"each of {len(lengths)} sequences has a position that counts"
        return excluded(f"{FAMILY}/sequences-without-targets", said)
    if len(empty) < max(FEWEST_ROWS, MANY_ROWS * len(lengths)) or not len(full):
        return None
    shorter = float((empty[:, None] < full[None, :]).double().mean())
    if shorter < SHORTER or int(empty.max()) >= grid.tokens.shape[1]:
        return None
    line = masking_line(grid)
    return confirmed(
        f"{FAMILY}/sequences-without-targets",
        f"{len(empty)} of {len(lengths)} sequences have no position that counts in the loss, and they are the short "
        f"ones: {int(empty.min())} to {int(empty.max())} tokens, the others {int(full.min())} to {int(full.max())}, "
        f"padded to {grid.tokens.shape[1]}",
        "so it is with a mask that is counted from the end of the padded row: there short sequences have only padding",
        where=place_of_data(line) if line else grid.evidence.flow.origin(grid.comparison.target),
        confidence="likely",
    )


def masking_line(grid: Grid) -> Line | None:
    """Where targets are set to what is ignored: the last such write on the tape, or the only one of the source."""
    flow, slots = grid.evidence.flow, grid.evidence.tape.slots
    behind = {slots[slot].storage for slot in flow.ancestors(grid.comparison.target)}
    for op in reversed(flow.forward):
        filled = any(isinstance(a, (int, float)) and a == grid.ignored for a in op.args)
        if filled and op.line is not None and any(slots[slot].storage in behind for slot in op.writes):
            return op.line
    line = grid.comparison.operation.line
    nodes = ast.walk(read(line.file).tree) if line is not None else ()
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Subscript)]
    found = [node.lineno for node in assigned if ast.unparse(node.value) == str(grid.ignored)]
    return Line(line.file, found[0], "<mask>") if line is not None and len(found) == 1 else None


# classes ----------------------------------------------------------------------------------------------------


def class_left_out(grid: Grid, counts: Tensor) -> Verdict | None:
    """`mask = tags > 0` where tag 0 is one of the tags; an ignore_index that is a class."""
    args, pad = grid.comparison.operation.args, find_padding(grid.tokens)
    # rows are padded, columns are not; where nothing is padded, rows are taken to come first
    lies_the_other_way = pad is None and (grid.time_first or find_padding(grid.tokens.T) is not None)
    if (len(args) > 2 and isinstance(args[2], Ref)) or lies_the_other_way:
        return None  # a weight for each class is meant so
    tokens = grid.tokens[:, : grid.targets.shape[1]]
    real = torch.ones_like(counts) if pad is None else tokens != pad
    lost = real & ~counts
    number, total = int(lost.sum()), int(real.sum())
    if not FEWEST <= number <= CHOSEN * total:
        return None
    classes, counted = torch.unique(grid.targets[lost]), grid.targets[counts]
    left = int(classes[0])
    if len(classes) > 1 or not 0 <= left < grid.classes or bool((counted == left).any()):
        return None
    if len(torch.unique(counted)) < 2 or not is_in_the_midst(lost, counts, real):
        return None
    if grid.classes >= grid.vocabulary and (left == pad or share_of_next(grid, lost, left) < MOST):
        return None  # a text of which only parts count, the rest marked with a token that is none of it
    seen = float(torch.isin(tokens[lost], tokens[counts]).double().mean())
    how = f"ignore_index is {left}" if grid.ignored == left else "the mask takes them away"
    return confirmed(
        f"{FAMILY}/class-left-out",
        f"{number} of {total} real positions ({100 * number / total:.0f} %) do not count in the loss ({how}): all have "
        f"target {left}, one of the {grid.classes} classes, which counts nowhere",
        f"{100 * seen:.0f} % of them hold a token that counts at another position: they are not padding",
        where=place_of("", mask_line(grid) or grid.comparison.operation.line),
        fix=f"let class {left} count: mask by the lengths or the input's padding, and give padded targets a number "
        "that is no class (-100)",
        level="problem" if seen >= SEEN else "warning",
        confidence="likely" if seen >= SEEN else "possible",
    )


def is_in_the_midst(lost: Tensor, counts: Tensor, real: Tensor) -> bool:
    """Whether positions are lost here and there between others, and not the same ones in every row."""
    before = counts.long().cumsum(1) > 0
    behind = counts.flip(1).long().cumsum(1).flip(1) > 0
    inside = lost & before & behind
    mixed = (lost.any(0) & counts.any(0))[real.sum(0) >= 4]
    return float(inside.sum()) >= INSIDE * float(lost.sum()) and bool(mixed.double().mean() >= 0.5)


def share_of_next(grid: Grid, lost: Tensor, token: int) -> float:
    """How often a token follows, or stands at, the positions whose target it is."""
    length = min(grid.tokens.shape[1] - 1, lost.shape[1])
    chosen = lost[:, :length]
    following, same = grid.tokens[:, 1 : length + 1][chosen], grid.tokens[:, :length][chosen]
    shares = [float((found == token).double().mean()) for found in (following, same) if found.numel()]
    return max(shares, default=0.0)


def mask_line(grid: Grid) -> Line | None:
    """Where the mask was made that the losses of the positions are multiplied with or chosen by."""
    flow = grid.evidence.flow
    readers = users(flow, grid.comparison.operation.makes[:1], VIEWS)
    masked = next((op for op in readers if op.name in MASKED and len(op.reads) > 1), None)
    given = [slot for slot in masked.reads if slot not in flow.tracked] if masked is not None else []
    makers = (flow.maker(flow.behind(slot, VIEWS)) for slot in given)
    return next((op.line for op in makers if op is not None and op.line is not None), None)


# frames -----------------------------------------------------------------------------------------------------

TOO_SHORT = 0.2  # of the samples: more than a few that were cut badly
LONGEST = 0.75  # of the frames: a batch is padded to its longest sample, give or take what a convolution adds


def of_alignments(evidence: Evidence) -> Iterator[Verdict]:
    """CTC that is told of fewer frames than there are, so that what does not fit costs nothing; and whose labels hold
    the blank itself, which means that nothing is said: a path through it is never written."""
    for op in (op for op in evidence.flow.operations if op.name == "_ctc_loss"):
        labels, given = labels_and_frames(evidence.flow, op)
        frames, *_, classes = evidence.slot(op.args[0].slot).shape
        wanted, every = torch.tensor([len(row) for row in labels]), torch.cat(labels)
        # a blank has to stand between two that are the same
        again = torch.tensor([int((row[1:] == row[:-1]).sum()) for row in labels])
        short, longest = given < wanted + again, int(given.max())
        many = len(given) >= SMALLEST and float(short.double().mean()) > TOO_SHORT
        if many and longest <= LONGEST * frames:
            dropped = ", and zero_infinity drops them without a word" if op.args[-1] is True else ""
            yield confirmed(
                f"{FAMILY}/frames-left-out",
                f"{int(short.sum())} of {len(given)} samples have more labels than the frames that the loss is told "
                f"of: their loss is infinite{dropped}",
                f"the scores have {frames} frames, the longest sample is said to have {longest}",
                where=place_of(op.module, op.line),
                fix=f"give the lengths of the scores, subsampled as far as the network does it: here {frames} frames "
                "for the longest sample",
                confidence="proven",  # counted
            )
        blank = op.args[4] if len(op.args) > 4 else 0
        if bool((every == blank).any()):
            holding = sum(bool((row == blank).any()) for row in labels)
            yield confirmed(
                f"{FAMILY}/blank-in-targets",
                f"{int((every == blank).sum())} labels of {holding} samples ({len(labels)} in the batch) are {blank}, "
                f"the blank of ctc_loss: what stands for silence is never written down; labels go from "
                f"{int(every.min())} to {int(every.max())}, and there are {classes} classes",
                where=place_of(op.module, op.line),
                confidence="proven",  # counted
            )


def labels_and_frames(flow: Flow, op: Operation) -> tuple[list[Tensor], Tensor]:
    """Of a CTC loss: the labels of every sample, without what pads them, and the frames that it is told of."""
    slots = [arg.slot for arg in op.args[1:4] if isinstance(arg, Ref)]
    found = flow.values(slots) if slots else {}
    targets, given, wanted = (
        found[arg.slot].cpu().long() if isinstance(arg, Ref) else torch.tensor(arg) for arg in op.args[1:4]
    )
    rows = targets if targets.dim() == 2 else targets.split(wanted.tolist())
    return [row[:length] for row, length in zip(rows, wanted.tolist(), strict=True)], given


# gaps -------------------------------------------------------------------------------------------------------

SMALLEST = 8  # entries of a mask: fewer zeros and ones may be anything
NEARLY = 0.9  # of the entries: but for a few at the edges
HALF = 0.5  # of the entries that a mask lets count: below, the loss is less than half of what it says
MEASURED = 64  # entries that are not filled
FILLED = (0.1, 0.98)  # of the entries that hold the one value
DIFFERENT = 0.3  # of the others are different numbers: measured, not counted or classified
SCATTERED = 0.3  # correlation of neighbours: in the background of a picture it is nearly 1
BLACK = 0.1  # of the range of the others: nearer than what was not measured is to what was
APART = 20  # typical distances between neighbours among the others
FEWEST_GRADES = 4  # different numbers, where there are few: two or three are classes
OUTSIDE = 10  # ranges of the others away: nobody measures that
MASKS = {"ge", "gt", "le", "lt", "ne", "eq", "isnan", "isfinite"}  # made of a target and at most a number
PARTS = VIEWS | {"index", "index_select", "masked_select"}
IDLE = 3  # examinations at which a mask has let everything pass


def mean_over_all(evidence: Evidence) -> Verdict | None:
    """Errors multiplied by a mask, then averaged over all positions, masked ones included."""
    flow = evidence.flow
    for term in (term for root in evidence.tape.loss_slots for term in take_apart(flow, root) if term.mean):
        made = flow.follow(term.operation.reads[0], {"mul", "masked_fill"})
        mask = next((slot for slot in made.reads[::-1] if slot not in flow.tracked), None) if made else None
        value = flow.value(mask) if mask is not None else None
        if value is None or value.numel() < SMALLEST or not bool(((value == 0) | (value == 1)).all()):
            continue
        share = float(value.double().mean())
        share = 1 - share if made is not None and made.name == "masked_fill" else share
        if 0 < share < NEARLY:
            return confirmed(
                f"{FAMILY}/mean-over-all",
                f"the mask lets {100 * share:.0f} % of the positions count, but the mean divides by all of them: "
                f"the loss is {1 / share:.2g} times too small, and differs with the padding",
                where=place_of("", term.operation.line),
                level="problem" if share < HALF else "warning",
                confidence="likely",
                lasting=False,
            )
    return None


def filling_counts(evidence: Evidence) -> Verdict | None:
    """Ratings of 1 to 5 with 0 for none, measurements with -999 for none; one-hot rows and sparse signals are not."""
    flow = evidence.flow
    for comparison in flow.comparisons:
        # what a network has a part in was not measured: a return of 1 at a goal
        if comparison.kind != "value" or flow.is_learned(comparison.target):
            continue
        mask, times = find_idle_mask(evidence, comparison)
        target = flow.value(comparison.target)
        found = None if target is None else find_filling(target.detach())
        if target is None or found is None:
            continue
        value, share, gap, outside = found
        gradient = pull(evidence, comparison.prediction)
        if gradient is None or gradient.numel() != target.numel():
            return None
        counting = float((gradient.reshape(target.shape) != 0)[target == value].double().mean())
        if counting < NEARLY:
            return None
        said, line = [], comparison.operation.line
        if mask is not None:
            place = place_of("", mask.line)
            said = [f"the mask made of the targets at {place} leaves none out, {times:g} times of {times:g}"]
        idle = mask is not None and times >= IDLE
        return confirmed(
            f"{FAMILY}/missing-entries-count",
            f"{100 * share:.0f} % of the {target.numel()} target entries are exactly {value:g}; the others are "
            f"{gap:.3g} or more away from it, and most of them farther: missing entries?",
            f"{100 * counting:.0f} % of those entries have a gradient: the loss learns {value:g} there",
            *said,
            *say_where_made(evidence, comparison.target, line, target=True),
            where=place_of("", mask.line if idle and mask is not None else line),
            fix=f"let them not count: mask = target != {value:g}; (loss * mask).sum() / mask.sum()",
            level="problem" if outside or idle else "warning",
            confidence="likely" if outside or are_scattered(target == value) else "possible",
            lasting=False,
        )
    return None


def find_filling(target: Tensor) -> tuple[float, float, float, bool] | None:
    """(the one value, its share, how far the next one is, whether that is outside of anything measured)."""
    flat = target.flatten().double()
    if not target.is_floating_point() or flat.numel() < 2 * MEASURED or not bool(flat.isfinite().all()):
        return None
    value = torch.mode(flat).values
    rest = flat[flat != value]
    share = 1 - len(rest) / len(flat)
    if len(rest) < MEASURED or not FILLED[0] < share < FILLED[1]:
        return None
    different, times = torch.unique(rest, return_counts=True)
    gap, usual = float((different - value).abs().min()), float(different.diff().median())
    span = float(different[-1] - different[0])
    # amid the others is the most common measurement; the dark pixels of a picture come near its black
    if bool(different[0] < value < different[-1]) or gap < BLACK * span:
        return None
    few = len(different) < DIFFERENT * len(rest)
    graded = few and are_grades(value, different, times) and are_scattered(target == value)
    if not (graded if few else gap >= APART * usual):  # a signal that is cut off at 0 comes near it
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


def are_scattered(filled: Tensor) -> bool:
    """Whether an entry tells nothing of its neighbour: the background of a picture hangs together."""
    rows = filled.reshape(-1, filled.shape[-1]).double()
    if rows.shape[1] < 2:
        return False
    a, b = rows[:, :-1] - rows[:, :-1].mean(), rows[:, 1:] - rows[:, 1:].mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return scale > 0 and abs(float((a * b).sum())) < SCATTERED * scale


def find_idle_mask(evidence: Evidence, comparison: Comparison) -> tuple[Operation | None, float]:
    """What the loss computes of its targets to leave some out, if it has never left out any; and how often it has not.

    One that has ever left something out, at any examination, is no idle mask.
    """
    flow, idle = evidence.flow, evidence.memory.setdefault("idle masks", {})  # times, by line
    data = flow.behind(comparison.target, PARTS)
    made = {op.makes[0]: op for op in flow.operations if op.name in MASKS and flow.body.isdisjoint(op.makes)}
    masks = {s: op for s, op in made.items() if {flow.behind(read, PARTS) for read in op.reads} == {data}}
    values = flow.values(masks) if masks else {}
    for slot, op in masks.items():
        mask = values.get(slot)
        nothing = mask is not None and mask.numel() > 1 and bool((mask == mask.flatten()[0]).all())
        idle[op.line] = idle.get(op.line, 0) + 1 if nothing else -math.inf
    first = next(iter(masks.values()), None)
    if first is None or any(idle[op.line] < 0 for op in masks.values()):
        return None, 0
    return first, idle[first.line]
