"""What an optimizer holds: its parameters, its settings, Adam's state, and what a step did to the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradproof.probes.tensors import local, sample

# the same thing under the names that torch's optimizers give it
FIRST_MOMENT = ("exp_avg", "momentum_buffer")
SECOND_MOMENT = ("exp_avg_sq", "square_avg", "sum")
SETTINGS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov", "amsgrad", "maximize", "fused")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def largest_lr(optimizer: torch.optim.Optimizer) -> float:
    return max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=0.0)


def describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and settings of each parameter group, as plain data."""
    groups = []
    for group in optimizer.param_groups:
        settings = {key: group[key] for key in SETTINGS if key in group}
        settings = {k: float(v) if isinstance(v, Tensor) else v for k, v in settings.items()}
        groups.append({**settings, "tensors": len(group["params"])})
    return {"class": type(optimizer).__name__, "groups": groups}


def moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Kind ("adam_m" or "adam_v"), parameter, moment and ε of everything the optimizer remembers."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for kind, keys in (("adam_m", FIRST_MOMENT), ("adam_v", SECOND_MOMENT)):
                moment = next((state[key] for key in keys if isinstance(state.get(key), Tensor)), None)
                if moment is not None and moment.shape == parameter.shape:
                    yield kind, parameter, moment, float(group.get("eps", 0.0))


def epsilon_share(second_moment: Tensor, eps: float, beta2: float, steps: int) -> Tensor:
    """Share of entries whose bias-corrected √v is below ε: there the step no longer depends on the gradient."""
    row = sample([second_moment])[0]
    correction = 1 - beta2**steps if 0 < beta2 < 1 else 1.0
    known = ~torch.isnan(row)
    below = ((row / correction).clamp_min(0).sqrt() < eps) & known
    return below.double().sum() / known.double().sum().clamp_min(1)


class WeightCopy:
    """The weights as they were before a step, in memory that is used again at the next measured step."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def take(self, parameters: list[Tensor]) -> None:
        weights = [local(p) for p in parameters]
        same = len(weights) == len(self._buffers) and all(
            w.shape == b.shape and w.dtype == b.dtype and w.device == b.device
            for w, b in zip(weights, self._buffers, strict=True)
        )
        if not same:
            self._buffers = [torch.empty_like(w, memory_format=torch.preserve_format) for w in weights]
        if weights:
            torch._foreach_copy_(self._buffers, weights)

    @torch.no_grad()
    def negative_updates(self, parameters: list[Tensor]) -> list[Tensor]:
        """Before minus after, in place: Δθ with its sign turned (`turn_sign` turns its statistics back)."""
        if parameters:
            torch._foreach_sub_(self._buffers, [local(p) for p in parameters])
        return self._buffers
