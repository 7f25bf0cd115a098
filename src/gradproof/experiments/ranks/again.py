"""A rank's step, done again from what it recorded: did its own operations give it the weights that no other rank has?

A memory that flips a bit writes no operation. Where a step's replay gives what the other ranks have, and the rank had
something else when its next step began, nothing that its script has called made the difference. Where the replay gives
the same odd value, or an operation of the next step writes it, code did.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.instruments.update import line_of, read_update, storage_of
from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import Operation, Tape
from gradproof.tape.player import Player
from gradproof.tape.replay import replay_exactly
from gradproof.tape.specimen import Specimen
from gradproof.tape.tensors import load

MEMORY, CODE, UNDECIDED = "memory", "code", "undecided"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: the same bits


@dataclass(frozen=True)
class Two:
    """Two steps of one rank, one after the other, as far as they were taped."""

    rank: int
    first: Specimen | None
    then: Specimen

    def had(self, name: str) -> Tensor | None:
        """What the rank had when its second step first changed it: at that step's update, if nothing else did."""
        return leaf(self.then.tape, name)


def leaf(tape: Tape, name: str) -> Tensor | None:
    slot = tape.leaf_named.get(name)
    return None if slot is None else tape.leaf_value(slot)


def left_by(tape: Tape, name: str) -> Tensor | None:
    """What a step makes of a parameter, every recorded operation done again."""
    slot, found = tape.leaf_named.get(name, -1), list[Tensor]()

    def look(player: Player) -> None:
        with suppress(CannotReplay):
            found.append(player.value(slot).detach().clone())

    if slot >= 0:
        replay_exactly(tape, at={len(tape.operations): [look]}, compare=False)
    return found[0] if found else None


def who_wrote(one: Two, other: Two, name: str) -> dict[str, Any]:
    """Memory or code: of two ranks that part in a parameter, what each has recorded is done again."""
    sides, had = (one, other), [one.had(name), other.had(name)]
    if had[0] is None or had[1] is None:
        return undecided("the parameter is not on the tapes")
    if not same_bits(had[0], had[1]):
        return between_two_steps(one, other, name)
    wrote = [writer_of(side.then.tape, name) for side in sides]
    if wrote == [None, None]:
        return undecided("both ranks have the same until this step's update")
    return written_by(sides, wrote)


def between_two_steps(one: Two, other: Two, name: str) -> dict[str, Any]:
    """They part when the second step begins: what the first leaves, done again, is what each had, or it is not."""
    if one.first is None or other.first is None:
        return undecided("the step before it was not taped")
    sides, tapes = (one, other), (one.first.tape, other.first.tape)
    began, made = [leaf(tape, name) for tape in tapes], [left_by(tape, name) for tape in tapes]
    had = [side.had(name) for side in sides]
    if any(value is None for value in (*began, *made)):
        return undecided("its steps cannot be done again from what was recorded")
    if not same_bits(*began):
        return undecided("they part before the first step that can be done again")
    kept = [same_bits(mine, then) for mine, then in zip(made, had, strict=True)]
    wrote = [writer_of(tape, name) for tape in tapes]
    if all(kept):
        return written_by(sides, wrote) if wrote != [None, None] else computed_apart(*tapes, name)
    if not any(kept):
        return undecided("on neither rank does the step, done again, give what the rank had")
    odd = kept.index(False)
    outside = writer_of(sides[odd].then.tape, name)
    if outside is not None:  # code that PyTorch does not run, and that has asked where the parameter lies
        return {"outcome": CODE, "rank": sides[odd].rank, **described(outside)}
    if not same_bits(made[odd], had[1 - odd]):
        return undecided("the step, done again, gives neither what this rank had nor what the other one had")
    return {"outcome": MEMORY, "rank": sides[odd].rank, **changes(made[odd], had[odd])}


def written_by(sides: tuple[Two, Two], wrote: list[Operation | None]) -> dict[str, Any]:
    """An operation before the update: on one rank alone, or on both and not alike."""
    alone = [side.rank for side, op in zip(sides, wrote, strict=True) if op is not None]
    op = next(op for op in wrote if op is not None)
    return {"outcome": CODE, "rank": alone[0] if len(alone) == 1 else None, **described(op)}


def undecided(why: str) -> dict[str, Any]:
    return {"outcome": UNDECIDED, "rank": None, "why": why}


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal to the last bit: a NaN is equal to itself, and zero is not minus zero."""
    if one is None or other is None:
        return False
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().contiguous().view(INTEGERS[real.element_size()])


def changes(was: Tensor | None, now: Tensor | None) -> dict[str, Any]:
    """How many entries are another, the first of them, and which of its bits."""
    assert was is not None and now is not None
    apart = (bits(was) ^ bits(now)).reshape(-1)
    at = int(apart.nonzero()[0])
    width = 8 * apart.element_size()
    flipped = [bit for bit in range(width) if int(apart[at]) >> bit & 1]
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), was.shape)] if not was.is_complex() else []
    return {
        "entries": int((apart != 0).sum()),
        "place": place,
        "bits": flipped,
        "was": float(was.reshape(-1)[at]) if place else 0.0,
        "now": float(now.reshape(-1)[at]) if place else 0.0,
    }


def writer_of(tape: Tape, name: str) -> Operation | None:
    """The operation of a step that writes a parameter before the step's own update; loads: code outside PyTorch."""
    slot = tape.leaf_named.get(name)
    if slot is None:
        return None
    storage = storage_of(tape, slot)
    updates = {op.index for op in read_update(tape).operations}
    writes = (op for op in tape.operations if any(storage_of(tape, s) == storage for s in op.writes))
    return next((op for op in writes if op.index not in updates), None)


def described(op: Operation) -> dict[str, Any]:
    what = "code outside PyTorch" if op.func is load else op.name
    return {"what": what, "where": line_of(op)}


def computed_apart(one: Tape, other: Tape, name: str) -> dict[str, Any]:
    """One value, two updates: by what they read, which may have parted earlier, or by what they do with it."""
    if not same_bits(final_gradient(one, name), final_gradient(other, name)):
        return undecided("the gradient that its update gets is not the same on both ranks")
    mine, theirs = (
        {slot.name: tape.leaf_value(slot.index) for slot in tape.leaves("state")} for tape in (one, other)
    )
    if mine.keys() != theirs.keys() or not all(same_bits(mine[key], theirs[key]) for key in mine):
        return undecided(
            "the optimizer's state is not the same on both ranks, and who has changed that is not known"
        )
    what = "the update, which does something else on each"
    return {"outcome": CODE, "rank": None, "what": what, "where": read_update(one).line}


def final_gradient(tape: Tape, name: str) -> Tensor | None:
    """As the optimizer saw it, replayed."""
    slot = tape.leaf_named.get(name)
    if slot is None or slot not in tape.final_gradients:
        return None
    at, gradient = tape.final_gradients[slot]
    found: list[Tensor] = []

    def look(player: Player) -> None:
        with suppress(CannotReplay):
            found.append(player.value(gradient).detach().clone())

    replay_exactly(tape, at={at: [look]}, until=at + 1, compare=False)
    return found[0] if found else None
