"""Which digits are lost? Against float64 forward, backward and in the update; and in tables that were stored before.

What a tape computes has a truth: the same operations in float64. What was stored in few digits before has none, but
within its last digit any number may have been the true one: what is made of it may not depend on which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.numerics.stored import HALF, spacing
from gradproof.tape.operations import Operation, references
from gradproof.tape.replay import differentiate

EXACT_UP_TO = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}  # all whole numbers
TWINS = 50  # rows with the same number as another: below, that they agree may be chance
NEIGHBOURS = 50  # numbers followed by the very next one of their format: what a variance between them takes
NEXT = 1.01  # spacings: one, but for rounding, and far from the two of the number after the next
SAME = 1e-4  # standard deviations of a feature: a hundred roundings of float32, nothing that is learned
COPIES = ("copy_", "_foreach_copy_")
STRAYS = 0.01  # of the rows with a twin: as many may have been written later


def wrong_share(here: Tensor, true: Tensor, allowed: float) -> float:
    """Of the numbers in a tensor, how many are further than allowed from the true ones; NaN is."""
    apart = (here.to(torch.complex128) - true.to(torch.complex128)).abs()
    return 1 - float((apart <= allowed).double().mean()) if here.numel() else 0.0


def against_float64(
    evidence: Evidence, slots: Sequence[int], leaves: Mapping[int, Tensor] | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """Forward: what the step computed at some slots, and what it had been in float64, from these leaves."""
    here = evidence.flow.values(slots) if slots else {}
    true = evidence.flow.values(slots, leaves, torch.float64) if slots else {}
    return {slot: (here[slot], true[slot]) for slot in slots if slot in here and slot in true}


def within_the_last_digit(
    evidence: Evidence, slot: int, value: Tensor, format: torch.dtype, ends: Sequence[int]
) -> dict[int, tuple[Tensor, Tensor]]:
    """What some slots hold if each number stored in a format is taken as it is, and somewhere within its last digit."""
    generator = torch.Generator().manual_seed(0)
    jitter = (torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5).to(value.device)
    made = [
        evidence.flow.values(ends, {slot: values}, torch.float64)
        for values in (value.double(), value.double() + jitter * spacing(value, format))
    ]
    return {end: (made[0][end], made[1][end]) for end in ends if end in made[0] and end in made[1]}


@dataclass(frozen=True)
class Jumps:
    """Features of a stored number: the share of each one's variance between one number of the format and the next."""

    format: torch.dtype
    distinct: int
    largest: float
    spacing: float
    share: Tensor  # by feature; 1 and more: from one number to the next they have nothing in common
    twins: Tensor  # of each row, whether another has the same number


def jumps(stored: Tensor, features: Tensor, format: torch.dtype) -> Jumps | None:
    """None unless the features (rows, features) are functions of the stored number alone, with twins and neighbours."""
    numbers, group, size = torch.unique(stored.double(), return_inverse=True, return_counts=True)
    twins, step = size[group] > 1, spacing(numbers, format)
    shared = size > 1
    neighbours = (torch.diff(numbers) <= NEXT * torch.maximum(step[1:], step[:-1])) & (
        shared[1:] | shared[:-1]
    )
    columns = features.double().reshape(len(stored), -1)
    spread = columns.var(0)
    columns, spread = columns[:, spread > 0], spread[spread > 0]
    enough = int(twins.sum()) >= TWINS and int(neighbours.sum()) >= NEIGHBOURS
    if not enough or not len(spread) or not bool(torch.isfinite(columns).all()):
        return None
    mean = columns.new_zeros(len(numbers), columns.shape[1]).index_add_(0, group, columns) / size[:, None]
    # twins tell something where the next number has another row; the unfilled end of a table is one row, by nature
    changes = (torch.diff(mean, dim=0).abs() > SAME * spread.sqrt()).any(1)
    none = changes.new_zeros(1)
    telling = twins & (torch.cat([changes, none]) | torch.cat([none, changes]))[group]
    apart = ((columns - mean[group]).abs() > SAME * spread.sqrt())[telling].double().mean(0)
    if int(telling.sum()) < TWINS or not bool((apart <= STRAYS).all()):
        return None
    share = torch.diff(mean, dim=0).square()[neighbours].mean(0) / (2 * spread)
    return Jumps(format, len(numbers), float(numbers.abs().max()), float(step.max()), share, twins)


@dataclass(frozen=True)
class Swallowed:
    """Entries of a tensor that something was to change, and how many of them stay."""

    slot: int
    stay: int
    wanted: int


def swallowed_updates(evidence: Evidence) -> Iterator[Swallowed]:
    """Update: of tensors in half precision, entries with a gradient that stay as they are to the last bit."""
    written = {slot for op in evidence.tape.operations if op.name not in COPIES for slot in op.writes}
    for slot in evidence.tape.stepped:
        change, gradient = evidence.updates.get(slot), evidence.aftermath.gradients.get(slot)
        if change is None or evidence.slot(slot).dtype not in HALF or slot not in written:
            continue  # weights that are copied from masters keep as many digits as they have
        wanted = torch.ones_like(change, dtype=torch.bool) if gradient is None else gradient != 0
        if wanted.shape == change.shape:
            stays = wanted & (change == 0)
            yield Swallowed(slot, int(stays.sum()), int(wanted.sum()))


def overwritten_masters(evidence: Evidence) -> Iterator[tuple[Swallowed, Operation, torch.dtype]]:
    """Float32 copies that are made anew of the weights in half precision before each step, by an operation: what a step
    adds to them stays only where it reaches the last digit of that format."""
    tape, read = evidence.tape, set()
    for op in tape.operations[: min(tape.stepped_at, default=0)]:
        pairs = zip(references(op.args[0]), references(op.args[1]), strict=True) if op.name in COPIES else ()
        for slot, format in ((mine.slot, evidence.slot(theirs.slot).dtype) for mine, theirs in pairs):
            change, gradient = evidence.updates.get(slot), evidence.aftermath.gradients.get(slot)
            # what is overwritten before anybody reads it was not kept
            if slot not in read or change is None or gradient is None or format not in HALF:
                continue
            before, wanted = tape.leaf_value(slot), gradient != 0
            if before.dtype not in HALF:
                stays = wanted & ((before + change).to(format) == before.to(format))
                yield Swallowed(slot, int(stays.sum()), int(wanted.sum())), op, format
        read.update(op.reads)


def flushed_gradients(evidence: Evidence, dtype: torch.dtype) -> float:
    """Backward: of the entries that matter beside others of their tensor in a replay, the share that is zero."""
    flushed = total = 0
    truth = differentiate(evidence.tape, dtype).gradients
    for slot, gradient in evidence.aftermath.gradients.items():
        right = truth.get(slot)
        if right is None or right.shape != gradient.shape or not bool(torch.isfinite(right).all()):
            continue
        size = right.double().abs()
        matters = size > torch.finfo(torch.float16).eps * size.square().mean().sqrt()
        flushed += int((matters & (gradient == 0)).sum())
        total += int(matters.sum())
    return flushed / total if total else 0.0
