"""Which tensors follow a weight, and by which formula? Read from the operations between two optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradproof.instruments.evidence import Evidence
from gradproof.numerics.stored import HALF, spacing
from gradproof.tape.operations import Operation, Ref
from gradproof.tape.replay import Player, replay_exactly

SAME = ("detach", "alias")  # p.detach() and p.data are the weight itself
CAST = (*SAME, "_to_copy")
ROUNDED = 1e-6  # of a float32's digits: factors that add up to one


@dataclass(frozen=True)
class Follower:
    """One tensor that follows a weight: slow = keep * slow + take * weight."""

    slot: int
    weight: int
    keep: float
    take: float
    operation: Operation

    @property
    def averages(self) -> bool:
        return abs(self.keep + self.take - 1) < ROUNDED

    @property
    def is_the_weight(self) -> bool:
        """One memory: what should remember is overwritten with what it should remember."""
        return self.slot == self.weight

    @property
    def limit(self) -> float:
        """How many times the weight it comes to, while the weight stays."""
        return self.take / (1 - self.keep) if self.keep < 1 else math.inf


def find_followers(evidence: Evidence) -> Iterator[Follower]:
    """Sums of two tensors of one shape, the one a weight that the optimizer steps; and lerps."""
    trained = set(evidence.tape.final_gradients)
    scaled: dict[int, tuple[int, float]] = {}  # slot -> (what it is a multiple of, how many times)
    for op in evidence.tape.operations:
        if op.phase == "optimizer" or op.in_backward is not None or (op.grad_enabled and op.module):
            continue
        for name, first, second, number in single_operations(op):
            first = itself(evidence, first, trained)
            second = None if second is None else itself(evidence, second, trained)
            made = first if name.endswith("_") else next(iter(op.makes), first)
            if name in ("mul", "mul_") and second is None:
                scaled[made] = (first, number)
                continue
            if second is None:
                continue
            if name in ("lerp", "lerp_"):
                parts = [(first, 1 - number), (second, number)]
            else:
                one, two = scaled.get(first, (first, 1.0)), scaled.get(second, (second, 1.0))
                parts = [one, (two[0], two[1] * number)]
            (slow, keep), (weight, take) = parts if parts[1][0] in trained else parts[::-1]
            same = evidence.slot(slow).shape == evidence.slot(weight).shape
            other = slow not in trained or averages_itself(name, parts)
            if weight in trained and other and same and 0 < keep <= 1:
                yield Follower(slow, weight, keep, take, op)


def itself(evidence: Evidence, slot: int, trained: set[int]) -> int:
    """The weight that was cast, or the tensor that was aliased."""
    cast = evidence.flow.behind(slot, CAST)
    return cast if cast in trained else evidence.flow.behind(slot, SAME)


def entries_left_behind(evidence: Evidence, followers: Iterable[Follower]) -> dict[int, tuple[int, int]]:
    """By slot of an average in half precision: of the entries that are more than a last digit from their weight, how
    many an update leaves as they are, and how many there are."""
    tape, short = evidence.tape, {f.slot: f for f in followers if evidence.slot(f.slot).dtype in HALF}
    leaves = {slot.index for slot in tape.slots if slot.made_by is None}
    found: dict[int, tuple[int, int]] = {}

    def look(slot: int, weight: int, player: Player) -> None:
        before = tape.leaf_value(slot)
        way = (tape.leaf_value(weight).double() - before.double()).abs()
        wanted = way > spacing(before, before.dtype)
        found[slot] = int((wanted & (player.value(slot) == before)).sum()), int(wanted.sum())

    looks: dict[int, list[Any]] = {}
    for slot, f in short.items():
        if {slot, f.weight} <= leaves and slot in f.operation.writes:
            looks.setdefault(f.operation.index + 1, []).append(partial(look, slot, f.weight))
    if looks:
        replay_exactly(tape, at=looks, until=max(looks) + 1, compare=False)
    return found


def averages_itself(name: str, parts: list[tuple[int, float]]) -> bool:
    """In place, by factors that add up to one: w.mul_(0.9).add_(w, alpha=0.1). A decay is one factor alone."""
    (slow, keep), (weight, take) = parts
    # of what it has been multiplied with already
    alpha = take if name == "lerp_" else take / keep if keep else 0.0
    return slow == weight and name.endswith("_") and 0 < keep < 1 and abs(keep + alpha - 1) < ROUNDED


def single_operations(op: Operation) -> Iterator[tuple[str, int, int | None, float]]:
    """(name, first tensor, second tensor, number) of a mul, add or lerp, or of each pair of a _foreach_ operation."""
    name = op.name.removeprefix("_foreach_")
    if name.rstrip("_") not in ("mul", "add", "lerp") or not op.args:
        return
    others: Any = op.args[1] if len(op.args) > 1 else op.kwargs.get("other")
    number = op.args[2] if len(op.args) > 2 else op.kwargs.get("alpha", op.kwargs.get("weight", 1.0))
    for index, first in enumerate(op.args[0] if is_list(op.args[0]) else [op.args[0]]):
        other = others[index] if is_list(others) and index < len(others) else others
        if isinstance(other, (int, float)) and not isinstance(number, Ref):
            yield name, first.slot, None, float(other)
        elif isinstance(other, Ref) and isinstance(number, (int, float)):
            yield name, first.slot, other.slot, float(number)


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, Ref)
