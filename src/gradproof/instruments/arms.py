"""Two trainings from one snapshot: the taped batch is learned by heart from the step's weights, with one thing changed.

The control arm changes nothing, and has to do what the run did: the gradient that the replay gives and the one that the
optimizer saw must be the same, or differ by the clip or the scale that the script put between them, which both arms
then do as well. Where they differ in any other way there is no control, and nothing can be said.

    handling = find_handling(evidence)
    control, changed = (train(evidence, handling, steps=24, rate=rate) for rate in (1.0, 0.1))
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import at_work, named_parameters
from gradproof.tape.player import Player
from gradproof.tape.replay import forward_operations

SAME = 1e-2  # of the gradient: what half precision, or the order of a sum, may leave
LAST = 5  # losses, of which the middle one is where an arm has come to


@dataclass(frozen=True)
class Handling:
    """What a run does with a gradient before its optimizer sees it."""

    scale: float = 1.0  # a power of two, as a loss scaler takes off
    longest: float = math.inf  # what its norm is clipped to

    def apply(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        size = self.scale * length(gradients.values())
        factor = self.scale * min(1.0, self.longest / size if size > 0 else 1.0)
        return {slot: gradient * factor for slot, gradient in gradients.items()} if factor != 1 else gradients


def find_handling(evidence: Evidence) -> Handling | None:
    """How the run's own gradients come out of those of a replay; None where nothing simple does it."""
    if not all(map(is_known, at_work(evidence))):
        return None
    seen = evidence.aftermath.gradients
    _, found = gradient_at(evidence, {})
    slots = [slot for slot in evidence.tape.stepped if slot in seen and slot in found]
    own, given = ([each[slot].double() for slot in slots] for each in (found, seen))
    if not slots or any(a.shape != b.shape for a, b in zip(own, given, strict=True)):
        return None
    size = length(own)
    factor = sum(float((a * b).sum()) for a, b in zip(own, given, strict=True)) / size**2 if size > 0 else 0.0
    apart = length([b - factor * a for a, b in zip(own, given, strict=True)])
    if not (factor > 0 and apart <= SAME * factor * size):
        return None
    if abs(factor - 1) <= SAME:
        return Handling()
    power = 2.0 ** round(math.log2(factor))
    return Handling(scale=power) if abs(factor / power - 1) < SAME else Handling(longest=factor * size)


def length(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """One of PyTorch's own, which can be made again from its groups alone, and steps without a closure."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


def steps_within(evidence: Evidence, seconds: float, most: int, thawed: Sequence[int] = ()) -> int:
    """How many steps an arm may take so that two of them end in time; nothing is said of a loss that is not finite."""
    began = time.process_time()
    start, _ = gradient_at(evidence, {}, thawed)
    spent = max(time.process_time() - began, 1e-6)
    return min(most, int(seconds / 2 / spent)) if math.isfinite(start) else 0


def train(
    evidence: Evidence, handling: Handling, steps: int, rate: float = 1.0, thawed: Sequence[int] = ()
) -> float:
    """Where the loss has come to after some steps on this batch alone, at a share of the run's rates, by a fresh
    optimizer of its kind and settings; `thawed` slots, which the run leaves alone, are trained in its first group."""
    weights: dict[int, Tensor] = {}
    optimizers = [copied(optimizer, evidence, rate, weights) for optimizer in at_work(evidence)]
    if thawed:
        values = {slot: own_copy(evidence, slot) for slot in thawed}
        group: dict[str, Any] = {k: v for k, v in optimizers[0].param_groups[0].items() if k != "params"}
        optimizers[0].add_param_group({**group, "params": list(values.values())})
        weights |= values
    losses = []
    for _ in range(steps):
        loss, gradients = gradient_at(evidence, weights, thawed)
        losses.append(loss)
        handled = handling.apply({slot: g for slot, g in gradients.items() if slot in weights})
        for slot, weight in weights.items():
            weight.grad = handled.get(slot)
        for optimizer in optimizers:
            optimizer.step()
    last = sorted(losses[-LAST:])
    return last[len(last) // 2] if math.isfinite(losses[-1]) else math.inf


def gradient_at(
    evidence: Evidence, weights: dict[int, Tensor], thawed: Sequence[int] = ()
) -> tuple[float, dict[int, Tensor]]:
    """The loss and its gradient with other weights; slots that are thawed are followed, too."""
    player = Player(evidence.tape, None, weights, autograd=True, follow_cuts=bool(thawed))
    for slot in thawed:
        player.env[slot] = player.value(slot).detach().requires_grad_()
    with player.saving.hooks():
        player.play(forward_operations(evidence.tape, None))
    found = player.replay
    return float(sum(loss.detach().double().sum() for loss in found.losses)), found.gradients


def copied(
    optimizer: torch.optim.Optimizer, evidence: Evidence, rate: float, weights: dict[int, Tensor]
) -> torch.optim.Optimizer:
    """A fresh optimizer of the same kind and settings, for copies of the weights, which are added to `weights`."""
    slots = {evidence.slot(slot).name: slot for slot in evidence.tape.stepped}
    slot_of = {id(p): slots[name] for name, p in named_parameters(evidence).items() if name in slots}
    groups = []
    for group in optimizer.param_groups:
        mine = {
            slot_of[id(p)]: own_copy(evidence, slot_of[id(p)]) for p in group["params"] if id(p) in slot_of
        }
        if mine:
            groups.append({**group, "params": list(mine.values()), "lr": rate * float(group["lr"])})
            weights.update(mine)
    make: Any = type(optimizer)
    return make(groups)


def own_copy(evidence: Evidence, slot: int) -> Tensor:
    return evidence.tape.leaf_value(slot).detach().clone().requires_grad_()
