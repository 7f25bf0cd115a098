"""AdamW over flat buffers, clipping by the global norm, and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi, prod

import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.lm.shape import flat_tensors

CHUNK = 1 << 18  # parameters updated at once on a CPU, so that the passes stay in cache
CHUNK_ON_GPU = 1 << 24
SUMMED = 1 << 14  # squares in one float32 sum on a CPU


@dataclass(frozen=True)
class AdamSettings:
    """The constants of AdamW; the learning rate comes with each step."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


DEFAULTS = AdamSettings()


class FlatAdamW:
    """Updates all parameters of one flat buffer from one flat gradient.

    Decay is decoupled and falls on the matrices only, which stand before the vectors (norms, biases).
    """

    def __init__(
        self, parameters: Tensor, shapes: dict[str, tuple[int, ...]], settings: AdamSettings = DEFAULTS
    ) -> None:
        self.flat_parameters, self.settings, self.steps = parameters, settings, 0
        self.flat_m, self.m = flat_tensors(shapes, lambda n: torch.zeros_like(parameters))
        self.flat_v, self.v = flat_tensors(shapes, lambda n: torch.zeros_like(parameters))
        self.scratch = torch.empty_like(parameters[chunks(parameters)[0]])
        self.decayed = sum(prod(s) for s in shapes.values() if len(s) > 1)

    def step(self, gradients: Tensor, lr: float) -> None:
        """m and v follow the gradient and its square; the parameters move by lr·m̂/(√v̂ + eps) and decay."""
        s = self.settings
        self.steps += 1
        # lr·(m/c1) / (√(v/c2) + eps), with the constants drawn out of the passes over the buffers
        root2 = (1 - s.beta2**self.steps) ** 0.5
        rate = lr * root2 / (1 - s.beta1**self.steps)
        self.flat_parameters[: self.decayed].mul_(1 - lr * s.weight_decay)
        for part in chunks(gradients):
            m, v, g = self.flat_m[part], self.flat_v[part], gradients[part]
            m.lerp_(g, 1 - s.beta1)
            v.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
            root = torch.sqrt(v, out=self.scratch[: len(v)]).add_(s.eps * root2)
            self.flat_parameters[part].addcdiv_(m, root, value=-rate)


def chunks(flat: Tensor, on_cpu: int = CHUNK) -> list[slice]:
    """The flat buffer in parts, on a CPU cache-sized."""
    size = on_cpu if flat.device.type == "cpu" else CHUNK_ON_GPU
    return [slice(start, start + size) for start in range(0, flat.numel(), size)]


def global_norm(flat: Tensor) -> Tensor:
    """The Euclidean norm, in float64 across chunks: one long float32 sum is percents low at 100M elements."""
    squares = [flat[part].square().sum() for part in chunks(flat, SUMMED)]
    return torch.stack(squares).to(torch.float64).sum().sqrt()


def clip_global_norm(flat: Tensor, limit: float) -> Tensor:
    """Scales the gradient down to the limit where its norm exceeds it; returns the norm before."""
    norm = global_norm(flat)
    if flat.device.type != "cpu" or not norm <= limit:  # on a GPU always: to ask would be to wait for it
        flat *= (limit / norm).clamp(max=1.0).to(flat.dtype)
    return norm


Schedule = Callable[[int], float]


def cosine(progress: float) -> float:
    return 0.5 * (1 + cos(pi * progress))


def linear(progress: float) -> float:
    return 1 - progress


def constant(progress: float) -> float:
    return 1.0


SCHEDULES = {"cosine": cosine, "linear": linear, "constant": constant}


def learning_rate(schedule: str, peak: float, warmup: int, steps: int, floor: float = 0.1) -> Schedule:
    """The learning rate of step 0, 1, …: up over `warmup` steps, then down to floor × peak at the last."""
    if schedule not in SCHEDULES:
        raise UserError(f"no schedule {schedule!r}: choose from {', '.join(SCHEDULES)}")
    shape = SCHEDULES[schedule]

    def at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return peak * (floor + (1 - floor) * shape(progress))

    return at
