"""Which rows of the batch make an operation's result bad, where everything depends on everything: by replacing rows.

Rows are replaced by good ones, half of the suspects at a time, and the step is replayed up to the bad operation:
about 2·log₂(B) replays for one bad row among B. Shapes stay what they are, so any step can be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from gradproof.tape.operations import Operation, Slot, Tape
from gradproof.tape.player import Player

MOST_ROWS = 4  # more rows than this say nothing


def find_bad_rows(tape: Tape, operation: Operation, slot: int) -> tuple[list[int], list[Slot]]:
    """(rows, the leaves they are rows of): the result is bad with them, and not with good rows in their place."""
    leaves = batch_leaves(tape)
    if not leaves:
        return [], []
    batch = leaves[0].shape[0]
    rows = list(range(batch))

    def is_bad(source: list[int]) -> bool:
        return _result_is_bad(tape, operation, slot, leaves, source)

    good = next((block for block in _blocks(batch) if not is_bad(_cycled(block, batch))), None)
    if good is None:
        return [], []
    filler, known = _cycled(good, batch), set(good)

    def culprits(suspects: list[int]) -> list[int]:
        """Of rows that are bad when only they are kept, the ones that are bad alone."""
        if len(suspects) == 1:
            return suspects
        found: list[int] = []
        for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
            stay = known.union(half)
            if len(found) <= MOST_ROWS and is_bad([row if row in stay else filler[row] for row in rows]):
                found += culprits(half)
        return found or suspects  # it takes several of them together

    found = culprits([row for row in rows if row not in known])
    return (found, leaves) if len(found) <= MOST_ROWS else ([], [])


def batch_leaves(tape: Tape) -> list[Slot]:
    """Inputs that share the most common leading size."""
    sized = [s for s in tape.inputs if s.shape and s.shape[0] > 1 and s.index in tape.memory_of]
    common = Counter(slot.shape[0] for slot in sized).most_common(1)
    return [slot for slot in sized if slot.shape[0] == common[0][0]] if common else []


def _blocks(batch: int) -> Iterator[list[int]]:
    """Halves, then quarters, then eighths: the first without a bad row serves as what is known to be good."""
    for parts in (2, 4, 8):
        size = batch // parts
        yield from ([*range(start, start + size)] for start in range(0, size * parts, size or 1) if size)


def _cycled(block: list[int], batch: int) -> list[int]:
    """A source for each row of the batch: a row of the block itself, others cyclic."""
    own = set(block)
    return [row if row in own else block[row % len(block)] for row in range(batch)]


def _result_is_bad(
    tape: Tape, operation: Operation, slot: int, leaves: list[Slot], source: list[int]
) -> bool:
    """The step again with row i of the batch replaced by row source[i], up to the operation."""
    player = Player(tape, None, None)
    player.opaque = [call for call in tape.functions if call.opaque]  # other inputs: they have to be called
    for leaf in leaves:
        memory = tape.memory_of[leaf.index]
        flat = player.flats.setdefault(id(memory), memory.flat.clone())
        view = memory.views[leaf.index]
        flat.as_strided(*view).copy_(memory.flat.as_strided(*view)[source])
    player.play(tape.operations[: operation.index], keep_for=operation)
    player.step(operation)
    result = player.env.get(slot)
    return result is not None and not bool(torch.isfinite(result).all())
