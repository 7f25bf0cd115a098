"""What instruments and experiments are given: one specimen, and what can be worked out of it, each thing once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradproof.instruments.flow import Flow
from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import Operation, Slot, Tape
from gradproof.tape.replay import Replay, collect, replay_exactly, replay_forward
from gradproof.tape.roles import Roles, find_roles
from gradproof.tape.specimen import Facts, Specimen

if TYPE_CHECKING:
    from gradproof.tape.shadow import Shadow


@dataclass(frozen=True)
class Aftermath:
    """By slot: the gradient that the optimizer saw, and the change that it made."""

    gradients: dict[int, Tensor]
    updates: dict[int, Tensor]


@dataclass
class Evidence:
    """One specimen, and what can be worked out of it: everything costly once, when it is first asked for."""

    specimen: Specimen
    memory: dict[str, Any] = field(default_factory=dict)  # what the experiment kept of the specimens before
    directory: Path | None = None  # of the run, for what is worth keeping
    noted: dict[str, Any] = field(default_factory=dict)  # for the run's facts, by name

    @property
    def tape(self) -> Tape:
        return self.specimen.tape

    @property
    def step(self) -> int:
        return self.specimen.step

    @property
    def losses(self) -> list[float]:
        """Of all steps so far."""
        return self.specimen.losses

    @property
    def facts(self) -> Facts:
        return self.specimen.facts

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """Skeletons by variable name, "" for the only one: weights from before the step, the gradients of the step."""
        self._hand_out_gradients()
        return self.specimen.models

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The skeletons of all modules, by the paths that the tape has for them."""
        named = [
            (prefix, name, m) for prefix, root in self.models.items() for name, m in root.named_modules()
        ]
        return {".".join(filter(None, (prefix, name))): module for prefix, name, module in named}

    @cached_property
    def optimizers(self) -> list[Any]:
        """Skeletons, in the order in which they were made; `line` says where, `clears` whether zero_grad was called."""
        self._hand_out_gradients()
        return self.specimen.optimizers

    def _hand_out_gradients(self) -> None:
        models, optimizers = self.specimen.models, self.specimen.optimizers
        if models or optimizers:
            for slot, tensor in self.specimen.skeletons.by_slot().items():
                gradient = self.aftermath.gradients.get(slot)
                if gradient is not None and tensor.is_leaf and gradient.shape == tensor.shape:
                    tensor.grad = gradient.to(tensor.dtype)

    @cached_property
    def aftermath(self) -> Aftermath:
        """The step replayed as it was, to its end: the gradients that the optimizer saw, and what it did with them."""
        tape = self.tape
        found = Aftermath({}, {})
        looks = self._looks_at_gradients(found.gradients)
        stepped = list(dict.fromkeys(tape.stepped))

        def look(player: Any) -> None:
            for slot in stepped:
                with suppress(CannotReplay):
                    found.updates[slot] = player.value(slot).detach() - tape.leaf_value(slot)

        looks.setdefault(len(tape.operations), []).append(look)
        replay_exactly(tape, at=looks, compare=False)
        return found

    @cached_property
    def gradients(self) -> dict[int, Tensor]:
        """By slot, the gradient that the optimizer saw; what it did with it is not replayed."""
        if "aftermath" in vars(self):
            return self.aftermath.gradients
        found: dict[int, Tensor] = {}
        looks = self._looks_at_gradients(found)
        replay_exactly(self.tape, at=looks, until=max(looks, default=0) + 1, compare=False)
        return found

    def _looks_at_gradients(self, into: dict[int, Tensor]) -> dict[int, list[Any]]:
        looks: dict[int, list[Any]] = {}
        for parameter, (at, gradient) in self.tape.final_gradients.items():
            looks.setdefault(at, []).append(collect(into, parameter, gradient))
        return looks

    @property
    def updates(self) -> dict[int, Tensor]:
        """Δθ of each parameter that the optimizer changed, by slot."""
        return self.aftermath.updates

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
        from gradproof.tape.shadow import shadow  # a large room, which few questions enter

        return shadow(self.tape)

    @cached_property
    def loss(self) -> float:
        """The loss of the step, replayed, in float32 at least."""
        return self.loss_at({})

    def moved(self, alpha: float) -> dict[int, Tensor]:
        """The parameters a fraction of the way along the step that was taken."""
        return {slot: self.tape.leaf_value(slot) + alpha * delta for slot, delta in self.updates.items()}

    def loss_at(self, leaves: dict[int, Tensor], dtype: torch.dtype | None = None) -> float:
        """The loss with other parameters or inputs; the same batch, the same random numbers."""
        losses = replay_forward(self.tape, dtype=dtype or self.flow.fine, leaves=leaves).losses
        return float(sum(loss.double().sum() for loss in losses)) if losses else math.nan

    def values(self, slots: Sequence[int], leaves: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
        """What the forward pass computed at some slots, with the recorded or other leaves."""
        found: Replay = replay_forward(self.tape, leaves=leaves, keep=slots)
        return self.flow.as_numbers(found.values)

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
