"""The matrix product of a linear layer whose result is wider than its factors."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, summed in the precision of out, which may be wider than a and b."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out) if add else torch.mm(
            a, b, out_dtype=out.dtype, out=out
        )
    elif add:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
