"""What an optimizer holds: its parameters, its settings, Adam's state, and what a step did to the weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradproof.probes.tensors import local, sample

# the same thing under the names that torch's optimizers give it
FIRST_MOMENT = ("exp_avg", "momentum_buffer")
SECOND_MOMENT = ("exp_avg_sq", "square_avg", "sum")
SETTINGS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "amsgrad", "maximize", "fused")
MOST_GROUPS = 1000  # that are described


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def changed_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its parameters; of updates by hand those that were seen to change, as soon as any was."""
    return getattr(optimizer, "changed", None) or parameters_of(optimizer)


def gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that has a gradient, and that gradient: read once, for it may be gone a moment later."""
    given = getattr(optimizer, "given", {})  # of updates by hand: gradients that are in no .grad
    for parameter in parameters_of(optimizer):
        gradient = given.get(id(parameter), parameter.grad)
        if gradient is not None:
            yield parameter, gradient


def largest_lr(optimizer: torch.optim.Optimizer) -> float | Tensor | None:
    """A number; still a tensor where reading it would wait for a GPU; of an update by hand nobody knows it."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    far = [rate.reshape(()) for rate in rates if isinstance(rate, Tensor) and not rate.is_cpu]
    if far:
        return torch.stack(far).max()
    return max(map(float, rates), default=None)


def describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and settings of each parameter group, as plain data."""
    groups = []
    for group in optimizer.param_groups[:MOST_GROUPS]:
        settings = {key: group[key] for key in SETTINGS if key in group}
        settings = {k: float(v) if isinstance(v, Tensor) else v for k, v in settings.items()}
        groups.append({**settings, "tensors": len(group["params"])})
    more = len(optimizer.param_groups) - MOST_GROUPS
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        **({"groups_left_out": more} if more > 0 else {}),
        "base_lr": base_lr(optimizer),
        "line": MADE_WITH.get(optimizer, (0.0, ""))[1],
    }


# what an optimizer's maker asked for: learning rate, and the line where it was made
MADE_WITH: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[float, str]] = weakref.WeakKeyDictionary()


def remember(optimizer: torch.optim.Optimizer, line: str) -> None:
    """Keep what a new optimizer was given, before a schedule changes it; a GPU's number is not waited for."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    known = [float(lr) for lr in rates if not isinstance(lr, Tensor) or lr.device.type == "cpu"]
    if known and optimizer not in MADE_WITH:
        MADE_WITH[optimizer] = (max(known), line)


def base_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate that was asked for, whatever a schedule has made of it; None where nobody saw it."""
    given = [float(group["initial_lr"]) for group in optimizer.param_groups if "initial_lr" in group]
    return max(given) if given else MADE_WITH.get(optimizer, (None, ""))[0]


def moments(optimizer: torch.optim.Optimizer, steps: int) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Kind ("adam_m" or "adam_v"), parameter, moment, and the v below which ε outweighs √v after so many steps."""
    for group in optimizer.param_groups:
        eps, betas = float(group.get("eps", 0.0)), group.get("betas", (0.0, 0.0))
        correction = 1 - float(betas[1]) ** steps if 0 < float(betas[1]) < 1 else 1.0
        for parameter in group["params"]:
            for kind, keys in (("adam_m", FIRST_MOMENT), ("adam_v", SECOND_MOMENT)):
                moment = _moment(optimizer, parameter, keys)
                if moment is not None:
                    yield kind, parameter, moment, eps * eps * correction


def first_moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that has one, and its momentum; an update by hand has none."""
    if hasattr(optimizer, "state"):
        for parameter in parameters_of(optimizer):
            moment = _moment(optimizer, parameter, FIRST_MOMENT)
            if moment is not None:
                yield parameter, moment


def _moment(optimizer: torch.optim.Optimizer, parameter: Tensor, keys: tuple[str, ...]) -> Tensor | None:
    state = optimizer.state.get(parameter, {})
    moment = next((state[key] for key in keys if isinstance(state.get(key), Tensor)), None)
    return moment if moment is not None and moment.shape == parameter.shape else None


def share_below(squares: list[Tensor], limits: list[float]) -> Tensor:
    """Share of a sample of each v that lies below its limit: there a step no longer depends on the gradient.

    A v of exactly zero has never seen a gradient (an unused row of an embedding) and does not count.
    """
    rows = sample(squares)
    limit = torch.tensor(limits, dtype=torch.float32, device="cpu").to(rows.device, non_blocking=True)
    used = rows > 0  # not nan
    return ((rows < limit[:, None]) & used).double().sum(dim=1) / used.double().sum(dim=1).clamp_min(1)


class WeightCopy:
    """The weights as they were before a step; on a CPU in memory that is kept from step to step."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []

    @torch.no_grad()
    def take(self, parameters: list[Tensor]) -> None:
        weights = [local(p) for p in parameters]
        if not _same_layout(weights, self.before):
            self.before = []  # given back before it is taken again
            self.before = [torch.empty_like(w) for w in weights]
        if weights:
            torch._foreach_copy_(self.before, weights)

    def give_back(self) -> None:
        """An accelerator's memory is the training's: another copy is made when one is wanted again."""
        if any(weight.device.type != "cpu" for weight in self.before):
            self.before = []

    def fits(self, weights: list[Tensor]) -> bool:
        """Whether these can be compared with the copies: not where a step has put other tensors in their place."""
        return _same_layout(weights, self.before)


def _same_layout(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
        for a, b in zip(first, second, strict=True)
    )
