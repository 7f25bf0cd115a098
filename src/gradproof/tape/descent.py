"""The cheap first test of a gradient, without a tape: does the loss change along it as it says?

ρ = [L(θ + αg) − L(θ − αg)] / (2α‖g‖²) is 1 for a true gradient. Group by group, from the loss backwards,
the first group whose ρ is not 1 is the room where the fault is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

LENGTHS = (
    5  # steps tried, each a quarter of the one before: curvature shows in long ones, rounding in short ones
)


@dataclass(frozen=True)
class GroupDescent:
    """ρ along the gradient of one group of parameters."""

    name: str
    ratio: float
    noise: float  # how far rounding and curvature alone can move the ratio

    @property
    def right(self) -> bool:
        return abs(self.ratio - 1.0) <= max(4 * self.noise, 0.01)

    @property
    def decided(self) -> bool:
        """Whether the noise would let half a gradient be told from a whole one."""
        return 4 * self.noise < 0.5

    def __str__(self) -> str:
        return f"{self.name or 'all parameters'}: ρ = {self.ratio:.4f} ± {self.noise:.4f}"


@dataclass(frozen=True)
class Descent:
    """ρ for the whole gradient and for each group, last group of the model first."""

    whole: GroupDescent
    groups: tuple[GroupDescent, ...]

    @property
    def right(self) -> bool:
        return self.whole.right and all(group.right for group in self.groups)

    @property
    def suspect(self) -> GroupDescent | None:
        """The first wrong group in backward order; a group too quiet to judge is skipped."""
        return next((group for group in self.groups if not group.right), None)

    def __str__(self) -> str:
        if not self.right:
            state = "the loss does not change as the gradient says"
        elif self.whole.decided:
            state = "the loss changes as the gradient says"
        else:
            state = "not decided, rounding and curvature move the loss as much as the gradient"
        place = "" if self.suspect is None else f"; first at {self.suspect}"
        return f"{state}: {self.whole}{place}"


def descent_test(
    loss: Callable[[], torch.Tensor], parameters: Mapping[str, torch.Tensor], depth: int = 2
) -> Descent:
    """ρ from parameters whose .grad is filled; `loss()` evaluates the same batch again, eleven times a group.

    Groups are the first `depth` parts of the names. Random numbers and in-place buffers must not change the
    loss: the
    generators are put back before each evaluation.
    """
    filled = {name: p for name, p in parameters.items() if p.grad is not None}
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in filled.items():
        groups.setdefault(".".join(name.split(".")[:-1][:depth]) or name, {})[name] = parameter
    whole = _ratio("", list(filled.values()), loss)
    return Descent(
        whole, tuple(_ratio(name, list(group.values()), loss) for name, group in reversed(groups.items()))
    )


def _ratio(name: str, parameters: list[torch.Tensor], loss: Callable[[], torch.Tensor]) -> GroupDescent:
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = sum((float(g.double().square().sum()) for g in gradients), 0.0)
    size = sum(float(p.detach().double().square().sum()) for p in parameters) ** 0.5
    if square == 0:
        return GroupDescent(name, 1.0, 0.0)
    eps = max(torch.finfo(p.dtype).eps for p in parameters)
    with _same_random_numbers(), torch.no_grad():
        level = abs(float(loss().detach().double()))
    # at most a hundredth of the loss along the gradient, and the step of central differences
    alpha = min(eps ** (1 / 3) * max(size, 1e-3) / square**0.5, 0.01 * max(level, 1e-6) / square)
    slopes: list[float] = []
    best = GroupDescent(name, 1.0, float("inf"))
    for shorter in range(LENGTHS):
        step = alpha / 4**shorter
        slope, level = _slope(parameters, loss, step, square)
        slopes.append(slope)
        # three lengths in a row must agree: two may do so by chance where the loss has kinks
        spread = max(slopes[-3:]) - min(slopes[-3:]) if len(slopes) >= 3 else float("inf")
        noise = spread + eps * level / (step * square)
        if noise < best.noise:
            best = GroupDescent(name, slope, noise)
    return best


def _slope(
    parameters: list[torch.Tensor], loss: Callable[[], torch.Tensor], alpha: float, square: float
) -> tuple[float, float]:
    """([L(θ + αg) − L(θ − αg)] / (2α‖g‖²), |L|)."""
    values = []
    for sign in (1.0, -1.0):
        with _moved(parameters, sign * alpha), _same_random_numbers(), torch.no_grad():
            values.append(float(loss().detach().double()))
    return (values[0] - values[1]) / (2 * alpha * square), max(abs(value) for value in values)


@contextmanager
def _moved(parameters: list[torch.Tensor], step: float) -> Iterator[None]:
    """The parameters moved along their gradients; afterwards exactly what they were."""
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=step)  # type: ignore[arg-type]
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    ):
        yield
