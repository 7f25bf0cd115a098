"""The slope of a function along a line, with an error bar, as an excess over what its backward claims.

Central differences at falling steps, extrapolated (Richardson), the best of the table chosen by its own error
estimate plus the function's measured noise (Ridders 1982). Three details carry the accuracy:
outputs are subtracted before they are summed, so what did not change contributes exactly nothing;
the step that was really taken, after rounding, is what the claimed gradient is multiplied with;
and steps at which the function is not finite are left out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gradproof.check.subject import Subject, like_layout

RATIO = 4.0  # between one step and the next
FIRST_STEPS = tuple(1e-3 / RATIO**k for k in range(7))  # the second usually decides; the last avoid kinks
COMPLEX_STEP = 1e-20  # nothing is subtracted, so nothing is lost however small it is
NOISE_SAMPLES = 4


@dataclass(frozen=True)
class Slope:
    """How much steeper the function is along a line than its backward says."""

    excess: float
    claimed: float
    uncertainty: float  # of the excess: what extrapolation and noise leave open
    scale: float  # typical size of the claimed slope along such a line, free of cancellation
    tolerance: float  # relative to scale: what the gradient's own rounding may be
    method: str

    @property
    def allowed(self) -> float:
        return self.tolerance * self.scale + 4 * self.uncertainty

    @property
    def agrees(self) -> bool:
        return abs(self.excess) <= self.allowed

    @property
    def error(self) -> float:
        """Relative to the scale, or to the measured slope where backward claims less."""
        return _ratio(abs(self.excess), self._size)

    @property
    def resolution(self) -> float:
        """The smallest relative error that this measurement can tell."""
        return _ratio(self.allowed, self._size)

    @property
    def _size(self) -> float:
        return max(self.scale, abs(self.claimed + self.excess))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.inf if part else 0.0)


def tolerance_of(dtype: torch.dtype) -> float:
    """What a right gradient may be off: by central differences in float64, by a few roundings elsewhere."""
    eps = torch.finfo(dtype).eps
    return 100 * eps ** (2 / 3) if dtype == torch.float64 else 8 * eps


@dataclass(frozen=True)
class Line:
    """A point, a direction through it (None: this input stays), and the gradient claimed there."""

    subject: Subject
    point: Sequence[Tensor]
    direction: Sequence[Tensor | None]
    cotangents: Sequence[Tensor]
    claimed: Sequence[Tensor | None]

    @property
    def dtype(self) -> torch.dtype:
        return self.subject.dtype

    def at(self, step: float) -> list[Tensor]:
        """The inputs `step` along the direction, in their own dtype and layout."""
        return [
            x if v is None else _moved(x, v, step) for x, v in zip(self.point, self.direction, strict=True)
        ]

    def change(self, high: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        """How far the weighted outputs are apart at two places."""
        there, here = self.subject.outputs(high), self.subject.outputs(low)
        return sum(_dot(w, a, b) for w, a, b in zip(self.cotangents, there, here, strict=True))

    def claimed_change(self, high: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        """The same as the claimed gradient predicts it, for the step that was really taken after rounding."""
        moved = zip(self.claimed, self.direction, high, low, strict=True)
        return sum(_dot(g, a, b) for g, v, a, b in moved if g is not None and v is not None)

    @cached_property
    def claimed_slope(self) -> float:
        pairs = zip(self.claimed, self.direction, strict=True)
        return sum(_dot(g, v) for g, v in pairs if g is not None and v is not None)

    @cached_property
    def scale(self) -> float:
        """√Σ (g·v)²: the size that Σ g·v would have if its terms did not cancel."""
        pairs = [
            (g, v)
            for g, v in zip(self.claimed, self.direction, strict=True)
            if g is not None and v is not None
        ]
        return math.sqrt(sum(float((g.double() * v.double()).square_().sum()) for g, v in pairs))

    def excess(self, step: float) -> float:
        """Measured minus claimed slope, by one central difference."""
        high, low = self.at(step), self.at(-step)
        if self.dtype == torch.float64:  # the step taken is the step meant, to sixteen digits
            return self.change(high, low) / (2 * step) - self.claimed_slope
        return (self.change(high, low) - self.claimed_change(high, low)) / (2 * step)

    def noise(self) -> float:
        """What the weighted outputs jitter by when the inputs move next to nothing to either side.

        In float64 the moves are as wide as float32's rounding, so that a function with float32 inside shows
        it; slopes, right or wrong, cancel in the second difference.
        """
        generator = torch.Generator().manual_seed(1)
        jitters = [self._jitter(generator) for _ in range(NOISE_SAMPLES)]
        finite = [j * j / 6 for j in jitters if math.isfinite(j)]
        return math.sqrt(sum(finite) / len(finite)) if finite else math.inf

    def _jitter(self, generator: torch.Generator) -> float:
        width = 1e-7 if self.dtype == torch.float64 else 2 * torch.finfo(self.dtype).eps
        moves: list[Tensor | None] = []
        for x, v in zip(self.point, self.direction, strict=True):
            if v is None:
                moves.append(None)
                continue
            units = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) + 0.5
            moves.append(
                torch.where(v != 0, units * torch.maximum(x.double().abs(), 0.1 * v.double().abs()), 0.0)
            )
        near = replace(self, direction=moves)
        return near.second_change(width)

    def second_change(self, step: float) -> float:
        """Outputs at +step, minus twice those here, plus those at −step."""
        high, here, low = (self.subject.outputs(x) for x in (self.at(step), self.point, self.at(-step)))
        outs = zip(self.cotangents, high, here, low, strict=True)
        return sum(_dot(w, a.double() - b.double(), b.double() - c.double()) for w, a, b, c in outs)

    def output_size(self) -> float:
        """√Σ (w·out)²: the scale that the noise of the outputs is measured against."""
        outs = zip(self.cotangents, self.subject.outputs(self.point), strict=True)
        return math.sqrt(
            sum(float(torch.where(w == 0, 0.0, w.double() * out).square().sum()) for w, out in outs)
        )

    def complex_excess(self) -> float | None:
        """The excess by a complex step, or None where the function takes no complex numbers."""
        if any(x.dtype not in (torch.float32, torch.float64) for x in self.point):
            return None
        still = [
            torch.zeros_like(x) if v is None else v for x, v in zip(self.point, self.direction, strict=True)
        ]
        pairs = zip(self.point, still, strict=True)
        inputs = [
            torch.complex(x.contiguous(), (COMPLEX_STEP * v).to(x.dtype).contiguous()) for x, v in pairs
        ]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # "casting complex to real" is how torch says that it is lost
                outs = self.subject.outputs(inputs)
                if not all(out.is_complex() for out in outs):
                    return None
                measured = sum(_dot(w, out.imag) for w, out in zip(self.cotangents, outs, strict=True))
        except Exception:  # each operator refuses complex numbers in its own way
            return None
        return measured / COMPLEX_STEP - self.claimed_slope


def _moved(x: Tensor, v: Tensor, step: float) -> Tensor:
    if x.is_contiguous() and x.dtype == v.dtype == torch.float64:
        return torch.add(x, v, alpha=step)
    return like_layout(torch.add(x.double(), v.double(), alpha=step).to(x.dtype), x)


def _dot(w: Tensor, a: Tensor, b: Tensor | None = None) -> float:
    """Σ w·a or Σ w·(a − b) in float64; entries of weight zero do not count, whatever they hold."""
    w, apart = w.double().reshape(-1), (a.double() if b is None else a.double() - b.double()).reshape(-1)
    total = float(torch.dot(w, apart))
    if math.isfinite(total):
        return total
    return float(torch.where((w == 0) | (apart == 0), 0.0, w * apart).sum())


def measure(line: Line, floor: float = 0.0) -> Slope:
    """The excess along the line: quickly where float64 agrees at once, else as well as it can be known.

    `floor` is a size below which an excess is of no interest, e.g. that of the other entries' gradients.
    """
    if line.dtype == torch.float64:
        quick = _measure_quickly(line, floor)
        if quick is not None:
            return quick
    return measure_carefully(line, floor)


def _measure_quickly(line: Line, floor: float) -> Slope | None:
    claimed, scale, tolerance = line.claimed_slope, max(line.scale, floor), tolerance_of(line.dtype)
    row: list[float] = []
    for step in FIRST_STEPS:
        row = _extrapolate(line.excess(step), row)
        excess = min(row, key=abs)
        # a random line that agrees to nine digits does not do so by chance
        if abs(excess) <= tolerance * scale:
            return Slope(excess, claimed, 0.0, scale, tolerance, "finite difference")
        if not all(map(math.isfinite, row)):
            row = []
    return None


def measure_once(line: Line, floor: float) -> Slope:
    """Two central differences and no search: enough for one entry of many, once it is known to be wrong."""
    coarse = line.excess(FIRST_STEPS[0])
    fine = line.excess(FIRST_STEPS[1])
    extrapolated = _extrapolate(fine, [coarse])[1]
    uncertainty = abs(extrapolated - fine)
    scale = max(line.scale, floor)
    clear = uncertainty <= 1e-5 * scale
    if line.dtype != torch.float64 or not clear:
        return measure_carefully(line, floor)
    claimed = line.claimed_slope
    return Slope(extrapolated, claimed, uncertainty, scale, tolerance_of(line.dtype), "finite difference")


def _extrapolate(newest: float, above: list[float]) -> list[float]:
    """One more row of the Richardson table: each column removes the next even power of the step."""
    row = [newest]
    for column, previous in enumerate(above):
        gain = RATIO ** (2 * (column + 1)) - 1
        row.append(row[column] + (row[column] - previous) / gain)
    return row


def measure_carefully(line: Line, floor: float = 0.0) -> Slope:
    """All steps from a quarter of the input's scale down to where noise wins; the best entry of the table."""
    noise, size = line.noise(), line.output_size()
    best, uncertainty = math.nan, math.inf
    above: list[float] = []
    for step in _all_steps(line.dtype):
        newest = line.excess(step)
        if not math.isfinite(newest):
            above = []  # outside the domain: nothing may be extrapolated from there
            continue
        row = _extrapolate(newest, above)
        for column in range(len(row) if above else 0):
            left = row[column - 1] if column else above[0]
            truncation = max(abs(row[column] - left), abs(row[column] - above[max(column - 1, 0)]))
            total = truncation + noise / step
            if total < uncertainty:
                best, uncertainty = row[column], total
        above = row
        if noise / step > 4 * uncertainty:
            break
    # a function with float32 inside has a gradient with float32 inside
    tolerance = max(tolerance_of(line.dtype), 8 * noise / size if size else 0.0)
    scale = max(line.scale, floor)
    slope = Slope(best, line.claimed_slope, uncertainty, scale, tolerance, "finite difference")
    return _sharpened_by_complex_step(line, slope)


def _all_steps(dtype: torch.dtype) -> list[float]:
    smallest = torch.finfo(dtype).eps ** (2 / 3)
    count = int(math.log(0.25 / smallest, RATIO)) + 2
    return [0.25 / RATIO**k for k in range(max(count, 3))]


def _sharpened_by_complex_step(line: Line, slope: Slope) -> Slope:
    """A complex step loses no digits; it is believed where it lies within the error bar found without it."""
    excess = line.complex_excess()
    if excess is None or not abs(excess - slope.excess) <= 4 * slope.uncertainty:
        return slope
    rounding = 16 * torch.finfo(line.dtype).eps * slope.scale
    if rounding >= slope.uncertainty:
        return slope
    return replace(slope, excess=excess, uncertainty=rounding, method="complex step")


def find_kink(line: Line, slope: Slope) -> float | None:
    """How much the slope jumps at the very point, where it does (ReLU at 0, a tie of a max), else None."""
    wide = {torch.float64: 1.6e-4, torch.float32: 1.6e-2}.get(line.dtype, 0.25)
    narrow = wide / 16
    # right slope minus left slope: falls with the step where the function is smooth, stays at a kink
    at_wide, at_narrow = line.second_change(wide) / wide, line.second_change(narrow) / narrow
    visible = abs(at_narrow) > 8 * line.noise() / narrow + 1e-6 * slope.scale
    return at_narrow if visible and abs(at_narrow) > 0.3 * abs(at_wide) else None
