"""The test suite of a loss kernel: point it at any cross-entropy, and it says what is wrong, and where.

A loss under test is called as `loss(logits, targets)`, logits (N, V), and returns the mean over the positions
that count; those that must not are given by `mask=`, if it has such a parameter, or by a target of -100.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.reference import reference_loss_and_gradient
from gradproof.numerics.difference import difference

SIZES = (
    1,
    2,
    31,
    32,
    33,
    50,
    255,
    256,
    257,
    1023,
    1024,
    1025,
    2000,
    2004,
    50257,
    65535,
    65536,
    65537,
    131072,
)
INF = float("inf")
EXTREMES = {
    "±1e4": [1e4, -1e4, 0.0, 5.0],
    "-inf beside the target": [-INF, 2.0, -INF, 1.0],
    "all but the target -inf": [-INF, 0.0, -INF, -INF],
    "all equal": [3.0, 3.0, 3.0, 3.0],
    "one hot": [0.0, 50.0, 0.0, 0.0],
    "subnormal": [1e-40, -1e-42, 0.0, 1e-45],
    "large offset": [1e6, 1e6 + 1, 1e6 - 1, 1e6],
}


@dataclass(frozen=True)
class Outcome:
    """What one check found; `detail` has the worst place."""

    check: str
    ok: bool
    detail: str


def call_loss(
    function: Callable, logits: Tensor, targets: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss and its gradient with respect to the logits."""
    x = logits.detach().clone() if logits.is_contiguous() else logits.detach()
    x.requires_grad_()
    if mask is None:
        loss = function(x, targets)
    elif "mask" in inspect.signature(function).parameters:
        loss = function(x, targets, mask=mask)
    else:
        loss = function(x, torch.where(mask, targets, -100))
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient


def _compare(
    check: str, function: Callable, logits: Tensor, targets: Tensor, mask: Tensor | None = None
) -> Outcome:
    """Loss and gradient against the float64 formula, allowing what an honest float32 kernel needs."""
    loss, gradient = call_loss(function, logits, targets, mask)
    exact, lse, dexact = reference_loss_and_gradient(logits, targets, mask, None, LossOptions())
    eps = torch.finfo(torch.float32).eps
    size = torch.where(lse.isfinite(), lse.abs(), 0.0).max()  # lse - x[y] cancels down to an ulp of lse
    found = difference(loss, exact, relative=1e-5, absolute=4 * eps * size)
    if not found.ok:
        return Outcome(check, False, f"loss is {found.value:.7g}, right is {found.reference:.7g}")
    if gradient.shape != logits.shape:
        return Outcome(
            check, False, f"gradient has shape {tuple(gradient.shape)}, logits {tuple(logits.shape)}"
        )
    rows = dexact.abs().amax(1, keepdim=True)
    share = 1 / max(1, int(mask.sum())) if mask is not None else 1 / len(logits)
    found = difference(gradient, dexact, absolute=2e-5 * rows + 4 * eps * (1 + size) * share)
    detail = f"gradient at {found.place} is {found.value:.7g}, right is {found.reference:.7g}"
    return Outcome(check, found.ok, "" if found.ok else f"{detail}; {found.disagree} of {found.total} wrong")


def _make(n: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * n + v)
    logits = 3 * torch.randn(n, v, generator=g, dtype=dtype)
    return logits, torch.randint(0, v, (n,), generator=g)


def check_sizes(function: Callable) -> Iterator[Outcome]:
    """Small and large vocabularies, and those around powers of two; the last class is once the target."""
    for v in SIZES:
        logits, targets = _make(3, v)
        targets[0] = v - 1
        yield _compare(f"vocabulary {v}", function, logits, targets)


def check_masks(function: Callable) -> Iterator[Outcome]:
    """Positions that must not count: every one, some, the first half; nothing of them reaches the loss."""
    logits, targets = _make(8, 70)
    some = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
    yield _compare("mask: random", function, logits, targets, some)
    yield _compare("mask: first half", function, logits, targets, torch.arange(8) >= 4)
    yield _compare("mask: all positions count", function, logits, targets, torch.ones(8, dtype=torch.bool))
    loss, gradient = call_loss(function, logits, targets, torch.zeros(8, dtype=torch.bool))
    quiet = not gradient.any() and bool(loss == 0 or loss.isnan())  # torch's mean of nothing is NaN
    yield Outcome(
        "mask: no position counts",
        quiet,
        ""
        if quiet
        else f"loss is {loss.item():.7g}, largest |gradient| {gradient.abs().max().item():.7g}, not 0",
    )


def check_extremes(function: Callable) -> Iterator[Outcome]:
    """Rows that overflow, underflow, or have no spread."""
    for name, row in EXTREMES.items():
        yield _compare(f"extreme: {name}", function, torch.tensor([row]), torch.tensor([1]))


def check_finite_differences(function: Callable) -> Iterator[Outcome]:
    """The gradient against central differences of the loss itself, in float64."""
    logits, targets = _make(3, 9, torch.float64)
    loss, gradient = call_loss(function, logits, targets)
    if loss.dtype != torch.float64:
        yield Outcome("finite differences", True, f"left out: the loss of float64 logits is {loss.dtype}")
        return
    step = 1e-5
    numeric = torch.empty_like(logits)
    for place in range(logits.numel()):
        moved = [logits.clone(), logits.clone()]
        moved[0].view(-1)[place] += step
        moved[1].view(-1)[place] -= step
        up, down = (function(x, targets) for x in moved)
        numeric.view(-1)[place] = (up - down) / (2 * step)
    found = difference(gradient, numeric, absolute=1e-8)
    detail = f"gradient at {found.place} is {found.value:.7g}, the slope of the loss {found.reference:.7g}"
    yield Outcome("finite differences", found.ok, "" if found.ok else detail)


def check_every_entry_written(function: Callable) -> Iterator[Outcome]:
    """New memory is filled with NaN: an entry the kernel does not write stays NaN."""
    for v in (1000, 1031):
        logits, targets = _make(5, v)
        with _poisoned_memory():
            loss, gradient = call_loss(function, logits, targets)
        left = int(gradient.isnan().sum())
        first = tuple(gradient.isnan().nonzero()[0].tolist()) if left else ()
        ok = not left and bool(loss.isfinite())
        yield Outcome(
            f"every entry written, {v}", ok, "" if ok else f"{left} not written, the first at {first}"
        )


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_layouts(function: Callable) -> Iterator[Outcome]:
    """Logits that do not lie contiguous, or start at an odd address."""
    logits, targets = _make(6, 130)
    yield _compare("every other column", function, logits[:, ::2], targets % 65)
    yield _compare("transposed", function, logits.t().contiguous().t(), targets)
    yield _compare("columns from 1 on", function, logits[:, 1:], targets % 129)


def check_repeatability(function: Callable) -> Iterator[Outcome]:
    """The same input five times: a race, or an order that is left to chance, gives other bits."""
    logits, targets = _make(16, 3000)
    first, *others = [call_loss(function, logits, targets) for _ in range(5)]
    for loss, gradient in others:
        if not (torch.equal(loss, first[0]) and torch.equal(gradient, first[1])):
            found = difference(gradient, first[1])
            detail = f"gradient at {found.place} was {found.reference:.9g} and then {found.value:.9g}"
            yield Outcome(
                "repeatable", False, detail if found.disagree else "the loss changes from run to run"
            )
            return
    yield Outcome("repeatable", True, "")


def check_rows_sum_to_zero(function: Callable) -> Iterator[Outcome]:
    """Adding a number to a row of logits changes nothing, so a row of the gradient sums to zero."""
    logits, targets = _make(8, 999)
    _, gradient = call_loss(function, logits, targets)
    sums = gradient.double().sum(1)
    found = difference(sums, torch.zeros_like(sums), absolute=1e-6 / len(logits))
    detail = f"row {found.place[0]} of the gradient sums to {found.value:.7g}"
    yield Outcome("rows sum to zero", found.ok, "" if found.ok else detail)


CHECKS = (
    check_sizes,
    check_masks,
    check_extremes,
    check_finite_differences,
    check_every_entry_written,
    check_layouts,
    check_repeatability,
    check_rows_sum_to_zero,
)


def run_checks(function: Callable) -> list[Outcome]:
    """Every outcome of every check; a check that raises has failed, with what was raised."""
    outcomes: list[Outcome] = []
    for check in CHECKS:
        try:
            outcomes += check(function)
        except Exception as error:  # the kernel's own, whatever it is: it is the finding
            name = check.__name__.removeprefix("check_").replace("_", " ")
            outcomes.append(Outcome(name, False, f"raised {type(error).__name__}: {str(error)[:200]}"))
    return outcomes


def render_outcomes(outcomes: Sequence[Outcome]) -> str:
    """A line for each check, failures with their worst place, and the count."""
    width = max(len(outcome.check) for outcome in outcomes)
    lines = [f"  {o.check:{width}}  {'ok' if o.ok else 'FAILED':6}  {o.detail}".rstrip() for o in outcomes]
    failed = sum(not outcome.ok for outcome in outcomes)
    return "\n".join([*lines, f"{failed} of {len(outcomes)} checks failed"])
