"""Recognises master weights: the float32 copies that an optimizer steps in place of a model's bfloat16 parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradproof.probes.tensors import local, sample

MOST_TENSORS = 64  # that are compared
MOST_ENTRIES = 1 << 22  # of a flat copy of all parameters
ALIKE = 0.99  # share of the entries: a copy may have been rounded stochastically


@torch.no_grad()
def are_copies(copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether these hold the parameters' values, or their gradients, up to rounding to the lower precision.

    Constant tensors (a LayerNorm's ones) are alike in any two models and show nothing.
    """
    pairs = pair_by_shape(copies, parameters)
    if len(pairs) < len(copies):
        return is_flat_copy(copies, parameters)
    pairs = pairs[:: max(1, len(pairs) // MOST_TENSORS)]
    if hold_the_same([copy for copy, _ in pairs], [parameter for _, parameter in pairs]):
        return True
    gradients = [(a, b) for copy, p in pairs if (a := copy.grad) is not None and (b := p.grad) is not None]
    return bool(gradients) and hold_the_same([a for a, _ in gradients], [b for _, b in gradients])


def pair_by_shape(copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The first of a shape with the first of that shape, and so on."""
    waiting: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        waiting.setdefault(parameter.shape, []).append(parameter)
    return [(copy, found.pop(0)) for copy in copies if (found := waiting.get(copy.shape))]


def is_flat_copy(copies: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether few long tensors hold all parameters one after another, with padding at the end perhaps."""
    wanted, held = (sum(t.numel() for t in tensors) for tensors in (parameters, copies))
    if len(copies) >= len(parameters) or not wanted <= held <= 1.1 * wanted or held > MOST_ENTRIES:
        return False
    flat = [torch.cat([local(t).reshape(-1).float() for t in tensors]) for tensors in (copies, parameters)]
    return hold_the_same([flat[0][:wanted]], [flat[1]], torch.finfo(parameters[0].dtype).eps)


def hold_the_same(first: Sequence[Tensor], second: Sequence[Tensor], eps: float | None = None) -> bool:
    """Whether two lists of tensors are alike, up to the coarser precision of each pair (this waits for a GPU)."""
    one, other = sample(first).double().cpu(), sample(second).double().cpu()
    finest = [
        eps or max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
        for a, b in zip(first, second, strict=True)
    ]
    allowed = 2 * torch.tensor(finest, dtype=torch.float64, device=one.device)[:, None] * one.abs()
    padding = one.isnan() | other.isnan()
    alike = ((one - other).abs() <= allowed) & ~padding
    known = (~padding).sum(dim=1)
    varied = torch.nan_to_num(one - one[:, :1]).abs().amax(dim=1) > 0
    return bool(varied.any()) and bool((alike.sum(dim=1) >= ALIKE * known)[varied].all())
