"""What a kernel claims to be, against the textbook in float64: the formula, its precision, and its extremes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from gradproof.check.blackbox import Answer, BlackBox
from gradproof.check.culprit import scale_of
from gradproof.check.findings import Fault
from gradproof.check.textbook import (
    LARGE,
    SMALL,
    TEXTBOOKS,
    Formula,
    Textbook,
    call_of,
    fitting,
    order_of,
    said_by,
)
from gradproof.check.variations import shaken
from gradproof.numerics.difference import difference

NEAR = 0.02  # of the typical result: a sum that is so near a textbook's is meant to be it
NEAR_BY_NAME = 0.1  # the same where the name says so, too
EXACT = 1e-4  # the same for what sums nothing,
COARSE = 1e-2  # and where its name says so
EXPLAINED = 1e-3  # a mistake whose formula is so near is the mistake
ALIKE = 0.999  # cosine to the textbook's result: it is that, to few digits
MOST = 0.5  # of the entries: a kernel that gets so many right means to get all
NAMED_BITS = ((range(4, 10), "bfloat16"), (range(10, 13), "float16"))  # that rounding leaves right


@dataclass(frozen=True)
class Match:
    """How far the results of a call are from a formula's."""

    error: float  # of the worst entry, relative to the typical one
    off: float  # of all entries together
    cosine: float
    share: float  # of entries that are right
    result: str
    evidence: str


def find_claim_faults(box: BlackBox, reference: Callable | None, notes: list[str]) -> Iterator[Fault]:
    """Where a kernel departs from its reference, or from the textbook that its name or its numbers speak of."""
    if reference is not None:
        yield from _by_reference(box, reference)
        return
    if not box.floats:
        return
    books, plain = said_by(box.name)
    others = [book for book in TEXTBOOKS if book not in books]
    for book, readings in fitting([*books, *others], call_of(box, torch.float64)):
        named = book in books
        found = _best(box, [formula for words, formula in readings if not words])
        meant = named and plain  # the name speaks of this and of nothing else
        limit = (NEAR_BY_NAME if meant else NEAR) if book.sums else (COARSE if meant else EXACT)
        exact = found is not None and found[1].error <= _allowed(box, found[0])
        wrong = None if exact or not named else _explained(box, readings, found)
        if wrong is not None:
            yield Fault("claim", f"{box.name} {wrong[0]}", f"{wrong[1].evidence} by {book.name} in float64")
            return
        alike = found is not None and meant and book.sums and found[1].cosine >= ALIKE
        if found is not None and (exact or found[1].error <= limit or alike):
            notes.append(f"recognised as {book.name}" + ("" if named else " by its results"))
            yield from _precision(box, book, found[0])
            return
        if meant and found is not None and found[1].share >= MOST:
            yield Fault(
                "claim",
                f"{box.name} is {book.name} in {found[1].share:.0%} of its entries only",
                f"{found[1].evidence} by {book.name} in float64",
            )
            return


def _by_reference(box: BlackBox, reference: Callable) -> Iterator[Fault]:
    def formula_in(dtype: torch.dtype) -> list[Tensor]:
        leaves = [
            x.detach().cpu().to(dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x
            for x in box.leaves
        ]
        with torch.no_grad():
            made = reference(*leaves)
        return [x for x in tree_flatten(made)[0] if isinstance(x, Tensor)]

    answer, exact = box.ask(), formula_in(torch.float64)
    own = formula_in(_dtype_of(box))
    for k, (truth, rounded) in enumerate(zip(exact, own, strict=True)):
        shaped = [x for x in answer.results if x.shape == truth.shape]
        result = answer.results[k] if k < len(answer.results) else None
        if result is None or result.shape != truth.shape:
            result = shaped[0] if shaped else None
        if result is None:
            yield Fault(
                "claim", f"{box.name} returns no result of the shape {tuple(truth.shape)} of its reference"
            )
            return
        gap = difference(result, truth, absolute=_room(box, truth, rounded))
        if not gap.ok:
            yield Fault("claim", f"{box.name} is not its reference", str(gap).splitlines()[0] + _both(gap))
            return


def _both(gap: Any) -> str:
    return f" {gap.value.real:.6g} in place of {gap.reference.real:.6g}, {gap.error:.2g} off, {gap.allowed:.2g} allowed"


def _dtype_of(box: BlackBox) -> torch.dtype:
    floats = [box.leaves[k].dtype for k in box.floats]
    return max(floats, key=lambda d: torch.finfo(d).eps) if floats else torch.float32


def _room(box: BlackBox, truth: Tensor, rounded: Tensor) -> float:
    """What rounding may do: eight times what it does to PyTorch's own in this dtype, or a walk over the numbers."""
    eps = torch.finfo(_dtype_of(box)).eps
    off = (rounded.double() - truth).abs()
    own = float(off[off.isfinite()].max()) if bool(off.isfinite().any()) else 0.0
    longest = max([truth.numel(), *(box.leaves[k].numel() for k in box.floats)])
    finite = truth[truth.isfinite()]
    return max(8 * own, 8 * eps * math.sqrt(longest) * (scale_of(finite) if finite.numel() else 1.0))


def _matched(box: BlackBox, answer: Answer, formula: Formula) -> Match | None:
    """The worst match of a formula's results with those of a call; None where they do not fit together."""
    try:
        made = formula(call_of(box, torch.float64))
    except (RuntimeError, IndexError, StopIteration, ZeroDivisionError):
        return None
    pairs = _paired(answer, made)
    if not pairs:
        return None
    matches = [_match(box, name, result, truth) for name, result, truth in pairs]
    return max(matches, key=lambda match: match.error)


def _paired(answer: Answer, made: Any) -> list[tuple[str, Any, Tensor]]:
    if isinstance(made, dict):  # what is written, by its name; what is not written is as it was
        by_name = dict(zip(answer.names, answer.results, strict=True))
        return [(name, by_name.get(name), truth) for name, truth in made.items()]
    fits = [(n, x) for n, x in zip(answer.names, answer.results, strict=True) if x.shape == made.shape]
    fits = fits or [
        (n, x) for n, x in zip(answer.names, answer.results, strict=True) if x.numel() == made.numel() == 1
    ]
    return [(*fits[0], made.reshape(fits[0][1].shape))] if fits and fits[0][1].is_floating_point() else []


def _match(box: BlackBox, name: str, result: Tensor | None, truth: Tensor) -> Match:
    before = {n: x for n, x in zip(box.names, box.leaves, strict=True) if isinstance(x, Tensor)}.get(name)
    if result is None:
        result = before
    assert result is not None
    value = result.detach().cpu().double()
    scale = scale_of(truth[truth.isfinite()]) if bool(truth.isfinite().any()) else 1.0
    if before is not None and before.shape == truth.shape:  # a step is judged by how far it goes
        start = before.detach().cpu().double()
        value, truth = value - start, truth - start
        floor = torch.finfo(before.dtype).eps * scale
        scale = max(scale_of(truth) if bool(truth.any()) else floor, floor)
    gap = difference(value, truth, absolute=0.0)
    lengths = float(value.norm() * truth.norm())
    cosine = float((value * truth).sum()) / lengths if lengths > 0 and math.isfinite(lengths) else 0.0
    evidence = f"{name} at {gap.place} is {gap.value.real:.6g}, {gap.reference.real:.6g}"
    error = gap.error / scale if math.isfinite(gap.error) else math.inf
    off = float((value - truth).norm() / truth.norm()) if bool(truth.any()) else error
    room = max(EXPLAINED, 8 * torch.finfo(_dtype_of(box)).eps) * scale
    share = float(((value - truth).abs() <= room).double().mean()) if truth.numel() else 1.0
    return Match(error, off, cosine, share, name, evidence)


def _points(box: BlackBox) -> list[BlackBox]:
    """The arguments as given, and others: a weight of ones hides that it is left out."""
    return [box, box.with_leaves(shaken(box, 50))]


def _best(box: BlackBox, formulas: list[Formula]) -> tuple[Formula, Match] | None:
    """The formula that is nearest to what the kernel gives, at both points."""
    asked = [(point, answer) for point in _points(box) if not (answer := point.ask()).refused]
    found = []
    for formula in formulas:
        matches = [_matched(point, answer, formula) for point, answer in asked]
        if matches and all(match is not None for match in matches):
            worst = max(matches, key=lambda m: m.error if m else 0.0)
            assert worst is not None
            found.append((formula, worst))
    return min(found, key=lambda pair: pair[1].error) if found else None


def _explained(
    box: BlackBox, readings: list, nearest: tuple[Formula, Match] | None
) -> tuple[str, Match] | None:
    """The mistake whose formula gives what the kernel gives."""
    for words, formula in readings:
        found = _best(box, [formula]) if words else None
        if found is not None and found[1].error <= EXPLAINED:
            return words, (nearest or found)[1]
    return None


def _precision(box: BlackBox, book: Textbook, formula: Formula) -> Iterator[Fault]:
    """As near to the formula as the dtype allows: at these numbers, beside large ones, and for large exponents."""
    for point in _points(box):
        answer = point.ask()
        match = _matched(point, answer, formula)
        if match is None:
            continue
        allowed = _allowed(point, formula)
        if not match.error <= allowed:
            yield Fault("precision", *_too_coarse(box, book, match, allowed))
            return
    if book.hard is not None:
        yield from _small_addends(box, book, formula)
    if book.exponentials:
        yield from _large_exponents(box, book, formula)


def _allowed(box: BlackBox, formula: Formula) -> float:
    """Relative to the typical result: eight times PyTorch's own rounding, or a walk over all numbers."""
    dtype = _dtype_of(box)
    eps = torch.finfo(dtype).eps
    walk = 8 * eps * math.sqrt(max((box.leaves[k].numel() for k in box.floats), default=1))
    try:
        exact, own = formula(call_of(box, torch.float64)), formula(call_of(box, dtype))
    except RuntimeError:
        return walk
    if isinstance(
        exact, dict
    ):  # steps are judged by how far they go, and rounded as far as the numbers are large
        named = dict(zip(box.names, box.leaves, strict=True))
        starts = {n: named[n].cpu().double() for n in exact}
        return walk + 16 * eps * max(scale_of(starts[n]) / scale_of(t - starts[n]) for n, t in exact.items())
    off = (own.double() - exact).abs()
    return max(walk, 8 * float(off.nan_to_num(0.0).max()) / scale_of(exact)) if off.numel() else walk


def _too_coarse(box: BlackBox, book: Textbook, match: Match, allowed: float) -> tuple[str, str]:
    dtype = str(_dtype_of(box)).removeprefix("torch.")
    bits = max(1, math.floor(-math.log2(max(match.off, 1e-30))))
    near = next((f", as if something inside were {name}" for n, name in NAMED_BITS if bits in n), "")
    if not math.isfinite(match.error):
        return f"{box.name} is not finite where {book.name} is", f"{match.evidence} by {book.name} in float64"
    return (
        f"{box.name} is {book.name} to {bits} bits only{near}, though it is called with {dtype}",
        f"{match.evidence} in float64: {match.error:.1e} of the typical result off, {allowed:.1e} allowed",
    )


def _small_addends(box: BlackBox, book: Textbook, formula: Formula) -> Iterator[Fault]:
    assert book.hard is not None
    order = order_of(box)
    leaves = list(box.leaves)
    for k, x in zip(order, book.hard([box.leaves[k] for k in order]), strict=True):
        leaves[k] = x
    hard = box.with_leaves(leaves)
    answer = hard.ask()
    pairs = [] if answer.refused else _paired(answer, formula(call_of(hard, torch.float64)))
    count = max(hard.leaves[order[0]].shape)
    # sums of positive numbers in any order: half a rounding of the whole for each addend
    relative = 4 * torch.finfo(_dtype_of(box)).eps + 2 * count * torch.finfo(torch.float32).eps
    for name, result, truth in pairs:
        allowed = max(relative * float(truth.abs().max()), _allowed(hard, formula) * scale_of(truth))
        gap = difference(result.cpu(), truth, absolute=allowed)
        if not gap.ok:
            yield Fault(
                "precision",
                f"{box.name} loses small addends beside a large one",
                f"1 and {count - 1} times {SMALL:.1e} are to be added: {name} is {gap.value.real:.6g}, "
                f"{gap.reference.real:.6g} by {book.name} in float64, {gap.error:.1e} off, {gap.allowed:.1e} allowed",
            )


def _large_exponents(box: BlackBox, book: Textbook, formula: Formula) -> Iterator[Fault]:
    order = order_of(box)
    leaves = list(box.leaves)
    x = leaves[order[0]]
    generator = torch.Generator().manual_seed(6)
    leaves[order[0]] = (LARGE * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(x)
    wide = box.with_leaves(leaves)
    answer = wide.ask()
    if answer.refused:
        return
    for name, result, truth in _paired(answer, formula(call_of(wide, torch.float64))):
        bad = ~result.cpu().isfinite() & truth.isfinite() & (truth.abs() < 1e30)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            yield Fault(
                "claim",
                f"{box.name} overflows for entries of ±{3 * LARGE:.0f}: the largest of a row is not subtracted first",
                f"{name} at {place} is {result[place].item():.6g}, {truth[place].item():.6g} by {book.name}",
            )
