"""What an experiment is given, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.experiments.flow import Flow
from gradproof.tape.operations import Operation, Slot, Tape
from gradproof.tape.replay import Replay, replay_exactly, replay_forward
from gradproof.tape.roles import Roles, find_roles
from gradproof.tape.shadow import Shadow, shadow

CONFIRMED, EXCLUDED, UNDECIDED = "confirmed", "excluded", "undecided"


@dataclass(frozen=True)
class Verdict:
    """The answer of an experiment about one cause.

    A later verdict of the same experiment on the same family replaces an earlier one, unless that was confirmed and
    `lasting`. `if_troubled` means: a problem only in a run that shows trouble (a loss that does not fall, NaN); a
    note in one that trains well.
    """

    verdict: str
    family: str
    id: str = ""
    evidence: tuple[str, ...] = ()
    reason: str = ""  # for an exclusion: the number that excludes
    about: str = ""  # for an exclusion: the id that it is about; empty if the whole family is
    where: str | None = None
    fix: str = ""
    level: str = "problem"
    confidence: str = "proven"
    if_troubled: bool = False
    lasting: bool = False
    numbers: dict[str, float] = field(
        default_factory=dict
    )  # what a fix from outside or the page needs to know


def confirmed(id: str, *evidence: str, **details: Any) -> Verdict:
    return Verdict(CONFIRMED, id.partition("/")[0], id, tuple(evidence), **details)


def excluded(id: str, reason: str, **details: Any) -> Verdict:
    """Not this: a whole family, or (family/what) the one thing that was measured."""
    family, _, what = id.partition("/")
    return Verdict(EXCLUDED, family, about=id if what else "", reason=reason, **details)


def undecided(family: str, reason: str) -> Verdict:
    return Verdict(UNDECIDED, family, reason=reason)


@dataclass
class Evidence:
    """One taped step, and what is known around it. Everything costly is computed once, when it is first asked for."""

    tape: Tape
    step: int
    models: dict[str, nn.Module]  # by variable name; "" for the only one
    optimizers: list[torch.optim.Optimizer]
    losses: Sequence[float]  # of all steps so far
    directory: Path | None = None  # of the run, for what is worth keeping
    memory: dict[str, Any] = field(
        default_factory=dict
    )  # kept between examinations, for each experiment its own key
    before_update: bool = False  # the tape ends where the optimizer begins, and the weights are as they were
    again: Any = None  # of a model's call that was made again: what was not finite, eager and compiled

    @cached_property
    def roles(self) -> Roles:
        return find_roles(self.tape)

    @cached_property
    def flow(self) -> Flow:
        """Where the network ends and the loss begins."""
        return Flow(self.tape, self.forward)

    @cached_property
    def shadow(self) -> Shadow:
        """The step's gradients against float64."""
        return shadow(self.tape)

    @cached_property
    def loss(self) -> float:
        """The loss of the step, replayed in its own precision."""
        return self.loss_at({})

    @cached_property
    def updates(self) -> dict[int, Tensor]:
        """Δθ of each parameter that the optimizer changed, by slot."""
        stepped = list(dict.fromkeys(self.tape.stepped))
        after: dict[int, Tensor] = {}

        def look(player: Any) -> None:
            for slot in stepped:
                after[slot] = player.value(slot).detach().clone()

        replay_exactly(self.tape, at={len(self.tape.operations): [look]})
        return {slot: after[slot] - self.tape.leaf_value(slot) for slot in stepped if slot in after}

    def moved(self, alpha: float) -> dict[int, Tensor]:
        """The parameters a fraction of the way along the step that was taken."""
        return {slot: self.tape.leaf_value(slot) + alpha * delta for slot, delta in self.updates.items()}

    def loss_at(self, leaves: dict[int, Tensor], dtype: torch.dtype | None = None) -> float:
        """The loss with other parameters or inputs; the same batch, the same random numbers."""
        losses = replay_forward(self.tape, dtype=dtype, leaves=leaves).losses
        return float(sum(loss.double().sum() for loss in losses)) if losses else math.nan

    def values(self, slots: Sequence[int], leaves: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """What the forward pass computed at some slots, with the recorded or other leaves."""
        found: Replay = replay_forward(self.tape, leaves=leaves, keep=slots)
        return found.values

    @property
    def forward(self) -> list[Operation]:
        """The operations of the forward passes, in order."""
        return [op for op in self.tape.operations if op.phase == "forward" and op.in_backward is None]

    def maker(self, slot: int) -> Operation | None:
        """The operation that made a slot; None for a leaf."""
        made_by = self.tape.slots[slot].made_by
        return None if made_by is None else self.tape.operations[made_by]

    def slot(self, index: int) -> Slot:
        return self.tape.slots[index]
