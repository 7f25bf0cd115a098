"""Numbers that were once kept in fewer digits than they have now: every one of them is one of the shorter format's."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FEWEST = 32  # numbers, and different ones
IN_A_BINADE = 8  # numbers between two powers of two, to judge how fine they are there


def format_of(values: Tensor) -> torch.dtype | None:
    """float16 or bfloat16, where all numbers are the format's and as fine as it allows at more than one size.

    Whole numbers, quarters and the like lie on one grid, however large they are; rounded numbers lie on a grid that
    grows with them, and use its last digit half of the time.
    """
    flat = values.detach().reshape(-1).double()
    flat = flat[torch.isfinite(flat) & (flat != 0)].abs()
    if len(flat) < FEWEST or len(torch.unique(flat)) < FEWEST:
        return None
    candidates = (values.dtype,) if values.dtype in HALF else HALF
    for dtype in candidates:
        if bool((flat.to(dtype).double() == flat).all()) and sizes_of_full_digits(flat, dtype) >= 2:
            return dtype
    return None


def sizes_of_full_digits(flat: Tensor, dtype: torch.dtype) -> int:
    """Powers of two between which the last digit of a format is as often odd as it is even."""
    odd = (flat / spacing(flat, dtype)).round() % 2 == 1
    exponents = torch.frexp(flat).exponent
    counts = 0
    for exponent in torch.unique(exponents).tolist():
        here = exponents == exponent
        share = float(odd[here].double().mean())
        counts += int(here.sum()) >= IN_A_BINADE and 0.2 < share < 0.8
    return counts


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of each number to the next larger one of a format."""
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.tiny)
    return torch.exp2(torch.frexp(size).exponent.double() - 1) * info.eps
