"""Tensors from a short description, for the command line and for sweeps: `float32[4,8]`, `int64[4]<50`."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from gradproof.errors import UserError

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "bool")
_SPEC = re.compile(r"^\s*(\w+)\s*\[\s*([\d\s,]*)\]\s*(?:<\s*(\d+))?\s*$")


def example_tensor(spec: str, generator: torch.Generator | None = None) -> Tensor:
    """Normal numbers, fair coins, or integers from 0 up to a bound (2 if none is given).

    `example_tensor("int64[2,3]<10")` has the shape (2, 3) and entries from 0 to 9.
    """
    found = _SPEC.match(spec)
    if not found or found[1] not in DTYPES:
        raise UserError(
            f"cannot read the input {spec!r}; write dtype[shape], e.g. float64[4,8] or int64[4]<50; "
            f"dtypes: {', '.join(DTYPES)}"
        )
    dtype = getattr(torch, found[1])
    shape = [int(n) for n in found[2].replace(" ", "").split(",") if n]
    if dtype.is_floating_point:
        # drawn in float64 and rounded, so that one seed gives the same point in every dtype
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(int(found[3] or 2), shape, generator=generator).to(dtype)
