"""Is this backward the derivative of this forward? Random lines decide; entries only name the culprit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradproof.check.behaviour import find_float64_twin, with_checked_behaviour
from gradproof.check.culprit import (
    Claim,
    Culprit,
    find_culprit,
    find_culprit_along_lines,
    scale_of,
    steepest_direction,
)
from gradproof.check.slope import Slope, find_kink, measure
from gradproof.check.subject import Subject, subject_of_function
from gradproof.errors import UserError
from gradproof.numerics.difference import Difference, difference

UNDECIDED_FROM = 0.1  # a measurement that cannot tell an error of 10 % decides nothing
SCALAR_WEIGHT = 0.75  # the incoming gradient of a scalar: not 1, so that a backward that ignores it is seen


@dataclass(frozen=True)
class InputCheck:
    """What was found for one input."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    error: float  # largest relative error along the lines measured
    allowed: float  # the relative error that would have been seen
    method: str

    @property
    def decided(self) -> bool:
        return self.allowed <= UNDECIDED_FROM

    def __str__(self) -> str:
        what = f"{self.name} {self.dtype}{list(self.shape)}"
        if not self.decided:
            reason = "its lines contradict each other"
            if math.isfinite(self.allowed):
                reason = f"below {self.allowed:.0%} all is noise"
            return f"{what:<32} cannot be decided at this precision: {reason}"
        return f"{what:<32} agrees   error {self.error:.1e}, {self.allowed:.1e} allowed   {self.method}"


@dataclass(frozen=True)
class GradientCheck:
    """A gradient that was not found wrong: for each input, how closely that is known."""

    name: str
    inputs: tuple[InputCheck, ...]
    notes: tuple[str, ...]

    @property
    def decided(self) -> bool:
        return all(found.decided for found in self.inputs)

    def __str__(self) -> str:
        verdict = "is right" if self.decided else "cannot be decided at this precision"
        lines = [f"gradient of {self.name} {verdict}"]
        lines += [f"  {found}" for found in self.inputs]
        lines += [f"  note: {note}" for note in self.notes]
        if not self.decided:
            lines.append("  next: a version of the function that runs in float64 would decide it")
        return "\n".join(lines)


class GradientMismatch(AssertionError):
    """A backward that is not the derivative of its forward: where, both numbers, how many, which pattern."""

    def __init__(self, name: str, culprit: Culprit, notes: Sequence[str] = (), table: str = ""):
        self.name, self.culprit, self.notes, self.table = name, culprit, tuple(notes), table
        super().__init__(str(self))

    def __str__(self) -> str:
        c = self.culprit
        where = f"at {c.place}" if c.place is not None else "along random directions"
        what = "wrong" if math.isfinite(c.backward) else "not finite"
        lines = [
            f"gradient of {self.name} with respect to {c.input} is {what} {where}",
            _line("backward says", f"{c.backward:.6g}"),
            _line(f"{c.method} says", f"{c.truth:.6g}"),
            _line("relative error", f"{c.error:.1e}, {c.allowed:.1e} allowed; {self._how_many()}"),
        ]
        lines += [_line("pattern", c.relation)] if c.relation else []
        lines += [_line("note", note) for note in self.notes]
        if self.table:
            lines.append(
                _line("next", f"gradproof.check_gradient on {self.name} alone") + f"\n\n{self.table}"
            )
        else:
            lines.append(_line("next", f"gradproof.compare({self.name}, reference_{self.name}, ...)"))
        return "\n".join(lines)

    def _how_many(self) -> str:
        c = self.culprit
        if c.place is None:
            return f"{c.wrong} of {c.total} directions; its entries one by one drown in noise"
        counted = f"{c.wrong} of {c.total} {'sampled ' if c.sampled else ''}entries"
        return f"{counted}, {c.places}" if c.places else counted


def _line(label: str, value: str) -> str:
    return f"  {label:<22} {value}"


def check_gradient(fn: Callable, *inputs: Any, name: str | None = None, order: int = 1) -> GradientCheck:
    """Raise `GradientMismatch` if a backward is not the derivative of its forward, else say how surely it is.

    `fn` is a function, an `autograd.Function` class or a module (then its parameters are checked too). Inputs
    that require gradients are checked, or all floating-point ones if none does. A function of float32 or
    bfloat16 inputs is also run in float64 where it can be. `order=2` checks the backward's derivative too.

        check_gradient(torch.tanh, torch.randn(3, 4))
    """
    if order not in (1, 2):
        raise UserError(f"order is 1 (the gradient) or 2 (its derivative too), not {order!r}")
    subject = subject_of_function(fn, inputs, name)
    found = check_subject(subject)
    if order == 1:
        return found
    second = check_subject(_second_order(find_float64_twin(subject) or subject))
    return GradientCheck(found.name, found.inputs + second.inputs, found.notes + second.notes)


def _second_order(subject: Subject) -> Subject:
    """The backward as a function of the inputs and of the incoming gradient."""
    count = len(subject.point)
    cotangents = incoming_gradients(subject.outputs(subject.point))

    def backward(*values: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [v if v.requires_grad else v.detach().requires_grad_() for v in values[:count]]
            found = subject.gradients(inputs, values[count:], graph=True)
        connected = [g for g in found if g is not None]
        if torch.is_grad_enabled() and not any(g.requires_grad for g in connected):
            raise UserError(
                f"the backward of {subject.name} cannot be differentiated again; write it in differentiable "
                "torch operations, or check order=1"
            )
        return connected

    second = subject_of_function(backward, (*subject.point, *cotangents), f"the backward of {subject.name}")
    names = (*subject.input_names, *(f"incoming gradient {k}" for k in range(len(cotangents))))
    return replace(second, input_names=names, in_float64=None)


def check_subject(subject: Subject) -> GradientCheck:
    """The check behind all the others."""
    subject = with_checked_behaviour(subject)
    own = claim_at(subject, subject.point)
    twin = find_float64_twin(subject)
    claim = own if twin is subject or twin is None else _in_float64(own, twin)
    notes = list(subject.notes)
    checks = [check_input(claim, which, notes) for which in range(len(claim.point))]
    if twin is None:
        dtype = str(subject.dtype).removeprefix("torch.")
        notes.append(f"{subject.name} runs in {dtype} only: errors below the tolerance shown cannot be seen")
    elif twin is not subject:
        _check_own_precision(own, claim, notes)
    return GradientCheck(subject.name, tuple(checks), tuple(notes))


def check_input(claim: Claim, which: int, notes: list[str]) -> InputCheck:
    """Raise if the gradient of one input is wrong; what is worth knowing otherwise is added to the notes."""
    slopes = measure_lines(claim, which)
    if not all(slope.agrees for slope in slopes):
        claim, note = _off_the_kink(claim, which, slopes[0])
        slopes = measure_lines(claim, which) if note else slopes
        notes += [note] if note else []
    if not all(slope.agrees for slope in slopes):
        line = claim.line(which, _random_direction(claim, which))
        claim = replace(claim, grain=line.known_grain, noise=line.noise)
        slopes = measure_lines(claim, which) if claim.grain else slopes
    if not all(slope.agrees for slope in slopes):
        culprit = _find_confirmed_culprit(claim, which)
        if culprit is not None:
            raise GradientMismatch(claim.subject.name, culprit, notes)
    return _input_check(claim, which, slopes)


def _find_confirmed_culprit(claim: Claim, which: int) -> Culprit | None:
    """Entry by entry; for a noisy function only once more lines have confirmed that something is wrong."""
    if claim.is_fine:
        return find_culprit(claim, which) or find_culprit_along_lines(claim, which)
    along_lines = find_culprit_along_lines(claim, which)
    return along_lines and (find_culprit(claim, which) or along_lines)


def incoming_gradients(outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Random weights for the outputs, each output counting alike; zero where an output is not finite."""
    generator = torch.Generator().manual_seed(0)
    weights = []
    for out in outs:
        finite = torch.isfinite(out)
        size = scale_of(out[finite]) if bool(finite.any()) else 1.0
        if out.numel() == 1:
            w = torch.full_like(out, SCALAR_WEIGHT, memory_format=torch.contiguous_format)
        else:
            w = (torch.randn(out.shape, generator=generator) / size).to(out.device, out.dtype)
        weights.append(torch.where(finite, w, torch.zeros_like(w)))
    return tuple(weights)


def claim_at(subject: Subject, point: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None) -> Claim:
    """Ask the backward for its gradients at a point."""
    weights = tuple(cotangents) if cotangents is not None else incoming_gradients(subject.outputs(point))
    gradients = []
    for name, x, g in zip(subject.input_names, point, subject.gradients(point, weights), strict=True):
        if g is not None and g.shape != x.shape:
            raise UserError(
                f"backward of {subject.name} returned a gradient of shape {tuple(g.shape)} for {name}, which "
                f"has shape {tuple(x.shape)}; sum over the axes that were broadcast"
            )
        gradients.append(torch.zeros_like(x) if g is None else g.detach())
    return Claim(subject, tuple(point), weights, tuple(gradients))


def _in_float64(own: Claim, twin: Subject) -> Claim:
    return claim_at(twin, twin.point, [w.double() for w in own.cotangents])


def _off_the_kink(claim: Claim, which: int, slope: Slope) -> tuple[Claim, str | None]:
    """Where the point itself is a kink, the same claim at a point beside it, and a note that says so."""
    jump = find_kink(claim.line(which, _random_direction(claim, which)), slope)
    moved = None if jump is None else _step_aside(claim, which)
    if jump is None or moved is None:
        return claim, None
    name = claim.subject.input_names[which]
    return moved, (
        f"{name} is at a kink (the slope along a line jumps by {abs(jump):.3g} there: a zero of ReLU, a tie "
        "of max); checked 2 % beside it"
    )


def _step_aside(claim: Claim, which: int) -> Claim | None:
    """The same claim 1 to 2 % of the input's scale away, or None where the function is not finite there."""
    x = claim.point[which]
    generator = torch.Generator().manual_seed(2)
    away = torch.rand(x.shape, generator=generator).add(1).to(x.device)
    signs = torch.randint(0, 2, x.shape, generator=generator).mul(2).sub(1).to(x.device)
    for sign in (signs, torch.ones_like(signs), -torch.ones_like(signs)):
        point = list(claim.point)
        point[which] = (x + 0.01 * scale_of(x) * away * sign).to(x.dtype)
        if all(bool(torch.isfinite(out).all()) for out in claim.subject.outputs(point)):
            return claim_at(claim.subject, point, claim.cotangents)
    return None


def measure_lines(claim: Claim, which: int) -> list[Slope]:
    directions = [_random_direction(claim, which), _levelled_direction(claim, which)]
    if not claim.is_fine:
        directions[1] = steepest_direction(claim, which)
    x = claim.point[which]
    # a float64 gradient that is nothing but rounding is judged by the size of the outputs, not by its own
    fine = 1e4 * torch.finfo(torch.float64).eps if claim.subject.dtype == torch.float64 else 0.0
    floor = fine * claim.natural(which) * scale_of(x) * math.sqrt(x.numel())
    return [measure(claim.line(which, direction), floor) for direction in directions]


def _random_direction(claim: Claim, which: int) -> Tensor:
    x = claim.point[which]
    generator = torch.Generator().manual_seed(1000 + which)
    return scale_of(x) * torch.randn(x.shape, generator=generator).to(x)


def _levelled_direction(claim: Claim, which: int) -> Tensor:
    """Random signs, shorter where the gradient is large: a wrong entry counts alike wherever it is."""
    size = claim.gradients[which].double().abs()
    few = size.flatten()[:: max(size.numel() // 10_000, 1)]
    middle = torch.maximum(few.median(), 1e-3 * few.square().mean().sqrt())
    lengths = (middle / size.clamp_min(1e-300)).clamp_max(1.0).nan_to_num(1.0)
    lengths = torch.where(size > 0, lengths, 1.0)
    generator = torch.Generator().manual_seed(2000 + which)
    signs = torch.randint(0, 2, size.shape, generator=generator).mul(2).sub(1).to(size.device)
    return (scale_of(claim.point[which]) * lengths * signs).to(claim.point[which].dtype)


def _input_check(claim: Claim, which: int, slopes: Sequence[Slope]) -> InputCheck:
    x = claim.point[which]
    # the sharpest line decides; one along which the gradient happens to cancel says little
    sharpest = min(slopes, key=lambda slope: slope.resolution)
    return InputCheck(
        name=claim.subject.input_names[which],
        shape=tuple(x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        error=max(slope.error for slope in slopes),
        allowed=sharpest.resolution if all(slope.agrees for slope in slopes) else math.inf,
        method=sharpest.method,
    )


def _check_own_precision(own: Claim, exact: Claim, notes: list[str]) -> None:
    """The same backward in the caller's dtype against its float64 self: wrong, or a note on lost digits."""
    for which, name in enumerate(own.subject.input_names):
        g, reference = own.gradients[which], exact.gradients[which]
        dtype, eps = str(g.dtype).removeprefix("torch."), torch.finfo(g.dtype).eps
        size = scale_of(reference) if reference.any() else 0.0
        size = max(size, min(1e4 * eps, 0.1) * exact.natural(which))  # as for the lines
        apart = difference(g, reference, absolute=64 * eps * size, relative=64 * eps)
        if apart.ok:
            continue
        off = float((g.double() - reference).square().mean().sqrt()) / size
        if not off <= max(0.01, 64 * eps, 30 * _conditioning(exact, which, eps)):
            raise GradientMismatch(own.subject.name, _lost_in_own_dtype(name, apart, off), notes)
        notes.append(
            f"right in float64; in {dtype} the gradient of {name} is {apart.value:.6g} at {apart.place}, "
            f"exactly {apart.reference:.6g}: {apart.disagree} of {apart.total} entries lose digits"
        )


def _conditioning(claim: Claim, which: int, eps: float) -> float:
    """How much the gradient itself changes, relative, when the inputs are rounded to the caller's dtype."""
    generator = torch.Generator().manual_seed(3)
    rounded = [x * (1 + eps * (torch.rand(x.shape, generator=generator).to(x) - 0.5)) for x in claim.point]
    g, near = claim.gradients[which], claim_at(claim.subject, rounded, claim.cotangents).gradients[which]
    return float((near - g).norm() / g.norm())


def _lost_in_own_dtype(name: str, apart: Difference, off: float) -> Culprit:
    return Culprit(
        name, apart.place, apart.value.real, apart.reference.real, apart.relative,
        apart.allowed / max(abs(apart.reference), 1e-300), apart.disagree, apart.total, False, None,
        f"right in float64, {off:.1%} off in the dtype it was called with", "its own float64",
    )  # fmt: skip
