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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gradproof.check.subject import Subject, like_layout

RATIO = 4.0  # between one step and the next
FIRST_STEPS = tuple(1e-3 / RATIO**k for k in range(7))  # the second usually decides; the last avoid kinks
FINITE = "finite difference"
COMPLEX_STEP = 1e-20  # nothing is subtracted, so nothing is lost however small it is
UNITS = (2.0**-10, 2.0**-7)  # eps of TF32 and float16, and of bfloat16
COARSE_STEPS = {UNITS[0]: (0.25, 0.125, 0.0625), UNITS[1]: (0.5, 0.25, 0.125)}  # for staircases of that unit
DITHERS = 8


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
    grain: float | None = None  # see find_grain; None: not known yet
    least_noise: float = 0.0  # that of the whole input, for a line along one entry

    @cached_property
    def dtype(self) -> torch.dtype:
        """The narrowest of the inputs' and outputs' dtypes: what rounding is counted in."""
        return max((x.dtype for x in (*self.point, *self.cotangents)), key=lambda d: torch.finfo(d).eps)

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

    @cached_property
    def noise(self) -> float:
        """What the weighted outputs jitter by under moves next to nothing, or as wide as the grain.

        In float64 the moves are wider than float32's rounding, so that a function with float32 inside shows.
        """
        fine = 1e-5 if self.dtype == torch.float64 else 2 * torch.finfo(self.dtype).eps
        # an output that does not move at all has jittered by less than its own rounding, not by nothing
        rounding = 0.3 * torch.finfo(self.dtype).eps * self.output_size
        least = self.least_noise if self.dtype == torch.float64 else max(self.least_noise, rounding)
        return max(self.jitter(2 * self.known_grain or fine), least)

    @cached_property
    def known_grain(self) -> float:
        return find_grain(self) if self.grain is None else self.grain

    def jitter(self, width: float) -> float:
        """Root mean square of fourth differences: slopes, right or wrong, and curvature cancel in them."""
        generator = torch.Generator().manual_seed(1)
        squares = [replace(self, direction=self.moves(generator)).fourth_change(width) ** 2 for _ in range(4)]
        finite = [square / 70 for square in squares if math.isfinite(square)]  # 1² + 4² + 6² + 4² + 1²
        return math.sqrt(sum(finite) / len(finite)) if finite else math.inf

    def moves(self, generator: torch.Generator) -> list[Tensor | None]:
        """Random moves, each relative to the entry's own size, of the entries that the line moves."""
        moves: list[Tensor | None] = []
        for x, v in zip(self.point, self.direction, strict=True):
            if v is None:
                moves.append(None)
                continue
            units = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) - 1
            sizes = torch.maximum(x.double().abs(), 0.1 * v.double().abs())
            moves.append(torch.where(v != 0, units * sizes, 0.0))
        return moves

    def fourth_change(self, step: float) -> float:
        """Outputs at −2, −1, 0, 1 and 2 steps, weighted 1, −4, 6, −4, 1."""
        a, b, c, d, e = (self.subject.outputs(self.at(k * step)) for k in (-2, -1, 0, 1, 2))
        total = 0.0
        for w, *outs in zip(self.cotangents, a, b, c, d, e, strict=True):
            low2, low, here, high, high2 = (out.double() for out in outs)
            total += _dot(w, (low2 - here) + (high2 - here), 4 * ((low - here) + (high - here)))
        return total

    def second_change(self, step: float) -> float:
        """Outputs at +step, minus twice those here, plus those at −step."""
        high, here, low = (self.subject.outputs(x) for x in (self.at(step), self.point, self.at(-step)))
        outs = zip(self.cotangents, high, here, low, strict=True)
        return sum(_dot(w, a.double() - b.double(), b.double() - c.double()) for w, a, b, c in outs)

    @cached_property
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
    if line.dtype == torch.float64 and not line.grain:
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
            return Slope(excess, claimed, 0.0, scale, tolerance, FINITE)
        if not all(map(math.isfinite, row)):
            row = []
    return None


def measure_once(line: Line, floor: float) -> Slope:
    """Two central differences and no search: enough for one entry of many, once it is known to be wrong."""
    if line.dtype != torch.float64 or line.grain:
        return measure_carefully(line, floor)
    coarse = line.excess(FIRST_STEPS[0])
    fine = line.excess(FIRST_STEPS[1])
    extrapolated = _extrapolate(fine, [coarse])[1]
    uncertainty = abs(extrapolated - fine)
    scale = max(line.scale, floor)
    if not uncertainty <= 1e-5 * scale:
        return measure_carefully(line, floor)
    claimed = line.claimed_slope
    return Slope(extrapolated, claimed, uncertainty, scale, tolerance_of(line.dtype), FINITE)


def find_grain(line: Line) -> float:
    """The rounding unit of a format inside the function that is coarser than its dtype, or 0.

    A function with bfloat16 or TF32 inside is a staircase: a difference taken on one of its stairs says 0.
    Stairs make the outputs jitter under wide moves, and hardly more under moves eight times as wide; what
    comes from kinks or curvature grows with the width, and what comes from rounding is far smaller.
    """
    if torch.finfo(line.dtype).eps > UNITS[0]:
        return 0.0
    generator = torch.Generator().manual_seed(3)
    fine = coarse = 0.0
    for _ in range(4):  # few stairs are met at one place; and bfloat16 inputs lie amid theirs
        aside = replace(line, direction=line.moves(generator)).at(UNITS[1])
        beside = replace(line, point=aside)
        fine, coarse = (
            math.hypot(j, beside.jitter(2 * u)) for j, u in zip((fine, coarse), UNITS, strict=True)
        )
    if fine == 0.0 and coarse > 0.01 * UNITS[1] * line.scale:
        return UNITS[1]  # not even a rounding: all outputs stood still
    if not (fine > 0.01 * UNITS[0] * line.scale and coarse < 5 * fine):
        return 0.0
    return UNITS[1] if coarse > 1.5 * fine else UNITS[0]


def _extrapolate(newest: float, above: list[float], ratio: float = RATIO) -> list[float]:
    """One more row of the Richardson table: each column removes the next even power of the step."""
    row = [newest]
    for column, previous in enumerate(above):
        gain = ratio ** (2 * (column + 1)) - 1
        row.append(row[column] + (row[column] - previous) / gain)
    return row


def measure_carefully(line: Line, floor: float = 0.0) -> Slope:
    """All steps from a quarter of the input's scale down to where noise wins; the best entry of the table."""
    measured, ratio = (_dithered(line), 2.0) if line.known_grain else (_at_all_steps(line), RATIO)
    best, uncertainty = math.nan, math.inf
    above: list[float] = []
    for newest, noise in measured:
        if not math.isfinite(newest):
            above = []  # outside the domain: nothing may be extrapolated from there
            continue
        row = _extrapolate(newest, above, ratio)
        for column in range(len(row) if above else 0):
            left = row[column - 1] if column else above[0]
            truncation = max(abs(row[column] - left), abs(row[column] - above[max(column - 1, 0)]))
            if truncation + noise < uncertainty:
                best, uncertainty = row[column], truncation + noise
        above = row
        if noise > 4 * uncertainty:
            break
    slope = Slope(best, line.claimed_slope, uncertainty, max(line.scale, floor), _tolerance(line), FINITE)
    return slope if line.known_grain else _sharpened_by_complex_step(line, slope)


def _at_all_steps(line: Line) -> Iterator[tuple[float, float]]:
    """The excess at each step with its noise, down to the step at which the function stands still."""
    slope = 0.0
    for step in _all_steps(line.dtype):
        excess = line.excess(step)
        measured = line.claimed_slope + excess
        if slope and abs(measured) <= 1e-12 * abs(slope):
            return  # it moved at larger steps: this one is lost between two of its numbers
        slope = measured if math.isfinite(measured) else slope
        yield excess, line.noise / step


def _tolerance(line: Line) -> float:
    """A function with float32 or bfloat16 inside has a gradient with the same inside."""
    size = line.output_size
    own_noise = 8 * line.noise / size if size and not line.known_grain else 4 * line.known_grain
    return max(tolerance_of(line.dtype), own_noise)


def _dithered(line: Line) -> Iterator[tuple[float, float]]:
    """The excess over a staircase, averaged over places a stair's width apart, and its uncertainty."""
    generator = torch.Generator().manual_seed(2)
    for step in COARSE_STEPS[line.known_grain]:
        found = []
        for _ in range(DITHERS):
            beside = replace(line, direction=line.moves(generator)).at(2 * line.known_grain)
            found.append(replace(line, point=beside).excess(step))
        mean = sum(found) / DITHERS
        spread = math.sqrt(sum((x - mean) ** 2 for x in found) / (DITHERS - 1))
        yield mean, 2 * max(spread, line.noise / step) / math.sqrt(DITHERS)


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
    # of moves that a kink does not show in
    noise = line.jitter(max(narrow / 100, 2 * torch.finfo(line.dtype).eps))
    visible = abs(at_narrow) > 8 * noise / narrow + 1e-6 * slope.scale
    return at_narrow if visible and abs(at_narrow) > 0.3 * abs(at_wide) else None
