"""Where it comes from: each row of the data is given its number in place of its values, and the number is followed.

A batch is cut out of its data, shuffled, folded and repeated; what was done to the rows is done to their numbers. If
they arrive as they were sent, they say from which row each sample was taken.

    rows_behind(evidence, slot)     # {leaf: the row of it that each sample of a batch comes from}
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison, Flow
from gradproof.tape.operators import is_random

SHORT_NUMBERS = 251  # bfloat16 and uint8 hold them all; a prime, so that strides do not repeat them
FEWEST = 4  # samples: of fewer, numbers agree by chance
LONGEST = 16  # operations between a target and the data it was cut from
PICKS = ("index", "gather", "take")  # by their second operand, which is no data


def rows_behind(evidence: Evidence, slot: int) -> dict[int, Tensor]:
    """Of each table that a batch was cut from, the rows of its samples, where they can be followed."""
    flow, found = evidence.flow, {}
    for leaf in data_behind(flow, slot):
        rows = send_numbers(flow, (leaf,), (slot,), flow.tape.slots[leaf].shape[0])
        if rows is not None:
            found[leaf] = rows[0].long()
    return found


def send_numbers(
    flow: Flow, leaves: tuple[int, ...], ends: tuple[int, ...], modulus: int
) -> tuple[Tensor, ...] | None:
    """Each row's number modulo `modulus`, put in place of the data, as it arrives at all of some ends."""
    found = flow.values(list(ends), {leaf: row_numbers(flow, leaf, modulus) for leaf in leaves})
    rows = [as_rows(found[end], modulus) for end in ends if end in found]
    arrived = [numbers for numbers in rows if numbers is not None]
    if len(arrived) < len(ends) or len(arrived[0]) < FEWEST or len({len(row) for row in arrived}) > 1:
        return None
    return tuple(arrived)


def row_numbers(flow: Flow, leaf: int, modulus: int) -> Tensor:
    slot = flow.tape.slots[leaf]
    numbers = (torch.arange(slot.shape[0], device=slot.device) % modulus).to(slot.dtype)
    return numbers.reshape(-1, *[1] * (len(slot.shape) - 1)).expand(slot.shape).contiguous()


def as_rows(value: Tensor, rows: int) -> Tensor | None:
    """Row numbers that came through unchanged; None when something was done to them on the way."""
    flat = value.reshape(value.shape[0], -1).double()
    whole = bool((flat == flat[:, :1]).all()) and bool((flat == flat.round()).all())
    return flat[:, 0] if whole and bool(((flat >= 0) & (flat < rows)).all()) else None


def data_behind(flow: Flow, slot: int) -> list[int]:
    """The leaves that a batch was cut from, row by row; not those that said which rows."""
    waiting, seen = [slot], {slot}
    while waiting:
        maker = flow.maker(waiting.pop())
        if maker is None:
            continue
        reads = flow.reads(maker)
        reads = reads[:1] if maker.name.startswith(PICKS) else reads
        waiting += [read for read in reads if read not in seen]
        seen.update(reads)
    size = (*flow.tape.slots[slot].shape, 1)[0]
    leaves = [leaf for leaf in flow.tape.inputs if leaf.index in seen and leaf.index != slot]
    kept = flow.tape.memory_of  # of a large data set, only the batch is on the tape
    return [leaf.index for leaf in leaves if leaf.index in kept and leaf.shape and leaf.shape[0] > size]


def chain_behind(flow: Flow, slot: int) -> list[int]:
    """A target, and what it was made from, each from the first operand of the one before."""
    makers = (maker for maker in flow.chain(slot) if maker.reads)
    return [slot, *(maker.reads[0] for maker in islice(makers, LONGEST - 1))]


def inputs_of(flow: Flow, comparison: Comparison) -> list[int]:
    """What this prediction was made from: a step may have several batches, each with targets of its own.

    Batch norms hand statistics on from one pass to the next, so that a prediction depends on earlier batches, too: of
    the calls of modules it is what the last one was given, of one inside another the outer one.
    """
    behind = flow.ancestors(comparison.prediction)
    found = [slot for slot in flow.inputs if slot in behind]
    calls = [call for call in flow.tape.modules if call.first <= comparison.operation.index]
    calls = [call for call in calls if not behind.isdisjoint(call.outputs) and set(call.inputs) & set(found)]
    last = max(calls, key=lambda call: (call.last, -call.first), default=None)
    return found if last is None else [slot for slot in found if slot in last.inputs]


def is_diagonal(flow: Flow, comparison: Comparison) -> bool:
    """Whether each row of a square of scores is to be highest in its own column."""
    shape = flow.tape.slots[comparison.prediction].shape
    if comparison.kind != "class" or len(shape) != 2 or shape[0] != shape[1]:
        return False
    labels = flow.value(comparison.target)
    return labels is not None and torch.equal(labels.cpu().long(), torch.arange(shape[0]))


def sources(flow: Flow, slot: int) -> tuple[set[int], set[int]]:
    """What a slot was made from: input leaves, and operations that drew random numbers."""
    needed, drawn = {slot}, set()
    for op in reversed(flow.forward):
        touched = (*flow.makes(op), *op.writes)
        if needed.isdisjoint(touched):
            continue
        if is_random(op.func, op.args, op.kwargs):
            drawn.add(op.index)
            needed.difference_update(touched)
        else:
            needed.update(flow.reads(op))
    return {leaf.index for leaf in flow.tape.inputs if leaf.index in needed}, drawn
