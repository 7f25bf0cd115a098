"""What is known about the parameters of a training: who trains each, whether a gradient came, whether it moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.names import Names, find_variable, user_frames
from gradproof.record.writer import RunWriter


class Parameters:
    """Every parameter and optimizer that was seen, described in run.json."""

    def __init__(self, writer: RunWriter, names: Names) -> None:
        self._writer = writer
        self._names = names
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._with_gradient: set[str] = set()
        self._start_values: dict[str, np.ndarray] = {}
        self._known: dict[str, Tensor] = {}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer that has stepped."""
        return [facts["object"] for facts in self._optimizers.values()]

    def got_gradients(self, names: dict[str, Tensor]) -> None:
        if not self._with_gradient.issuperset(names):
            self._with_gradient.update(names)
            self.describe()

    def describe_end(self) -> None:
        """Once more at the end, with whether each parameter has changed since it was first seen."""
        if self._optimizers:
            self.describe(self.which_changed())

    def name(self, parameter: Tensor) -> str:
        name = self._names.of_parameter(parameter)
        if name is None:
            self._names.learn([parameter])
            name = self._names.of_parameter(parameter)
        return name or "?"

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        facts = self._optimizers.get(id(optimizer))
        if facts is None:
            self._names.learn(optim.parameters_of(optimizer))
            label = find_variable(optimizer, user_frames()) or type(optimizer).__name__
            number = len(self._optimizers)
            facts = {"number": number, "name": label, "steps": 0, "object": optimizer}
            self._optimizers[id(optimizer)] = facts  # "object" keeps the id taken
            described = [
                {"name": f["name"], **optim.describe(f["object"])} for f in self._optimizers.values()
            ]
            self._writer.set_info(optimizers=described)
            self.describe()
        return facts

    def describe(self, changed: dict[str, bool] | None = None) -> None:
        """Every trainable parameter: who trains it, whether a gradient ever came, whether it moved."""
        self._with_gradient.update(n for n, p in self._names.trainable() if p.grad is not None)
        owner = {
            self.name(p): facts["number"]
            for facts in self._optimizers.values()
            for p in optim.parameters_of(facts["object"])
        }
        known = dict(self._names.trainable())
        for facts in self._optimizers.values():
            known.update({self.name(p): p for p in optim.parameters_of(facts["object"])})
        fresh = {n: measuring.local(p) for n, p in known.items() if n not in self._start_values}
        for name, values in zip(fresh, _fingerprints(list(fresh.values())), strict=True):
            self._start_values[name] = values
        self._writer.set_info(
            parameters=[
                {
                    "name": name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype)[6:],
                    "trainable": p.requires_grad,
                    "optimizer": owner.get(name),
                    "gradient": name in self._with_gradient,
                    **({"changed": changed[name]} if changed else {}),
                }
                for name, p in known.items()
            ]
        )
        self._known = known

    def which_changed(self) -> dict[str, bool]:
        known = self._known
        now = _fingerprints([measuring.local(p) for p in known.values()])
        return {
            name: not np.array_equal(self._start_values[name], values, equal_nan=True)
            for name, values in zip(known, now, strict=True)
        }


def _fingerprints(tensors: list[Tensor]) -> list[np.ndarray]:
    """Statistics that change when a tensor changes (this waits for the device: twice in a run)."""
    out: list[np.ndarray] = [np.empty(0)] * len(tensors)
    keyed = {str(index): tensor for index, tensor in enumerate(tensors)}
    for group in measuring.group_by_device(keyed).values():
        for key, row in zip(group, measuring.measure(list(group.values())).cpu().numpy(), strict=True):
            out[int(key)] = row
    return out
