"""Measures an optimizer's step: gradients before it; weights, their changes and Adam's moments after it."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.parameters import Parameters
from gradproof.probes.schedule import OPTIMIZER, PARAMETERS
from gradproof.probes.step import OpenStep
from gradproof.tape.living import Living


def has_part_here(tensor: Tensor) -> bool:
    """Of a sharded tensor, a rank may hold no part at all; that is no gradient of zero."""
    return not hasattr(tensor, "to_local") or measuring.local(tensor).numel() > 0


class UpdateProbe:
    """Writes into the step it is given; keeps what the next step is compared with."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._copies: Living[optim.WeightCopy] = Living()  # optimizer -> its weights before a step
        self._copied: Living[dict[str, Tensor]] = (
            Living()
        )  # optimizer -> what was copied in the step under way
        self._has_copied = False  # something that is still to be compared
        self._sampled_gradients: tuple[int, list[str], Tensor] | None = None

    def find_stale(self, step: OpenStep) -> None:
        """Gradients that an optimizer has used already, still there, and not zero: known when the step is written."""
        grads = [p.grad for optimizer in self._parameters.optimizers for p in optim.changed_by(optimizer)[:8]]
        used = [g for g in grads if g is not None and measuring.is_measurable(g)]
        step.used = [(weakref.ref(g), g._version) for g in used]
        held = [measuring.local(g) for g in used]
        for index, group in enumerate(measuring.group_by_device(dict(enumerate(held))).values()):
            step.reading.add(f"stale {index}", measuring.square_sums(list(group.values())).sum())

    def before(self, step: OpenStep, number: int, optimizer: torch.optim.Optimizer) -> bool:
        """The gradients are as the optimizer will use them, the weights still the old ones; False: not finite."""
        finite = self.measure_gradients(step, number, optimizer)
        if step.depth >= PARAMETERS:
            self.copy_weights(
                optimizer,
                [
                    p
                    for p, _ in optim.gradients_of(optimizer)
                    if measuring.is_measurable(p) and has_part_here(p)
                ],
            )
        return finite

    def measure_gradients(self, step: OpenStep, number: int, optimizer: torch.optim.Optimizer) -> bool:
        """As deep as the step is; False: a gradient, or the loss, is not finite."""
        step.measure_kept()  # outputs come before gradients
        held = {self._parameters.name(p): gradient for p, gradient in optim.gradients_of(optimizer)}
        gradients = {
            name: measuring.local(gradient.coalesce() if gradient.is_sparse else gradient)
            for name, gradient in held.items()
            if measuring.is_measurable(gradient) and has_part_here(gradient)
        }
        # a fused optimizer unscales, and skips, inside its own step
        for key in ("grad_scale", "found_inf"):
            if isinstance(value := getattr(optimizer, key, None), Tensor):
                step.reading.add(key, value.clone())
        finite = math.isfinite(step.row.get("loss", 0.0))
        if gradients and step.depth < PARAMETERS:
            finite &= step.measure_norms(gradients)
        elif gradients:
            finite &= step.measure("gradient", gradients)
            self._follow_direction(step, number, gradients)
        self._parameters.got_gradients(held, optimizer)
        return finite

    def copy_weights(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        """Keep these weights as they are before the step."""
        self._copies.setdefault(optimizer, optim.WeightCopy()).take(parameters)
        self._copied[optimizer] = {self._parameters.name(p): p for p in parameters}
        self._has_copied = True

    def after(self, step: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        """The weights are the new ones: what has become of them, and of Adam's m and v."""
        facts = self._parameters.of_optimizer(optimizer)
        self._parameters.stepped(facts["steps"])
        named = {}
        if self._has_copied:
            named = self._copied.pop(optimizer, {})
            self._has_copied = len(self._copied) > 0
        _note_rate(step, optimizer, facts)
        if not named:
            return
        weights = {name: measuring.local(p) for name, p in named.items()}
        if not self._copies[optimizer].fits(list(weights.values())):
            return
        step.measure_changes(weights, self._copies[optimizer].before)
        self._copies[optimizer].give_back()
        if step.depth >= OPTIMIZER:
            step.measure_rows(self._moments(step, optimizer, facts))

    def replaced(self, optimizer: Any, tensors: dict[str, Tensor]) -> None:
        """Parameters have other tensors now: what was copied is compared with those."""
        copied = self._copied.get(optimizer, {})
        self._copied[optimizer] = {name: tensors.get(name, old) for name, old in copied.items()}
        self._has_copied = True

    def forget(self) -> None:
        """The step under way will not be measured to its end."""
        self._copied.clear()

    def skipped(self, step: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        """A step that was not taken: the gradients that are to blame."""
        gradients = {
            self._parameters.name(p): measuring.local(gradient)
            for p, gradient in optim.gradients_of(optimizer)
            if measuring.is_measurable(gradient)
        }
        if gradients:
            step.measure_norms(gradients)
        _note_rate(step, optimizer, self._parameters.of_optimizer(optimizer))

    def _follow_direction(self, step: OpenStep, number: int, gradients: dict[str, Tensor]) -> None:
        if len({g.device for g in gradients.values()}) != 1:
            return
        now, names = measuring.sample(gradients.values()), list(gradients)
        if self._sampled_gradients is not None:
            when, before_names, before = self._sampled_gradients
            if when == number - 1 and before_names == names:
                rows, whole = measuring.cosines(before, now)
                step.reading.add("cosines", rows)
                step.reading.add("cosine", whole)
                step.row["cosine_names"] = names
        self._sampled_gradients = (number, names, now)

    def _moments(
        self, step: OpenStep, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
    ) -> list[tuple[str, str, Tensor]]:
        """Adam's m and v as rows to measure; the share of v that ε outweighs goes into the reading."""
        rows: list[tuple[str, str, Tensor]] = []
        squares: dict[str, Tensor] = {}
        limits: list[float] = []
        for kind, parameter, moment, limit in optim.moments(optimizer, facts["steps"]):
            if not measuring.is_measurable(moment):
                continue
            name, moment = self._parameters.name(parameter), measuring.local(moment)
            rows.append((kind, name, moment))
            if kind == "adam_v" and limit > 0:
                squares[name] = moment
                limits.append(limit)
        if len({v.device for v in squares.values()}) == 1:
            step.row["eps_names"] = list(squares)
            step.reading.add("eps_share", optim.share_below(list(squares.values()), limits))
        return rows


def _note_rate(step: OpenStep, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
    step.row["optimizer"] = facts["number"]
    groups = optimizer.param_groups
    rate = groups[0].get("lr") if len(groups) == 1 else None
    if type(rate) is not float:
        rate = optim.largest_lr(optimizer)
    if isinstance(rate, Tensor):  # on a GPU: it travels with the other numbers
        step.reading.add("lr", rate)
    elif rate is not None:
        step.row["lr"] = rate
