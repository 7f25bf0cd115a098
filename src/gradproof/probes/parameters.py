"""What is known about the parameters of a training: who trains each, whether a gradient came, whether it moved.

Models and optimizers may be gone before the run ends: what is to be said of them is found out while they live.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.names import Names, find_variable, user_frames
from gradproof.record.writer import RunWriter
from gradproof.tape.living import Living
from gradproof.tape.shards import parts_of

MOST, MOST_OPTIMIZERS = 50_000, 1000  # parameters, and optimizers, that are described in run.json
LOOKS = 1.125  # times the steps so far: a hundred looks in 100,000 steps
MOST_GONE = 2000  # parameters that live no more, and are still described


class Parameters:
    """Every parameter and optimizer that was seen, described in run.json."""

    def __init__(self, writer: RunWriter, names: Names) -> None:
        self._writer = writer
        self._names = names
        self._optimizers: Living[dict[str, Any]] = Living()
        self._optimizers_described: list[dict[str, Any]] = []  # by number
        self._described: dict[str, dict[str, Any]] = {}  # by name
        self._tensors: Living[str] = Living()  # of those that are described
        self._with_gradient: set[str] = set()
        self._without_gradient: set[str] = set()  # when it was looked at what an optimizer would use
        self._steps = 0
        self._looked = 0  # at which of them
        self._start_values: dict[str, np.ndarray] = {}
        self._start_steps: dict[str, int] = {}
        self._moved: dict[str, bool] = {}  # as of the last look at each
        self._moved_at: dict[str, int] = {}  # the steps after which a look found it changed

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer that has stepped and lives."""
        return list(self._optimizers)

    def knows(self, optimizer: object) -> bool:
        return optimizer in self._optimizers

    def forget(self, optimizer: object) -> None:
        """It turned out to be none."""
        facts = self._optimizers.pop(optimizer)
        if facts is not None:
            del self._optimizers_described[facts["number"] :]

    def got_gradients(self, names: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Those of an optimizer that have one, which is about to be used."""
        held = optim.parameters_of(optimizer)
        if len(names) < len(held):
            self._without_gradient.update(name for name in map(self.name, held) if name not in names)
        if not self._with_gradient.issuperset(names):
            fresh = names.keys() - self._with_gradient
            self._start_steps.update(dict.fromkeys(fresh, self._steps))  # from here on they are meant to move
            self._moved = {name: moved for name, moved in self._moved.items() if moved or name not in fresh}
            self._with_gradient.update(names)
            self.describe()

    def describe_end(self) -> None:
        """Once more at the end, with whether each parameter has changed since it was first seen."""
        if self._optimizers_described:
            self.describe()  # other tensors may have taken the place of those that were known
            self.look()
            for name, changed in self._moved.items():
                if name in self._described:
                    self._described[name]["changed"] = changed
                    if changed:
                        self._described[name]["moved_at"] = self._moved_at[name]
            self._tell()

    def name(self, parameter: Tensor) -> str:
        name = self._names.of_parameter(parameter)
        if name is None:
            self._names.learn([parameter])
            name = self._names.of_parameter(parameter)
        return name or "?"

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        facts = self._optimizers.get(optimizer)
        if facts is None:
            held = optim.parameters_of(optimizer)
            if held and not any(map(has_numbers, held)):
                raise UserError("every parameter is on the meta device, which holds no numbers to look at")
            self._names.learn(held)
            label = find_variable(optimizer, user_frames()) or type(optimizer).__name__
            facts = {"number": len(self._optimizers_described), "name": label, "steps": 0}
            self._optimizers_described.append({"name": label, **optim.describe(optimizer)})
            self._optimizers[optimizer] = facts
            for each, known in self._optimizers.items():
                self._optimizers_described[known["number"]] = {"name": known["name"], **optim.describe(each)}
            more = len(self._optimizers_described) - MOST_OPTIMIZERS
            self._writer.set_info(
                optimizers=self._optimizers_described[:MOST_OPTIMIZERS],
                **({"optimizers_left_out": more} if more > 0 else {}),
            )
            self.describe()
        return facts

    def describe(self) -> None:
        """Every trainable parameter: who trains it, whether a gradient ever came."""
        self._with_gradient.update(n for n, p in self._names.trainable() if p.grad is not None)
        known = {name: p for p, name in self._tensors.items()} | dict(self._names.trainable())
        owner: dict[str, int] = {}
        by_hand = set()
        for optimizer, facts in self._optimizers.items():
            held = {self.name(p): p for p in optim.parameters_of(optimizer)}
            known |= held
            owner |= dict.fromkeys(held, facts["number"])
            if hasattr(optimizer, "given"):
                by_hand.add(facts["number"])
        fresh = {n: measuring.local(p) for n, p in known.items() if n not in self._start_values}
        self._start_values.update(zip(fresh, _fingerprints(list(fresh.values())), strict=True))
        self._start_steps.update(dict.fromkeys(fresh, self._steps))
        self._tensors = Living((p, name) for name, p in known.items())
        for name, p in known.items():
            before = self._described.get(name, {})
            number = owner.get(name, before.get("optimizer"))  # its optimizer may be gone
            self._described[name] = {
                "name": name,
                "shape": list(p.shape),
                "dtype": str(p.dtype)[6:],
                "trainable": p.requires_grad or number in by_hand,
                "optimizer": number,
                "gradient": name in self._with_gradient,
            }
            if parts := parts_of(p):
                self._described[name]["part"] = [measuring.local(p).numel(), parts]
        self._forget_the_oldest(known)
        self._tell()

    def _tell(self) -> None:
        more = len(self._described) - MOST
        self._writer.set_info(
            parameters=list(islice(self._described.values(), MOST)),
            **({"parameters_left_out": more} if more > 0 else {}),
        )

    def _forget_the_oldest(self, known: dict[str, Tensor]) -> None:
        """Of what lives no more, and of that nothing where nobody has looked at its gradient in its time."""
        gone = [name for name in self._described if name not in known]
        seen = self._with_gradient | self._without_gradient if gone else ()
        unseen = [name for name in gone if name not in seen]
        for name in {*gone[:-MOST_GONE], *unseen}:
            known_of = (self._described, self._start_values, self._start_steps, self._moved, self._moved_at)
            for facts in known_of:
                facts.pop(name, None)

    def stepped(self, steps: int) -> None:
        """So many steps of an optimizer have been made: after 1, 2, 4, 8 it is looked at what has changed, then each
        eighth further on. Who is gone at the end is known as it was then."""
        self._steps += 1
        if steps & (steps - 1) == 0 or self._steps >= LOOKS * self._looked:
            self._looked = self._steps
            self.look()

    def look(self) -> None:
        """Which of those that live, and have not moved so far, have other values than when they were first seen.

        Of one that no step was made with since, nothing is said.
        """
        parts = {
            n: measuring.local(p)
            for p, n in self._tensors.items()
            if not self._moved.get(n) and has_numbers(p)
        }
        still = {
            name: part for name, part in parts.items() if part.numel()
        }  # of a sharded one, a rank may hold nothing
        values = _fingerprints(list(still.values()))
        for name, now in zip(still, values, strict=True):
            changed = not np.array_equal(self._start_values[name], now, equal_nan=True)
            if changed or self._steps > self._start_steps[name]:
                self._moved[name] = changed
                if changed:
                    self._moved_at[name] = self._steps


def has_numbers(tensor: Tensor) -> bool:
    return tensor.device.type != "meta"


def _fingerprints(tensors: list[Tensor]) -> list[np.ndarray]:
    """Statistics that change when a tensor changes (this waits for the device: a few times in a run)."""
    out: list[np.ndarray] = [np.empty(0)] * len(tensors)
    keyed = {str(index): tensor for index, tensor in enumerate(tensors) if has_numbers(tensor)}
    for group in measuring.group_by_device(keyed).values():
        for key, row in zip(group, measuring.measure(list(group.values())).cpu().numpy(), strict=True):
            out[int(key)] = row
    return out
