"""Measures an optimizer's step: gradients before it; weights, their changes and Adam's moments after it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.parameters import Parameters
from gradproof.probes.schedule import OPTIMIZER, PARAMETERS
from gradproof.probes.step import OpenStep


class UpdateProbe:
    """Writes into the step it is given; keeps what the next step is compared with."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._named: dict[
            int, dict[str, Tensor]
        ] = {}  # optimizer -> what has a gradient in the step under way
        self._copies: dict[int, optim.WeightCopy] = {}  # optimizer -> its weights before the step
        self._sampled_gradients: tuple[int, list[str], Tensor] | None = None

    @torch.no_grad()
    def find_stale(self, step: OpenStep) -> None:
        """Gradients that an optimizer has used already, still there, and not zero: known when the step is written."""
        used = [p for optimizer in self._parameters.optimizers for p in optim.parameters_of(optimizer)[:8]]
        held = [measuring.local(p.grad) for p in used if p.grad is not None]
        for index, group in enumerate(measuring.group_by_device(dict(enumerate(held))).values()):
            step.reading.add(f"stale {index}", measuring.square_sums(list(group.values())).sum())

    def before(self, step: OpenStep, number: int, optimizer: torch.optim.Optimizer) -> bool:
        """The gradients are as the optimizer will use them, the weights still the old ones; False: not finite."""
        step.measure_kept()  # outputs come before gradients
        named = {self._parameters.name(p): p for p in optim.parameters_of(optimizer) if p.grad is not None}
        gradients = {
            name: measuring.local(p.grad.coalesce() if p.grad.is_sparse else p.grad)
            for name, p in named.items()
            if p.grad is not None and measuring.is_measurable(p.grad)
        }
        # a fused optimizer unscales, and skips, inside its own step
        for key in ("grad_scale", "found_inf"):
            if isinstance(value := getattr(optimizer, key, None), Tensor):
                step.reading.add(key, value.clone())
        finite = math.isfinite(step.row.get("loss", 0.0))
        if gradients and step.depth < PARAMETERS:
            finite &= step.measure_norms(gradients)
        if gradients and step.depth >= PARAMETERS:
            finite &= step.measure("gradient", gradients)
            self._follow_direction(step, number, gradients)
            self._copies.setdefault(id(optimizer), optim.WeightCopy()).take(list(named.values()))
        self._named[id(optimizer)] = named
        self._parameters.got_gradients(named)
        return finite

    def after(self, step: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        """The weights are the new ones: what has become of them, and of Adam's m and v."""
        facts = self._parameters.of_optimizer(optimizer)
        named = self._named.pop(id(optimizer), {})
        _note_rate(step, optimizer, facts)
        if not named or step.depth < PARAMETERS or id(optimizer) not in self._copies:
            return
        weights = {name: measuring.local(p) for name, p in named.items()}
        step.measure_changes(weights, self._copies[id(optimizer)].before)
        if step.depth >= OPTIMIZER:
            step.measure_rows(self._moments(step, optimizer, facts))

    def skipped(self, step: OpenStep, optimizer: torch.optim.Optimizer) -> None:
        """A step that was not taken: the gradients that are to blame."""
        gradients = {
            self._parameters.name(p): measuring.local(p.grad)
            for p in optim.parameters_of(optimizer)
            if p.grad is not None and measuring.is_measurable(p.grad)
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
    rate = optim.largest_lr(optimizer)
    step.row["optimizer"] = facts["number"]
    if isinstance(rate, Tensor):  # on a GPU: it travels with the other numbers
        step.reading.add("lr", rate)
    else:
        step.row["lr"] = rate
