"""How a function behaves: does it write into its inputs, is it random, is it finite, does float64 work?"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from gradproof.check.subject import Subject, like_layout
from gradproof.errors import UserError
from gradproof.numerics.difference import difference

SEED = 2026


def with_checked_behaviour(subject: Subject, *, masked: bool = False) -> Subject:
    """The subject, made repeatable; refuses what mutates its inputs, is not finite, or stays random."""
    given = [x.clone() for x in subject.point]
    passed = [like_layout(x, x) for x in subject.point]
    first = _copies(subject.outputs(passed))
    for name, before, after in zip(subject.input_names, given, passed, strict=True):
        if not _same(before, after):
            place = difference(after, before).place
            raise UserError(
                f"{subject.name} writes into its input {name} (first seen at {place}), so it cannot be "
                "evaluated twice at one point; copy the input inside the function"
            )
    for k, out in enumerate(first):
        if not masked and not bool(torch.isfinite(out).all()):
            bad = int((~torch.isfinite(out)).sum())
            raise UserError(
                f"output {k} of {subject.name} is not finite at this point ({bad} of {out.numel()} entries); "
                "a derivative needs a point where the function is finite"
            )
    return repeatable(subject, first)


def repeatable(subject: Subject, first: list[Tensor] | None = None) -> Subject:
    """The subject, given the same seeds every time if it is random; refused if that does not help."""
    first = first or _copies(subject.outputs(subject.point))
    if _all_same(first, subject.outputs(subject.point)):
        return subject
    fixed = replace(
        subject,
        outputs=lambda values: seeded(subject.outputs, values),
        gradients=lambda values, cotangents, **kw: seeded(subject.gradients, values, cotangents, **kw),
        notes=(*subject.notes, "the function is random; every evaluation was given the same seeds"),
    )
    once, again = (_copies(fixed.outputs(subject.point)) for _ in range(2))
    for k, (a, b) in enumerate(zip(once, again, strict=True)):
        # sums in changing order (atomics) are noise, which the check measures; anything larger is chance
        apart = difference(a, b, absolute=1e3 * torch.finfo(a.dtype).eps * b.abs().amax().double())
        if not apart.ok:
            raise UserError(
                f"{subject.name} is random even with torch's, NumPy's and Python's seeds fixed: output {k} "
                f"at {apart.place} was {apart.reference:.6g}, then {apart.value:.6g}; "
                "pass the random numbers as an input"
            )
    return fixed


def seeded(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call with all seeds fixed, and put the generators back afterwards."""
    python, arrays = random.getstate(), numpy.random.get_state()
    host, device = torch.default_generator.get_state(), _device_generators()
    try:
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed takes 5 ms where there is no GPU
        if device is not None:
            torch.cuda.manual_seed_all(SEED)
        random.seed(SEED)
        numpy.random.seed(SEED)
        return call(*args, **kwargs)
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.default_generator.set_state(host)
        if device is not None:
            torch.cuda.set_rng_state_all(device)


def _device_generators() -> list[Tensor] | None:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def _copies(outs: Sequence[Tensor]) -> list[Tensor]:
    return [out.detach().clone() for out in outs]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or difference(a, b).disagree == int((a.isnan() & b.isnan()).sum())


def _all_same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))


def find_float64_twin(subject: Subject) -> Subject | None:
    """The same function in float64 at the same point, or None where it does not run or stay there."""
    if subject.dtype == torch.float64:
        return subject
    if subject.in_float64 is None or hands_out_memory(subject):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin = with_checked_behaviour(subject.in_float64(), masked=True)
            outs = twin.outputs(twin.point)
    except Exception:  # whatever a float32-only kernel raises when it is handed float64
        return None
    wide = all(out.dtype == torch.float64 for out in outs)
    return twin if wide and _same_function(subject.outputs(subject.point), outs) else None


def hands_out_memory(subject: Subject) -> bool:
    """Whether a function asks for the address of a tensor: what is behind it takes one dtype, and cannot say so."""
    own, asked = torch.Tensor.data_ptr, []

    def noted(self: Tensor) -> int:
        asked.append(self.dtype)
        return own(self)

    torch.Tensor.data_ptr = noted  # type: ignore[method-assign,assignment]
    try:
        subject.outputs([like_layout(x, x) for x in subject.point])
    finally:
        torch.Tensor.data_ptr = own  # type: ignore[method-assign]
    return bool(asked)


def _same_function(own: Sequence[Tensor], wide: Sequence[Tensor]) -> bool:
    """Garbage has no digit in common with what the function gives in its own dtype."""
    for a, b in zip(own, wide, strict=True):
        finite = a.isfinite()
        here, there = a[finite].double(), b[finite]
        if here.numel() and not float((here - there).norm()) <= 0.9 * float(here.norm() + there.norm()):
            return False
    return True
