"""Where a change of the input spreads to what it must not reach: two replays, compared operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence
from gradproof.tape.operations import Operation
from gradproof.tape.replay import Player

MOST_BYTES = 400_000_000

# (changed elements of a result) -> kept to its place? None when the shape does not tell
Confined = Callable[[Tensor], bool | None]


def find_first_spread(evidence: Evidence, leaves: dict[int, Tensor], confined: Confined) -> Operation | None:
    """The first operation whose operands keep a change to its place, and whose result does not."""
    flow = evidence.flow
    watched = {op.index for op in flow.operations if op.makes}
    before: dict[int, list[Tensor]] = {}
    size = 0

    def keep(player: Player, op: Operation) -> None:
        nonlocal size
        if op.index in watched and size < MOST_BYTES:
            before[op.index] = [player.env[s].detach().clone() for s in op.makes if s in player.env]
            size += sum(value.numel() * value.element_size() for value in before[op.index])

    first: list[Operation] = []

    def compare(player: Player, op: Operation) -> None:
        if first or op.index not in before:
            return
        for slot, old in zip([s for s in op.makes if s in player.env], before[op.index], strict=False):
            if not old.is_floating_point() or slot not in flow.tracked:
                continue
            changed = has_changed(old, player.env[slot])
            if bool(changed.any()) and confined(changed) is False:
                first.append(op)

    operations = flow.operations
    flow.play(operations, flow.values(leaves), after=keep)  # as they were: what filled them may not be played
    flow.play(operations, leaves, after=compare)
    return first[0] if first else None


def has_changed(old: Tensor, new: Tensor) -> Tensor:
    """By more than rounding; infinities (masks) that stay are no change."""
    if old.shape != new.shape:
        return torch.ones_like(old, dtype=torch.bool)
    finite = old[torch.isfinite(old)]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return ((new - old).abs() > 1e-5 * scale) & (new != old)
