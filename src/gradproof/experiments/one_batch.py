"""Can it learn this batch at all? The first steps of training again, a few dozen times on the one taped batch and on
copies of the weights: at the run's own learning rate, and at a tenth of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.owners import at_work, line_of_optimizer, named_parameters
from gradproof.experiments.step_length import largest_lr
from gradproof.tape.replay import differentiate

STEPS, FEWEST = 24, 12
LONGEST = 2.0  # seconds for both trainings
# a tenth of the rate leaves at most this share of the loss, and so many times less than the run's own rate
BETTER = (0.7, 1.2)
MUCH_BETTER = (0.5, 2.0)
NEARBY = 1e-6  # of the weights' length
AS_TOLD = 0.2  # of the slope that the gradient tells


def can_it_learn_this_batch(evidence: Evidence) -> Iterator[Verdict]:
    """A rate ten times lower that learns the same batch better, from the start of training on: the rate is too high,
    even where the loss still falls. At a rate that suits, a tenth of it is far behind."""
    if evidence.memory.get("one batch") or not evidence.updates or not all(map(is_known, at_work(evidence))):
        return
    evidence.memory["one batch"] = True
    began = time.process_time()
    start, gradients = gradient_at(evidence, {})
    steps = min(STEPS, int(LONGEST / 2 / (time.process_time() - began)))
    if steps < FEWEST or not math.isfinite(start) or not falls_as_told(evidence, gradients):
        return
    own, tenth = (settled(train(evidence, share, steps)) for share in (1.0, 0.1))
    evidence.memory.setdefault("facts", {})["one_batch"] = {
        "steps": steps,
        "start": start,
        "end": min(own, tenth),
    }
    clear, clearer = (
        0 <= tenth < left * start and own > times * tenth for left, times in (BETTER, MUCH_BETTER)
    )
    if clear:
        rate = largest_lr(evidence)
        yield confirmed(
            "lr-too-high/tenth-learns-better",
            f"{steps} steps on the batch of step {evidence.step} alone take the loss from {start:.4g} to {own:.4g} at "
            f"the learning rate {rate:.1e}, and to {tenth:.4g} at a tenth of it",
            where=line_of_optimizer(evidence) or None,
            fix=f"lower the learning rate: {rate / 10:.1e} instead of {rate:.1e}, or less, and warm it up",
            level="problem" if clearer else "warning",
            numbers={"lr_factor": 0.1},
            lasting=True,
        )


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """One of PyTorch's own, which can be made again from its groups alone, and steps without a closure."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


def gradient_at(evidence: Evidence, weights: dict[int, Tensor]) -> tuple[float, dict[int, Tensor]]:
    found = differentiate(evidence.tape, leaves=weights)
    return float(sum(loss.detach().double().sum() for loss in found.losses)), found.gradients


def falls_as_told(evidence: Evidence, gradients: dict[int, Tensor]) -> bool:
    """Whether the loss changes along its gradient by what the gradient says.

    A part that the gradient was cut from (an advantage, a target from the same network) moves the loss unasked: which
    rate takes such a loss lower says nothing about the rate.
    """
    stepped = {slot: gradients[slot].double() for slot in evidence.tape.stepped if slot in gradients}
    weights = {slot: evidence.tape.leaf_value(slot).double() for slot in stepped}
    told = math.sqrt(sum(float(g.square().sum()) for g in stepped.values()))
    length = NEARBY * math.sqrt(sum(float(w.square().sum()) for w in weights.values()))
    if not told > 0 or not length > 0:
        return False
    up, down = (
        evidence.loss_at(
            {slot: weights[slot] + way * length / told * g for slot, g in stepped.items()},
            dtype=torch.float64,
        )
        for way in (1, -1)
    )
    return abs((up - down) / (2 * length) - told) < AS_TOLD * told


def train(evidence: Evidence, share: float, steps: int) -> list[float]:
    """The losses of some steps on this batch alone, at a share of the run's learning rates."""
    weights: dict[int, Tensor] = {}
    optimizers = [copied(optimizer, evidence, share, weights) for optimizer in at_work(evidence)]
    losses = []
    for _ in range(steps):
        loss, gradients = gradient_at(evidence, weights)
        losses.append(loss)
        for slot, weight in weights.items():
            weight.grad = gradients.get(slot)
        for optimizer in optimizers:
            optimizer.step()
    return losses


def copied(
    optimizer: torch.optim.Optimizer, evidence: Evidence, share: float, weights: dict[int, Tensor]
) -> torch.optim.Optimizer:
    """A fresh optimizer of the same kind and settings, for copies of the weights, which are added to `weights`."""
    slots = {evidence.slot(slot).name: slot for slot in evidence.tape.stepped}
    slot_of = {id(p): slots[name] for name, p in named_parameters(evidence).items() if name in slots}
    groups = []
    for group in optimizer.param_groups:
        mine = {
            slot_of[id(p)]: evidence.tape.leaf_value(slot_of[id(p)]).detach().clone().requires_grad_()
            for p in group["params"]
            if id(p) in slot_of
        }
        if mine:
            groups.append({**group, "params": list(mine.values()), "lr": share * float(group["lr"])})
            weights.update(mine)
    make: Any = type(optimizer)
    return make(groups)


def settled(losses: list[float]) -> float:
    """The middle of the last five; infinite where they ran away."""
    return sorted(losses[-5:])[2] if math.isfinite(losses[-1]) else math.inf
