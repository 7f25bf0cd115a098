"""Plays a tape again: exactly as recorded, or in another precision, with other leaves, up to an operation.

replay_forward(tape).loss                                 # the recorded loss, bit for bit on CPU
replay_forward(tape, leaves={"head.weight": moved}).loss  # the loss somewhere else
replay_exactly(tape, keep=[slot]).values[slot]            # what any operation made, backward included
differentiate(tape, dtype=torch.float64).gradients        # PyTorch's derivative of the recorded forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import BackwardCall, Operation, Tape
from gradproof.tape.player import Leaves, Player, Replay


def replay_forward(
    tape: Tape,
    dtype: torch.dtype | None = None,
    leaves: Leaves | None = None,
    until: int | None = None,
    keep: Iterable[int] = (),
    replace: Mapping[int, Callable] | None = None,
) -> Replay:
    """The forward operations again, without gradients: losses and the slots asked for."""
    player = Player(tape, dtype, leaves, keep=keep, replace=replace)
    player.play(forward_operations(tape, until))
    return player.replay


def replay_exactly(
    tape: Tape,
    leaves: Leaves | None = None,
    until: int | None = None,
    keep: Iterable[int] = (),
    fresh: float = 0.0,
    at: Mapping[int, list[Callable[[Player], None]]] | None = None,
    before: Callable[[Player, Operation], None] | None = None,
    after: Callable[[Player, Operation], None] | None = None,
    replace: Mapping[int, Callable] | None = None,
    compare: bool = True,
) -> Replay:
    """Every recorded operation again, backward and optimizer included; `at`, `before` and `after` look on.

    `compare` holds each result against the recorded one: `departs_at` names the first that differs.
    """
    player = Player(tape, None, leaves, keep=keep, fresh=fresh, replace=replace, compare=compare)
    player.play(tape.operations[:until], at=at, before=before, after=after)
    return player.replay


def differentiate(
    tape: Tape,
    dtype: torch.dtype | None = None,
    leaves: Leaves | None = None,
    keep: Iterable[int] = (),
    gradients_at: Iterable[int] = (),
    only: Iterable[int] = (),
    follow_cuts: bool = False,
) -> Replay:
    """PyTorch's derivative of the recorded forward, whatever hand-written backwards say.

    With `gradients_at`, and one backward in the step: the gradients at those slots, and no others. With `only`, of
    all leaves those.
    """
    player = Player(
        tape,
        dtype,
        leaves,
        keep=keep,
        autograd=True,
        gradients_at=gradients_at,
        only=only,
        follow_cuts=follow_cuts,
    )
    with player.saving.hooks():
        player.play(forward_operations(tape, None))
    return player.replay


def forward_operations(tape: Tape, until: int | None) -> list[Operation]:
    """All operations but those of backward, up to the last backward call."""
    last = max((call.last for call in tape.backwards), default=len(tape.operations))
    chosen = [op for op in tape.operations[: until if until is not None else last] if op.in_backward is None]
    return [op for op in chosen if op.phase != "backward"]


def real_contributions(tape: Tape, call: BackwardCall) -> list[tuple[int, int, int]]:
    """(at operation, parameter, gradient) of a backward and of the checkpoint recomputations inside it."""
    inside = [c for c in tape.backwards if c.nested and call.first <= c.first and c.last <= call.last]
    return sorted(triple for c in (call, *inside) for triple in c.contributions)


def collect(into: dict[int, torch.Tensor], slot: int, gradient: int) -> Callable[[Player], None]:
    """A look that adds a gradient's current value to what a slot has received."""

    def look(player: Player) -> None:
        try:
            value = player.value(gradient).detach()
        except CannotReplay:
            return
        if value.layout != torch.strided:
            value = value.to_dense()
        elif player.tape.slots[gradient].storage in player.last_write:
            value = value.clone()
        into[slot] = into[slot] + value if slot in into else value

    return look
