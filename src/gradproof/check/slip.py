"""What is wrong with a gradient (or any tensor) whose right numbers are all known, in words.

A slip is a function from the case to words, or None; SLIPS is the list of them, most telling first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradproof.check.pattern import Evidence, describe_places, describe_relation

FEW = 4_000_000  # entries up to which places are described one by one


@dataclass(frozen=True)
class Allowance:
    """How far apart two right computations may be: at the worst entry, and as a whole."""

    largest: float
    norm: float

    def admits(self, apart: Tensor, times: float = 1.0) -> bool:
        if not apart.numel():
            return True
        return bool(apart.abs().max() <= times * self.largest) and bool(apart.norm() <= times * self.norm)


@dataclass(frozen=True)
class Size:
    """A number that a factor may be: B, T, the size of an axis."""

    value: int
    symbol: str
    words: str


@dataclass(frozen=True)
class Case:
    """A tensor as it was computed by hand, the right one, and what stands around them."""

    name: str
    hand: Tensor  # float64
    dtype: torch.dtype  # that it was computed in
    truth: Tensor  # float64, of the same shape
    allowed: Allowance
    kind: str = "gradient"
    before: Tensor | None = None  # the same by hand in the step before
    truths: dict[str, Tensor] = field(default_factory=dict)  # of others
    hands: dict[str, Tensor] = field(default_factory=dict)
    sizes: tuple[Size, ...] = ()
    others: tuple[tuple[str, Tensor], ...] = ()  # integer inputs: tokens, targets

    @property
    def right(self) -> bool:
        return self.allowed.admits(self.hand - self.truth)

    @property
    def wrong(self) -> Tensor:
        return ~((self.hand - self.truth).abs() <= self.allowed.largest)

    @property
    def evidence(self) -> Evidence:
        """The same as `pattern` has it."""
        measured = torch.ones(self.truth.shape).nonzero()
        wrong = self.wrong
        return Evidence(
            self.hand, measured, self.truth.reshape(-1), wrong.reshape(-1), wrong, None, self.truth, None, (),
            self.others, (),
        )  # fmt: skip

    def is_(self, candidate: Tensor) -> bool:
        """Whether the hand's numbers are these, and these are not the right ones anyway."""
        if candidate.shape != self.hand.shape or not bool(torch.isfinite(candidate).all()):
            return False
        times = max(1.0, float(candidate.norm() / self.truth.norm().clamp_min(1e-300)))
        times = times if math.isfinite(times) and times < 1e6 else 1.0
        far = not self.allowed.admits(candidate - self.truth, 4.0)
        return far and self.allowed.admits(self.hand - candidate, times)


# ---- nothing, or nothing that anybody computed


def not_finite(c: Case) -> str | None:
    bad = ~torch.isfinite(c.hand)
    if not bool(bad.any()):
        return None
    what = "NaN" if bool(torch.isnan(c.hand).any()) else "inf"
    if bool(bad.all()):
        return f"not finite: {what} in every entry, never written or made from another NaN"
    rest = torch.where(bad, c.truth, c.hand)
    if not c.allowed.admits(rest - c.truth):
        return f"not finite: {what} in {int(bad.sum())} of {bad.numel()} entries"
    where = describe_places(c.evidence) if bad.numel() <= FEW else None
    where = f" ({where})" if where else ""
    return f"never written in {int(bad.sum())} of {bad.numel()} entries{where}: {what} there, right elsewhere"


def zero(c: Case) -> str | None:
    if bool((c.hand == 0).all()):
        return "zero: every entry is 0, as if its backward were never called" if c.kind == "gradient" else (
            "zero: every entry is 0, as if it were never computed"
        )  # fmt: skip
    return None


def one_number(c: Case) -> str | None:
    if c.hand.numel() > 3 and bool((c.hand == c.hand.reshape(-1)[0]).all()):
        return f"never written: every entry is {float(c.hand.reshape(-1)[0]):.4g}, what it was filled with"
    return None


def garbage(c: Case) -> str | None:
    """Subnormal or absurdly large numbers: memory that nobody filled."""
    info = torch.finfo(c.dtype)
    size = c.hand.abs()
    tiny = (size > 0) & (size < info.tiny) & c.wrong
    huge = size > 1e12 * c.truth.abs().max().clamp_min(1e-12)
    strange = tiny | huge
    if not bool(strange.any()):
        return None
    example = float(c.hand[strange].reshape(-1)[0])
    return (
        f"never written: {int(strange.sum())} of {strange.numel()} entries are numbers like {example:.2g}, "
        "what memory holds before anything is stored in it"
    )


def beside_zeros(c: Case) -> str | None:
    """Wrong only where the truth is exactly zero: added to what was there."""
    none = c.truth == 0
    if not bool(none.any()) or bool(none.all()) or not bool((none | ~c.wrong).all()):
        return None
    return (
        f"not cleared: right where there is a {c.kind}, and {int(c.wrong.sum())} entries are not 0 that have none "
        "(memory that was not zeroed before it was added to)"
    )


# ---- the right numbers, or others' numbers, in another form


def factor(c: Case) -> str | None:
    scale = float((c.truth * c.truth).sum())
    if scale == 0 or not bool(torch.isfinite(c.hand).all()):
        return None
    times = float((c.hand * c.truth).sum()) / scale
    if not times or not c.allowed.admits(c.hand - times * c.truth, max(1.0, abs(times))):
        return None
    blur = 2 * c.allowed.norm / math.sqrt(scale)
    return name_factor(times, c.sizes, blur, c.kind)


def name_factor(times: float, sizes: Sequence[Size], blur: float = 0.0, kind: str = "gradient") -> str:
    """`factor 0.125 = 1/B (8 samples): divided by it once too often`."""

    def near(value: float) -> bool:
        return abs(times / value - 1) <= min(max(2e-3, blur), 0.05)

    if near(-1.0):
        return f"sign: it is minus the {kind}"
    sign = "the wrong sign and " if times < 0 else ""
    times = abs(times)
    found: list[str] = []
    for size in sizes:
        if size.value > 1 and near(size.value):
            found.append(f"{size.symbol} ({size.words}): a sum where a mean belongs")
        elif size.value > 1 and near(1 / size.value):
            found.append(f"1/{size.symbol} ({size.words}): a mean where a sum belongs, or divided twice")
    if near(2.0):
        found.append("accumulated twice, or a 2 too many")
    if near(0.5):
        found.append("half of it is missing, as the 2 of a square")
    for size in () if found else sizes:
        if size.value > 2 and near(math.sqrt(size.value)):
            found.append(f"√{size.symbol} ({size.words}): a scale left out")
        elif size.value > 2 and near(1 / math.sqrt(size.value)):
            found.append(f"1/√{size.symbol} ({size.words}): scaled twice")
    if near(math.log2(math.e)):
        found.append("in bits, not in nats")
    said = f"{sign}factor {times:.4g}"
    return f"{said} = {'; or '.join(found[:3])}" if found else said


def stale(c: Case) -> str | None:
    if c.before is not None and c.before.shape == c.hand.shape and torch.equal(c.before, c.hand):
        return f"stale: equal to that of the step before; this step's {c.kind} was never written"
    return None


def not_cleared(c: Case) -> str | None:
    """The step before is still in it, everywhere or where it is wrong."""
    if c.before is None or c.before.shape != c.hand.shape or not bool(c.before.any()):
        return None
    if c.is_(c.truth + c.before):
        return "accumulated: the step before is still in it; it was not cleared"
    if c.is_(torch.where(c.wrong, c.truth + c.before, c.truth)):
        where = describe_places(c.evidence) if c.wrong.numel() <= FEW else None
        count = f"{int(c.wrong.sum())} of {c.wrong.numel()} entries{f' ({where})' if where else ''}"
        return f"accumulated: the step before is still in {count}; they were not cleared"
    return None


def of_another(c: Case) -> str | None:
    for name, other in c.truths.items():
        if name != c.name and c.is_(other):
            if name in c.hands and replace(c, hand=c.hands[name]).right:
                return f"exchanged: it holds the {c.kind} of {name}, and {name} holds this one"
            return f"it holds the {c.kind} of {name}"
    return None


def transposed(c: Case) -> str | None:
    for a in range(c.hand.dim()):
        for b in range(a + 1, c.hand.dim()):
            if c.hand.shape[a] == c.hand.shape[b]:
                if c.is_(c.truth.transpose(a, b)):
                    return f"transposed: axes {a} and {b} are swapped"
            elif c.is_(c.truth.transpose(a, b).reshape(c.hand.shape)):
                return f"transposed: written with axes {a} and {b} swapped"
    return None


def in_part(c: Case) -> str | None:
    """Right but for some places, where it is zero."""
    wrong = c.wrong
    if not bool(wrong.any()) or bool(wrong.all()) or wrong.numel() > FEW:
        return None
    where = describe_places(c.evidence)
    if where is None or where.startswith("every entry"):
        return None
    count = f"{int(wrong.sum())} of {wrong.numel()} entries ({where})"
    if bool((c.hand[wrong] == 0).all()):
        return f"never written in {count}: 0 there, right elsewhere"
    return None


def one_sample(c: Case) -> str | None:
    """Every sample holds what one sample should: the index of the batch is missing."""
    if c.kind != "activation" or c.hand.dim() < 2 or c.hand.shape[0] < 2:
        return None
    for k, words in ((0, "sample 0"), (c.hand.shape[0] - 1, "the last sample")):
        if c.is_(c.truth[k : k + 1].expand_as(c.truth)):
            return f"the batch index is missing: every sample holds the numbers of {words}"
    if c.is_(torch.cat((c.truth[:1], torch.zeros_like(c.truth[1:])))):
        return "the batch index is missing: only sample 0 was computed, the others are 0"
    return None


def other_relation(c: Case) -> str | None:
    if c.hand.numel() > FEW or not bool(c.wrong.any()):
        return None
    words, where = describe_relation(c.evidence), describe_places(c.evidence)
    count = f"wrong in {int(c.wrong.sum())} of {c.wrong.numel()} entries"
    if words or (where and not where.startswith("every entry")):
        return f"{count}{f' ({where})' if where else ''}{f': {words}' if words else ''}"
    return None


SLIPS = (
    zero, stale, not_finite, one_number, garbage, factor, not_cleared, one_sample, of_another, transposed,
    beside_zeros, in_part,
)  # fmt: skip


def describe_slip(case: Case) -> str | None:
    """The pattern of a wrong tensor in words, or None where none fits."""
    return next((words for slip in SLIPS if (words := slip(case))), None)
