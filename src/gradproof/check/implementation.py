"""Two implementations of one function: their values, their gradients, and which is nearer the truth."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.check.behaviour import find_float64_twin, repeatable
from gradproof.check.culprit import scale_of
from gradproof.check.example import example_tensor
from gradproof.check.gradient import GradientMismatch, check_subject, incoming_gradients
from gradproof.check.subject import Subject, describe, like_layout, name_of, subject_of_function
from gradproof.errors import UserError
from gradproof.numerics.difference import Difference, difference

ROUNDINGS = 16  # how many roundings two right implementations may be apart
SAME = 1e-9  # relative difference below which two float64 results are one truth
HEADER: tuple[str, ...] = (
    "inputs", "compared", "verdict", "disagree", "worst at", "first", "second",
    "first's error", "second's error", "nearer the truth",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One output or gradient: how far apart the two are, and how far each is from the truth."""

    case: str
    what: str
    apart: Difference
    first_error: float | None  # relative to the truth, in the root mean square; None without a truth
    second_error: float | None

    @property
    def agree(self) -> bool:
        return self.apart.ok

    @property
    def nearer(self) -> str:
        if self.first_error is None or self.second_error is None:
            return ""
        low, high = sorted((self.first_error, self.second_error))
        if high <= 2 * low or high < 1e-15:
            return "alike"
        return "first" if self.first_error == low else "second"


@dataclass(frozen=True)
class Comparison:
    """What two implementations have in common and what not; `agree` is the short answer."""

    first: str
    second: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def agree(self) -> bool:
        return bool(self.rows) and all(row.agree for row in self.rows) and not self.notes

    def __str__(self) -> str:
        same = all(row.agree for row in self.rows)
        verdict = "agree" if self.agree else "agree, but:" if same else "disagree"
        table = [HEADER]
        table += [_cells(row) for row in self.rows]
        widths = [max(len(cells[k]) for cells in table) for k in range(len(table[0]))]
        lines = [f"{self.first} (first) and {self.second} (second) {verdict}"]
        for cells in table:
            lines.append("  " + "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip())
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    apart = row.apart
    errors = ["–" if e is None else f"{e:.1e}" for e in (row.first_error, row.second_error)]
    numbers = (f"{apart.value.real:.6g}", f"{apart.reference.real:.6g}")
    verdict = "same" if row.agree else "DIFFERENT"
    count, where = f"{apart.disagree} of {apart.total}", str(apart.place)
    return row.case, row.what, verdict, count, where, *numbers, *errors, row.nearer


def compare(
    first: Callable, second: Callable, *inputs: Any, sweep: Sequence[Any] | None = None
) -> Comparison:
    """Compare values and gradients of two implementations, with float64 as the arbiter.

    `sweep` is a list of inputs: each a tuple of tensors or of descriptions, or one description.

        compare(new_softmax, torch.softmax, x)
        compare(new_kernel, old_kernel, sweep=["float32[4,8]", "bfloat16[4,8]", "float32[1,1]"])
    """
    if sweep is None and not inputs:
        raise UserError("compare needs inputs, or sweep= with a list of them")
    rows: list[Row] = []
    notes: list[str] = []
    for case in [inputs] if sweep is None else sweep:
        given = _inputs(case)
        label = ", ".join(describe(x) for x in given)
        rows += _compare_at(first, second, given, label, notes)
    return Comparison(name_of(first), name_of(second), tuple(rows), tuple(dict.fromkeys(notes)))


def _inputs(case: Any) -> tuple:
    generator = torch.Generator().manual_seed(0)
    entries = case if isinstance(case, tuple | list) else (case,)
    return tuple(example_tensor(x, generator) if isinstance(x, str) else x for x in entries)


@dataclass(frozen=True)
class _Results:
    outputs: list[Tensor]
    gradients: list[Tensor]


def _compare_at(
    first: Callable, second: Callable, inputs: tuple, label: str, notes: list[str]
) -> Iterator[Row]:
    subjects = [_repeatable_if_possible(subject_of_function(fn, inputs)) for fn in (first, second)]
    for which, subject in zip(("first", "second"), subjects, strict=True):
        notes += [f"the {which}, {subject.name}, {fault} ({label})" for fault in _bad_habits(subject)]
    _refuse_different_shapes(subjects)
    weights = incoming_gradients(subjects[1].outputs(subjects[1].point))
    results = [_results(subject, weights) for subject in subjects]
    truth = _truth(subjects, weights, label, notes)
    kinds = [
        (f"output {k}", a, b) for k, (a, b) in enumerate(zip(*(r.outputs for r in results), strict=True))
    ]
    names = subjects[1].input_names
    kinds += [
        (f"gradient of {n}", a, b) for n, a, b in zip(names, *(r.gradients for r in results), strict=True)
    ]
    exact = [*truth.outputs, *truth.gradients] if truth else [None] * len(kinds)
    for (what, a, b), reference in zip(kinds, exact, strict=True):
        eps = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
        size = scale_of(b) if bool(b.any()) else 0.0
        apart = difference(a, b, relative=ROUNDINGS * eps, absolute=ROUNDINGS * eps * size)
        yield Row(label, what, apart, _relative(a, reference), _relative(b, reference))


def _repeatable_if_possible(subject: Subject) -> Subject:
    try:
        return repeatable(subject)
    except UserError:  # a bad habit, reported as such
        return subject


def _results(subject: Subject, weights: Sequence[Tensor]) -> _Results:
    outs = subject.outputs([like_layout(x, x) for x in subject.point])
    own = [w.to(out.device, out.dtype) for w, out in zip(weights, outs, strict=True)]
    gradients = subject.gradients(subject.point, own)
    pairs = zip(subject.point, gradients, strict=True)
    return _Results(outs, [torch.zeros_like(x) if g is None else g for x, g in pairs])


def _refuse_different_shapes(subjects: Sequence[Subject]) -> None:
    shapes = [[tuple(out.shape) for out in subject.outputs(subject.point)] for subject in subjects]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{subjects[0].name} returns shapes {shapes[0]}, {subjects[1].name} returns {shapes[1]}; "
            "only functions with the same outputs can be compared"
        )


def _relative(value: Tensor, truth: Tensor | None) -> float | None:
    if truth is None:
        return None
    error = (value.double().to(truth.device) - truth).square().mean().sqrt()
    return float(error) / scale_of(truth)


def _truth(
    subjects: Sequence[Subject], weights: Sequence[Tensor], label: str, notes: list[str]
) -> _Results | None:
    """What both give in float64, if that is one thing; where it is not, who is right about the gradient."""
    twins = [twin for subject in subjects if (twin := find_float64_twin(subject)) is not None]
    results = [_results(twin, [w.double() for w in weights]) for twin in twins]
    if not results:
        notes.append(f"neither runs in float64, so nothing says which is nearer the truth ({label})")
        return None
    if len(results) == 1 or _same(results[0].outputs, results[1].outputs):
        if len(results) == 2 and not _same(results[0].gradients, results[1].gradients):
            right = [_backward_is_right(twin, label, notes) for twin in twins]
            return results[right.index(True)] if any(right) else None
        return results[-1]
    notes.append(f"in float64 they still differ: they do not compute the same function ({label})")
    for twin in twins:
        _backward_is_right(twin, label, notes)
    return None


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(
        difference(a, b, absolute=SAME * scale_of(b)).ok for a, b in zip(first, second, strict=True)
    )


def _backward_is_right(twin: Subject, label: str, notes: list[str]) -> bool:
    try:
        check_subject(twin)
    except GradientMismatch as mismatch:
        notes.append(f"{str(mismatch).splitlines()[0]} ({label})")
        return False
    except UserError:  # a bad habit, reported as such
        return False
    return True


def _bad_habits(subject: Subject) -> Iterator[str]:
    """Results that change from call to call, and outputs with places that were never written."""
    once, again = (subject.outputs([like_layout(x, x) for x in subject.point]) for _ in range(2))
    for k, (a, b) in enumerate(zip(once, again, strict=True)):
        apart = difference(a, b)
        if apart.disagree > apart.nans:
            yield f"is not repeatable: {apart.disagree} of {apart.total} entries of output {k} change"
    for k, (a, b) in enumerate(zip(once, _poisoned(subject), strict=True)):
        unwritten = b.isnan() & ~a.isnan()
        if bool(unwritten.any()):
            place = tuple(unwritten.nonzero()[0].tolist())
            count = f"{int(unwritten.sum())} of {b.numel()} entries"
            yield f"leaves {count} of output {k} unwritten, first at {place}"


def _poisoned(subject: Subject) -> list[Tensor]:
    """The outputs when every torch.empty is filled with NaN."""
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
            return subject.outputs([like_layout(x, x) for x in subject.point])
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
