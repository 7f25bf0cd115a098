"""What a wrong gradient's errors have in common: where they are, and how they relate to the right numbers.

A pattern is a function from the evidence to a phrase, or None; the two tuples at the end are the lists, most
telling first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

EQUAL = 0.02  # numbers this near, relative to the error that they are to explain, are the same number


@dataclass(frozen=True)
class Evidence:
    """A claimed gradient, and the truth at the entries that were measured."""

    claimed: Tensor  # float64, every entry
    measured: Tensor  # (m, dims) places of the measured entries
    truth: Tensor  # (m,)
    wrong: Tensor  # (m,) boolean
    mask: Tensor | None  # boolean, every entry: which are wrong; None where only a sample was measured
    slices: tuple[tuple[int, ...], ...] | None  # where sampled: for each axis, the indices with wrong entries
    x: Tensor  # the input itself
    incoming: Tensor | None  # the gradient that backward was given, where it has the input's shape
    rivals: tuple[tuple[str, Tensor], ...]  # gradients claimed for other inputs of the same shape
    others: tuple[tuple[str, Tensor], ...]  # integer and boolean inputs
    sizes: tuple[tuple[int, str], ...]  # of all axes around, with words for them

    def at_measured(self, values: Tensor) -> Tensor:
        return values[tuple(self.measured.T)] if values.dim() else values.reshape(1)

    @property
    def claims(self) -> Tensor:
        return self.at_measured(self.claimed)


Phrase: TypeAlias = "str | None"


# ---- how the wrong numbers relate to the right ones


def nothing(e: Evidence) -> Phrase:
    """Backward says zero where there is a gradient."""
    if bool((e.claims[e.wrong] == 0).all()):
        return "backward says zero there: a term or a whole path is missing"
    return None


def not_finite(e: Evidence) -> Phrase:
    bad = ~torch.isfinite(e.claims[e.wrong])
    return "backward is not finite there" if bool(bad.all()) else None


def constant_factor(e: Evidence) -> Phrase:
    """The same factor everywhere: a sign, a missing 2, a mean for a sum."""
    claims, truth = e.claims[e.wrong], e.truth[e.wrong]
    large = truth.abs() >= 1e-3 * truth.abs().max()
    if int(large.sum()) < 2 and e.truth.numel() > 1:
        return None
    ratio = claims[large] / truth[large]
    factor = float(ratio.median())
    if not bool(((ratio - factor).abs() <= EQUAL * abs(factor - 1)).all()):
        return None
    if abs(factor + 1) < 1e-3:
        return "the sign is wrong"
    return f"a factor {_short(factor)}{_as_size(factor, e.sizes)}"


def _short(factor: float) -> str:
    if abs(factor - 1) < 0.05 or not 0.01 < abs(factor) < 100:
        return f"{factor:.4g}"
    return f"{factor:.3f}"


def _as_size(factor: float, sizes: Sequence[tuple[int, str]]) -> str:
    """Says so where the factor is the size of an axis, or one over it: a sum for a mean, or the reverse."""
    for size, words in sizes:
        if size > 1 and abs(factor / size - 1) < 1e-3:
            return f", the size of {words}: a sum where a mean belongs"
        if size > 1 and abs(factor * size - 1) < 1e-3:
            return f", one over the size of {words}: a mean where a sum belongs"
    return ""


def transposed(e: Evidence) -> Phrase:
    for a in range(e.claimed.dim()):
        for b in range(a + 1, e.claimed.dim()):
            if e.claimed.shape[a] == e.claimed.shape[b] and _explains(e, e.claimed.transpose(a, b)):
                return f"it is transposed (axes {a} and {b} are swapped)"
            flipped = _reread(e.claimed, a, b)
            if e.claimed.shape[a] != e.claimed.shape[b] and _explains(e, flipped):
                return f"it is transposed: a view where a transpose of axes {a} and {b} belongs"
    return None


def _reread(claimed: Tensor, a: int, b: int) -> Tensor:
    """The numbers as they would lie if they had been written with axes a and b swapped."""
    shape = list(claimed.shape)
    shape[a], shape[b] = shape[b], shape[a]
    return claimed.reshape(shape).transpose(a, b)


def shifted(e: Evidence) -> Phrase:
    for axis, size in enumerate(e.claimed.shape):
        for by in (1, -1, 2, -2):
            if size > abs(by) + 1 and _explains(e, e.claimed.roll(-by, axis), skip_edge=(axis, by)):
                return f"it is shifted by {by:+d} along {_axis(axis, e.claimed.dim())}"
    return None


def reversed_(e: Evidence) -> Phrase:
    for axis, size in enumerate(e.claimed.shape):
        if size > 1 and _explains(e, e.claimed.flip(axis)):
            return f"it is reversed along {_axis(axis, e.claimed.dim())}"
    return None


def swapped(e: Evidence) -> Phrase:
    for name, rival in e.rivals:
        if _explains(e, rival):
            return f"the right numbers stand in the gradient of {name}: the two are swapped"
    return None


def _explains(e: Evidence, candidate: Tensor, skip_edge: tuple[int, int] | None = None) -> bool:
    """Whether `candidate` is right wherever something was measured."""
    keep = torch.ones_like(e.wrong)
    if skip_edge is not None:  # a shift loses its last |by| entries; what stands there is anyone's guess
        axis, by = skip_edge
        along, size = e.measured[:, axis], e.claimed.shape[axis]
        keep = along < size - by if by > 0 else along >= -by
    error = (e.at_measured(candidate) - e.truth).abs()[keep]
    typical = (e.claims - e.truth).abs()[e.wrong].median()
    return bool(keep.any()) and bool((error <= EQUAL * typical).all())


def incoming_gradient(e: Evidence) -> Phrase:
    """The error is a multiple of the gradient that came in: a skip connection, or a pass-through."""
    if e.incoming is None:
        return None
    incoming = e.at_measured(e.incoming.double())
    if _proportional(e.claims, incoming) == 1.0:
        return "backward passes the incoming gradient through unchanged"
    times = _proportional(e.claims - e.truth, incoming)
    return (
        f"it is off by {times:+.3g} times the incoming gradient, as if a skip path were miscounted"
        if times
        else None
    )


def _proportional(values: Tensor, to: Tensor) -> float:
    """The c for which values = c · to, rounded to four digits, or 0."""
    c = float((values * to).sum() / (to * to).sum().clamp_min(1e-300))
    near = bool(((values - c * to).abs() <= EQUAL * values.abs().median()).all())
    return float(f"{c:.4g}") if near and values.numel() > 2 else 0.0


def offset(e: Evidence) -> Phrase:
    """The same number too much everywhere, or in each row: a mean that was not subtracted."""
    if e.mask is None or e.claimed.numel() < 4:
        return None
    error = (e.claimed - _everywhere(e, e.truth)).reshape(e.claimed.shape)
    worst = error.abs().max()
    if bool(((error - error.mean()).abs() <= EQUAL * worst).all()):
        return f"it is off by the same {float(error.mean()):+.3g} everywhere"
    for axis, size in reversed(list(enumerate(error.shape))):
        spread = (error - error.mean(axis, keepdim=True)).abs()
        if size > 1 and bool((spread <= EQUAL * worst).all()):
            axis_name = _axis(axis, error.dim())
            return f"the error is constant along {axis_name}: a term summed over it is missing or wrong"
    return None


def factor_per_index(e: Evidence) -> Phrase:
    """A factor that changes along one axis only: a scale that was left out or taken from elsewhere."""
    if e.mask is None or e.claimed.dim() < 2:
        return None
    truth = _everywhere(e, e.truth)
    large = truth.abs() >= 1e-3 * truth.abs().max()
    ratio = torch.where(large, e.claimed / truth, torch.nan)
    typical = (ratio - 1).abs().nanmedian()
    for axis, size in enumerate(ratio.shape):
        rest = [a for a in range(ratio.dim()) if a != axis]
        if size < 2 or max(ratio.shape[a] for a in rest) < 2:
            continue
        flat = ratio.movedim(axis, 0).reshape(size, -1)
        spread = (flat - flat.nanmedian(1, keepdim=True).values).abs().nan_to_num(0.0)
        if bool((spread <= EQUAL * typical).all()):
            return f"a factor that depends on the index along {_axis(axis, ratio.dim())} only"
    return None


def _everywhere(e: Evidence, values: Tensor) -> Tensor:
    full = torch.zeros_like(e.claimed)
    full[tuple(e.measured.T)] = values
    return full


# ---- where the wrong numbers are


def every_entry(e: Evidence) -> Phrase:
    if e.claimed.numel() < 2:
        return None
    if e.mask is None:
        return "every entry" if bool(e.wrong.all()) and _full_slices(e) else None
    if bool(e.mask.all()):
        return "every entry"
    alive = _everywhere(e, e.truth) != 0
    return "every entry that has a gradient" if int(alive.sum()) > 1 and torch.equal(e.mask, alive) else None


def _full_slices(e: Evidence) -> bool:
    return e.slices is not None and all(
        len(found) == size for found, size in zip(e.slices, e.claimed.shape, strict=True)
    )


def index_sets(e: Evidence) -> Phrase:
    """A block of rows, every second column, one entry: a product of index sets."""
    slices = e.slices if e.mask is None else _product(e.mask)
    return None if slices is None else _say_slices(slices, e.claimed.shape, "all in")


def all_but_index_sets(e: Evidence) -> Phrase:
    """Everything but a block: the border of an image."""
    if e.mask is None or bool(e.mask.all()):
        return None
    right = _product(~e.mask)
    said = None if right is None else _say_slices(right, e.claimed.shape, "everywhere except in")
    return said


def _product(mask: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Index sets, one an axis, whose product the mask is; None if it is not a product."""
    sets = []
    for axis in range(mask.dim()):
        along = mask.movedim(axis, 0).reshape(mask.shape[axis], -1).any(1)
        sets.append(tuple(along.nonzero().flatten().tolist()))
    size = 1
    for found in sets:
        size *= len(found)
    return tuple(sets) if size == int(mask.sum()) else None


def _say_slices(slices: Sequence[Sequence[int]], shape: Sequence[int], lead: str) -> Phrase:
    parts = [
        _say_indices(found, size, _axis(axis, len(shape)))
        for axis, (found, size) in enumerate(zip(slices, shape, strict=True))
        if len(found) < size
    ]
    if any(part is None for part in parts) or not parts:
        return None
    if len(parts) == len(shape) and all(len(found) == 1 for found in slices):
        place = ", ".join(str(found[0]) for found in slices)
        return f"only entry ({place}{',' if len(shape) == 1 else ''})" if lead == "all in" else None
    return f"{lead} {', '.join(str(part) for part in parts)}"


def _say_indices(found: Sequence[int], size: int, axis: str) -> Phrase:
    """rows 0 to 63, every second column from 1, row 7; a scatter is listed up to four."""
    kind = {"rows": "row", "columns": "column"}.get(axis)
    if len(found) == 1:
        last = " (the last)" if found[0] == size - 1 and size > 2 else ""
        return f"{kind} {found[0]}{last}" if kind else f"index {found[0]}{last} of {axis}"
    gaps = {b - a for a, b in pairwise(found)}
    if gaps == {1}:
        return f"{axis} {found[0]} to {found[-1]}" if kind else f"indices {found[0]} to {found[-1]} of {axis}"
    if len(gaps) == 1 and len(found) > 2:
        gap = gaps.pop()
        word = {2: "second", 3: "third", 4: "fourth"}.get(gap, f"{gap}th")
        return f"every {word} {kind or f'index of {axis}'} from {found[0]}"
    if len(found) <= 4:
        listed = ", ".join(map(str, found))
        return f"{axis} {listed}" if kind else f"indices {listed} of {axis}"
    return None


def triangle(e: Evidence) -> Phrase:
    """Above, below or on the diagonal of the last two axes: the places a causal mask speaks of."""
    if e.mask is None or e.claimed.dim() < 2 or min(e.claimed.shape[-2:]) < 2:
        return None
    ones = torch.ones_like(e.mask)
    named = (
        ("on the diagonal", ones.triu() & ones.tril()),
        ("above the diagonal: the masked positions of a causal attention", ones.triu(1)),
        ("below the diagonal", ones.tril(-1)),
        ("on and above the diagonal", ones.triu()),
        ("on and below the diagonal", ones.tril()),
        ("everywhere but on the diagonal", ones.triu(1) | ones.tril(-1)),
    )
    for words, region in named:
        if torch.equal(e.mask, region):
            return words
    return None


def by_other_input(e: Evidence) -> Phrase:
    """Where another input says so: masked positions, target entries, rows that an index names twice."""
    if e.mask is None:
        return None
    for name, other in e.others:
        for words, region in _regions(name, other, e.claimed.shape):
            if region.any() and not region.all() and torch.equal(e.mask, region.to(e.mask.device)):
                return words
    return None


def _regions(name: str, other: Tensor, shape: torch.Size) -> list[tuple[str, Tensor]]:
    found = []
    for aligned in _broadcasts(other, shape):
        if other.dtype == torch.bool:
            found += [
                (f"exactly where {name} is True", aligned),
                (f"exactly where {name} is False", ~aligned),
            ]
        else:
            found += [(f"exactly where {name} is {v}", aligned == v) for v in other.unique()[:16].tolist()]
    if other.dtype == torch.bool or not other.numel() or not shape:
        return found
    if other.shape == shape[:-1] and bool(((other >= 0) & (other < shape[-1])).all()):
        target = torch.zeros(shape, dtype=torch.bool, device=other.device)
        target.scatter_(-1, other.unsqueeze(-1).long(), True)
        found += [
            (f"only at the entry that {name} names in each row", target),
            (f"everywhere but at {name}", ~target),
        ]
    if bool(((other >= 0) & (other < shape[0])).all()):
        counts = torch.bincount(other.flatten().long(), minlength=shape[0])
        for words, rows in ((f"only in rows that {name} names more than once", counts > 1),
                            (f"only in rows that {name} names", counts > 0),
                            (f"only in rows that {name} names once", counts == 1)):  # fmt: skip
            found.append((words, rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)))
    return found


def _broadcasts(other: Tensor, shape: torch.Size) -> list[Tensor]:
    """How another input may lie over this one: from the right as broadcasting does, or from the left."""
    found = []
    for candidate in (other, other.reshape(*other.shape, *[1] * max(len(shape) - other.dim(), 0))):
        try:
            found.append(candidate.expand(shape))
        except RuntimeError:
            continue
    return found


def by_value(e: Evidence) -> Phrase:
    """Where the input itself is negative, positive, zero or beyond a threshold."""
    if e.mask is None or min(int(e.mask.sum()), int((~e.mask).sum())) < 3:
        return None
    x, mask = e.x.double(), e.mask
    if torch.equal(mask, x == 0):
        return "exactly where the input is 0"
    for words, values in (("the input", x), ("|input|", x.abs())):
        for sign, low, high in (
            (">", values[~mask].max(), values[mask].min()),
            ("<", values[mask].max(), values[~mask].min()),
        ):
            if bool(low < high):
                if words == "the input" and low <= 0 <= high:
                    return f"exactly where the input is {'positive' if sign == '>' else 'negative'}"
                return f"exactly where {words} {sign} {float(low + high) / 2:.3g}"
    return None


def _axis(axis: int, dims: int) -> str:
    return ("rows", "columns")[axis] if dims == 2 else f"axis {axis}"


RELATIONS = (
    not_finite, nothing, constant_factor, swapped, transposed, shifted, reversed_, incoming_gradient, offset,
    factor_per_index,
)  # fmt: skip
PLACES = (every_entry, triangle, by_other_input, index_sets, by_value, all_but_index_sets)


def describe_places(e: Evidence) -> Phrase:
    return next((words for pattern in PLACES if (words := pattern(e))), None)


def describe_relation(e: Evidence) -> Phrase:
    return next((words for pattern in RELATIONS if (words := pattern(e))), None)
