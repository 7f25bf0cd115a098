"""Is .grad, as the optimizer sees it, the sum of what this step's backwards brought?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradproof.tape.operations import Tape
from gradproof.tape.operators import is_collective
from gradproof.tape.pattern import relative_error, wide


@dataclass(frozen=True)
class Accumulation:
    """.grad as the optimizer sees it is not the sum of what this step's backwards brought."""

    parameter: str
    how: str

    def __str__(self) -> str:
        return f".grad of {self.parameter}: {self.how}"


def judge_accumulation(tape: Tape, real: dict, final: dict[int, torch.Tensor]) -> list[Accumulation]:
    if any(is_collective(operation.func) for operation in tape.operations):
        return []  # .grad holds the average over all processes
    ends = {call.index: call.last for call in tape.top_backwards}
    last_end = max((ends[index] for index in real), default=0)
    for step in tape.stepped_at:
        if any(last_end <= clear <= step for clear in tape.cleared_at) and step >= last_end > 0:
            brought = sorted({slot for call in real.values() for slot in call})
            if any(is_left(tape, final, slot, step) for slot in brought):
                return []  # a part was cleared that is not to be stepped now: a player at the other's turn
            return [
                Accumulation(tape.slots[slot].name, "cleared between backward and step") for slot in brought
            ]
    found = []
    for slot, value in final.items():
        read_at = tape.final_gradients[slot][0]
        cleared = max((clear for clear in tape.cleared_at if clear <= read_at), default=0)
        parts = [
            call[slot] for index, call in real.items() if slot in call and cleared <= ends[index] <= read_at
        ]
        if not parts:
            continue
        total, old = sum(parts[1:], parts[0]), _stale_gradient(tape, slot)
        if old is None and value.dtype == total.dtype and torch.equal(value, total):
            continue  # the very sum, as it almost always is
        if not bool(torch.isfinite(value).all()):
            continue
        how = _accumulation_fault(value, parts, total, old)
        if how:
            found.append(Accumulation(tape.slots[slot].name, how))
    return found


def is_left(tape: Tape, final: dict[int, torch.Tensor], slot: int, step: int) -> bool:
    """Whether a parameter still has a gradient where an optimizer reads it."""
    return slot in final and tape.final_gradients[slot][0] <= step and bool(final[slot].any())


def _accumulation_fault(
    value: torch.Tensor, parts: list[torch.Tensor], total: torch.Tensor, old: torch.Tensor | None
) -> str:
    """Why .grad is not the sum of the backwards; empty when it is, also clipped or unscaled."""
    if not bool(value.any()) and bool(total.any()):
        return "zero when the optimizer reads it"
    if old is not None and bool(old.any()) and relative_error(value, total + old) <= 1e-3:
        share = float(wide(old).norm() / wide(value).norm())
        return f"holds {share:.0%} of an earlier step's gradient: not cleared before this step"
    scale = float((wide(value) * wide(total)).sum() / wide(total).square().sum().clamp_min(1e-300))
    if relative_error(value, scale * total) <= 1e-3:
        return ""
    if len(parts) > 1 and relative_error(value, parts[-1]) <= 1e-3:
        return f"only the last of {len(parts)} backwards is in it: overwritten, not added"
    return f"{relative_error(value, total):.2g} off the sum of {len(parts)} backwards"


def _stale_gradient(tape: Tape, slot: int) -> torch.Tensor | None:
    for call in tape.top_backwards:
        stored = call.stored.get(slot)
        if stored is not None and tape.slots[stored].made_by is None:
            return tape.leaf_value(stored)
    return None
