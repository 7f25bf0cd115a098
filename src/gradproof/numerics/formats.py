"""The floating-point formats of training as one table, and distances counted in their own steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.errors import UserError


@dataclass(frozen=True)
class Format:
    """What a format can hold: |x| up to `max`, full precision from `tiny`, nothing below `smallest`."""

    name: str
    dtype: torch.dtype
    bits: int
    digits: int  # binary digits of the significand, the hidden one included
    eps: float  # distance from 1 to the next number
    max: float
    tiny: float  # smallest normal number; below it lie the subnormal ones
    smallest: float  # smallest number above zero


def _format(dtype: torch.dtype) -> Format:
    info = torch.finfo(dtype)
    digits = 1 - _exponent(info.eps)
    smallest = info.tiny * info.eps
    name = str(dtype).removeprefix("torch.")
    return Format(name, dtype, info.bits, digits, info.eps, info.max, info.tiny, smallest)


def _exponent(power_of_two: float) -> int:
    return int(torch.frexp(torch.tensor(power_of_two, dtype=torch.float64)).exponent) - 1


FORMATS = tuple(
    _format(dtype)
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
)


def format_of(dtype: torch.dtype) -> Format:
    """The format of a dtype: `format_of(torch.bfloat16).digits` is 8."""
    for known in FORMATS:
        if known.dtype == dtype:
            return known
    names = ", ".join(known.name for known in FORMATS)
    raise UserError(f"{dtype} is not a floating-point format of the table: {names}")


def ulp(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Distance, in float64, from |x| to the next number of `dtype` away from zero (NaN for NaN and inf)."""
    known = format_of(dtype or x.dtype)
    exponent = torch.frexp(x.double()).exponent - 1
    step = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - (known.digits - 1))
    step = torch.where(x == 0, known.smallest, step).clamp_min(known.smallest)
    return torch.where(torch.isfinite(x), step, torch.nan)


def ulp_distance(first: Tensor, second: Tensor) -> Tensor:
    """Steps of their common format between two tensors, as int64; NaN is as far as int64 goes."""
    if first.dtype != second.dtype:
        raise UserError(f"ulp_distance needs one dtype, got {first.dtype} and {second.dtype}")
    far = torch.iinfo(torch.int64).max
    a, b = _place_in_order(first), _place_in_order(second)
    same_side = (a < 0) == (b < 0)
    apart = torch.where(same_side, (a - b).abs(), a.abs() + b.abs())
    apart = torch.where(apart < 0, far, apart)  # the ends of float64 are 2**64 steps apart
    return torch.where(first.isnan() | second.isnan(), far, apart)


def _place_in_order(x: Tensor) -> Tensor:
    """The number's place in the ordered list of its format: 0 for ±0, -1 and 1 for the smallest around it."""
    known = format_of(x.dtype)
    integers = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[known.bits]
    bits = x.contiguous().view(integers).long()
    magnitude = bits & (2 ** (known.bits - 1) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
