"""Once a gradient is known to be wrong: which entries, both numbers at the worst, and the pattern in them.

Small inputs are measured entry by entry. Large ones are cut into slices along each axis, halved where they
are wrong, and a sample of entries is measured where the wrong slices cross.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradproof.check.pattern import Evidence, describe_places, describe_relation
from gradproof.check.slope import Line, Slope, measure, measure_once
from gradproof.check.subject import Subject
from gradproof.numerics.difference import difference

SECONDS = 8.0  # what finding the culprit may take
SAMPLE = 48  # entries measured where the wrong slices of a large input cross


@dataclass(frozen=True)
class Culprit:
    """The wrong entries of one input's gradient."""

    input: str
    place: tuple[int, ...] | None  # None: seen along lines, while single entries drown in noise
    backward: float
    truth: float
    error: float  # relative, at the worst place
    allowed: float
    wrong: int
    total: int  # entries that were measured
    sampled: bool
    places: str | None
    relation: str | None
    method: str


@dataclass(frozen=True)
class Claim:
    """A subject at a point, with the gradients that its backward gives for some incoming gradient."""

    subject: Subject
    point: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]  # zeros where backward gave none
    grain: float | None = None  # of the function, once they are known
    noise: float = 0.0

    @property
    def is_fine(self) -> bool:
        """Whether inputs and outputs are float64, with nothing coarser known to be inside."""
        return not self.grain and all(x.dtype == torch.float64 for x in (*self.point, *self.cotangents))

    def natural(self, which: int) -> float:
        """The gradient entry that would change the outputs by their own size over the input's own scale."""
        x = self.point[which]
        return self.line(which, x).output_size / (scale_of(x) * math.sqrt(x.numel()))

    def line(self, which: int, direction: Tensor) -> Line:
        directions: list[Tensor | None] = [None] * len(self.point)
        directions[which] = direction
        return Line(
            self.subject, self.point, directions, self.cotangents, self.gradients, self.grain, self.noise
        )


def scale_of(x: Tensor) -> float:
    """The typical size of an input's entries: what a step of 1 means for it."""
    size = float(x.double().square().mean().sqrt())
    return size if size > 0 else 1.0


def find_culprit(claim: Claim, which: int) -> Culprit | None:
    """The wrong entries of input `which`, or None where entry by entry nothing is wrong."""
    claim, given = _with_finite_gradients(claim), claim.gradients[which]
    affordable = _affordable_lines(claim, which)
    x = claim.point[which]
    if x.numel() <= affordable:
        places = torch.ones(x.shape).nonzero()  # every place; one without coordinates if x is a scalar
        return _culprit(claim, which, given, places, None)
    slices = tuple(_wrong_slices(claim, which, axis, affordable // x.dim()) for axis in range(x.dim()))
    if not all(slices):
        return None
    return _culprit(claim, which, given, _sampled_places(slices), slices)


def _affordable_lines(claim: Claim, which: int) -> int:
    line = claim.line(which, torch.zeros_like(claim.point[which]))
    seconds = []
    for _ in range(3):  # the first one warms up
        start = time.perf_counter()
        line.excess(1e-3)
        seconds.append(time.perf_counter() - start)
    return max(int(SECONDS / (min(seconds) * (2 if claim.is_fine else 30))), 16 * claim.point[which].dim())


def _with_finite_gradients(claim: Claim) -> Claim:
    """Zero for NaN and inf, so that a truth can be measured where they stand."""
    return replace(claim, gradients=tuple(g.nan_to_num(0.0, 0.0, 0.0) for g in claim.gradients))


def _culprit(
    claim: Claim, which: int, given: Tensor, places: Tensor, slices: tuple[tuple[int, ...], ...] | None
) -> Culprit | None:
    gradient, x = given.double(), claim.point[which]
    scale = scale_of(x)
    typical = float(claim.gradients[which].double().square().mean().sqrt())
    slopes = [_measure_entry(claim, which, tuple(place), scale, scale * typical) for place in places.tolist()]
    truth = torch.tensor([(s.claimed + s.excess) / scale for s in slopes], dtype=torch.float64)
    allowed = torch.tensor([s.allowed / scale for s in slopes], dtype=torch.float64)
    claims = gradient.cpu()[tuple(places.T)] if x.dim() else gradient.cpu().reshape(1)
    unknown = ~torch.isfinite(truth) & torch.isfinite(claims)  # nothing could be measured there
    truth, allowed = torch.where(unknown, claims, truth), allowed.nan_to_num(0.0, 1e300)
    apart = difference(claims, truth, absolute=allowed)
    if apart.ok:
        return None
    worst = apart.place[0]
    wrong = ~((claims - truth).abs() <= allowed)
    mask = wrong.reshape(x.shape) if slices is None else None
    evidence = Evidence(
        gradient.cpu(), places, truth, wrong, mask, slices, x.cpu(),
        _incoming(claim, which), _rivals(claim, which), tuple((n, o.cpu()) for n, o in claim.subject.others),
        _sizes(claim, which),
    )  # fmt: skip
    unit = _unit(claim)
    backward, truth_there = float(claims[worst]), float(truth[worst])
    # relative to the truth, or to the claim where the truth is nothing
    size = abs(truth_there) if abs(truth_there) > apart.allowed else abs(backward)
    return Culprit(
        input=claim.subject.input_names[which],
        place=tuple(places[worst].tolist()),
        backward=backward / unit,
        truth=truth_there / unit,
        error=abs(backward - truth_there) / size,
        allowed=apart.allowed / size,
        wrong=apart.disagree,
        total=apart.total,
        sampled=slices is not None,
        places=describe_places(evidence),
        relation=_ignores_incoming(claim, which) or describe_relation(evidence),
        method=slopes[worst].method,
    )


def steepest_direction(claim: Claim, which: int) -> Tensor:
    """Along the claimed gradient, where the function changes most: the clearest line for a noisy function."""
    g = claim.gradients[which].double()
    return (scale_of(claim.point[which]) * g / scale_of(g)).to(claim.point[which].dtype)


def find_culprit_along_lines(claim: Claim, which: int) -> Culprit | None:
    """For functions whose single entries drown in noise: wrong if at least two more lines out of four are."""
    x = claim.point[which]
    directions = [steepest_direction(claim, which)]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        directions.append(scale_of(x) * torch.randn(x.shape, generator=generator).to(x))
    measured = [measure(claim.line(which, direction)) for direction in directions]
    slopes = [slope for slope in measured if not slope.agrees]
    if len(slopes) < 2:
        return None
    worst = max(slopes, key=lambda slope: slope.error)
    backward, truth = worst.claimed / _unit(claim), (worst.claimed + worst.excess) / _unit(claim)
    return Culprit(
        claim.subject.input_names[which], None, backward, truth, worst.error, worst.resolution,
        len(slopes), len(measured), True, None, None, worst.method,
    )  # fmt: skip


def _unit(claim: Claim) -> float:
    """A scalar output was weighted with a number other than 1; messages speak of its plain gradient."""
    weights = claim.cotangents
    return float(weights[0]) if len(weights) == 1 and weights[0].numel() == 1 else 1.0


def _measure_entry(claim: Claim, which: int, place: tuple[int, ...], scale: float, floor: float) -> Slope:
    direction = torch.zeros_like(claim.point[which])
    direction[place] = scale
    return measure_once(claim.line(which, direction), floor)


def _ignores_incoming(claim: Claim, which: int) -> str | None:
    """A backward is linear in the incoming gradient; one that answers twice as much alike has ignored it."""
    gradient = claim.gradients[which]
    doubled = claim.subject.gradients(claim.point, [2 * w for w in claim.cotangents])[which]
    if doubled is None or not gradient.any() or not difference(doubled, gradient).ok:
        return None
    return "backward ignores the incoming gradient: it answers the same to twice as much of it"


def _incoming(claim: Claim, which: int) -> Tensor | None:
    shape = claim.point[which].shape
    same = [w for w in claim.cotangents if w.shape == shape]
    return same[0].cpu() if len(same) == 1 and shape else None


def _rivals(claim: Claim, which: int) -> tuple[tuple[str, Tensor], ...]:
    x = claim.point[which]
    pairs = zip(claim.subject.input_names, claim.gradients, strict=True)
    return tuple(
        (name, g.double().cpu()) for k, (name, g) in enumerate(pairs) if k != which and g.shape == x.shape
    )


def _sizes(claim: Claim, which: int) -> tuple[tuple[int, str], ...]:
    """Every axis that a factor may have come from, this input's own first."""
    inputs = list(zip(claim.subject.input_names, claim.point, strict=True))
    tensors = [inputs[which], *inputs, *((f"output {k}", w) for k, w in enumerate(claim.cotangents))]
    return tuple((size, f"axis {axis} of {name}") for name, x in tensors for axis, size in enumerate(x.shape))


def _wrong_slices(claim: Claim, which: int, axis: int, affordable: int) -> tuple[int, ...]:
    """Indices along an axis whose slices are wrong: blocks are halved while more lines can be afforded."""
    size = claim.point[which].shape[axis]
    blocks = [(0, size)]
    while any(stop - start > 1 for start, stop in blocks) and 2 * len(blocks) <= affordable:
        halves = [half for block in blocks for half in _halves(*block)]
        affordable -= len(halves)
        blocks = [block for block in halves if not _slice_agrees(claim, which, axis, block)]
    return tuple(i for start, stop in blocks for i in range(start, stop))


def _halves(start: int, stop: int) -> list[tuple[int, int]]:
    middle = (start + stop) // 2
    return [(start, middle), (middle, stop)] if stop - start > 1 else [(start, stop)]


def _slice_agrees(claim: Claim, which: int, axis: int, block: tuple[int, int]) -> bool:
    x = claim.point[which]
    inside = (slice(None),) * axis + (slice(*block),)
    generator = torch.Generator().manual_seed(block[0])
    direction = torch.zeros_like(x)
    part = direction[inside]
    direction[inside] = scale_of(x) * torch.randn(part.shape, generator=generator).to(x)
    return measure_once(claim.line(which, direction), floor=0.0).agrees


def _sampled_places(slices: Sequence[Sequence[int]]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    columns = [
        torch.tensor(found)[torch.randint(len(found), (SAMPLE,), generator=generator)] for found in slices
    ]
    return torch.stack(columns, 1).unique(dim=0)
