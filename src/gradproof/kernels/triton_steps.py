"""The small steps of a cross-entropy on a GPU: scale of a mean, sum of the losses, scaling of a gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradproof.kernels import cuda_loss


@triton.jit
def _count_valid(targets, masks, weights, out, rows, ignore_index, v,
                 HAS_MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = 1 / (sum of the valid positions' weights), 1 where nothing is valid; one CTA, a fixed order."""
    total = tl.zeros((BLOCK,), tl.float64)
    some = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        y = tl.load(targets + offsets, mask=offsets < rows, other=ignore_index).to(tl.int64)
        valid = y != ignore_index
        if HAS_MASK:
            valid = valid & (tl.load(masks + offsets, mask=offsets < rows, other=0) != 0)
        if HAS_WEIGHT:
            known = valid & (y >= 0) & (y < v)
            total += tl.load(weights + y, mask=known, other=0.0).to(tl.float64)
        else:
            total += valid.to(tl.float64)
        some += valid.to(tl.int32)
    tl.store(out, tl.where(tl.sum(some, 0) > 0, 1.0 / tl.sum(total, 0), 1.0))


@triton.jit
def _add_losses(losses, scale, out, rows, BLOCK: tl.constexpr):
    """out = scale * sum(losses), in float64 and a fixed order: one CTA."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(losses + offsets, mask=offsets < rows, other=0.0).to(tl.float64)
    tl.store(out, tl.sum(total, 0) * tl.load(scale).to(tl.float64))


@triton.jit
def _scale_entries(gradient, scales, size, v, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply in place, grid-stride; a single scale of 1 leaves at once."""
    if not PER_ROW and tl.load(scales) == 1.0:
        return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        x = tl.load(gradient + offsets, mask=inside)
        times = tl.load(scales + offsets // v, mask=inside) if PER_ROW else tl.load(scales)
        wide = tl.float64 if x.dtype == tl.float64 else tl.float32
        tl.store(gradient + offsets, (x.to(wide) * times.to(wide)).to(x.dtype), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


def mean_scale(targets: Tensor, mask: Tensor | None, weight: Tensor | None, ignore_index: int) -> Tensor:
    """As `torch_loss.mean_scale`, in one launch."""
    out = torch.empty((), dtype=torch.float64, device=targets.device)
    targets = targets.contiguous()
    mask = None if mask is None else mask.to(torch.int8).contiguous()
    flags = {"HAS_MASK": mask is not None, "HAS_WEIGHT": weight is not None, **_one_cta(targets.numel())}
    v = 0 if weight is None else len(weight)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _count_valid[(1,)](targets, mask, weight, out, targets.numel(), ignore_index, v, **flags)
    return out


def add_losses(losses: Tensor, scale: Tensor) -> Tensor:
    """scale * sum of the losses."""
    out = torch.empty((), dtype=losses.dtype, device=losses.device)
    with torch.cuda.device_of(out):
        _add_losses[(1,)](losses, scale, out, losses.numel(), **_one_cta(losses.numel()))
    return out


def _one_cta(size: int) -> dict:
    """How one CTA adds up that many numbers: all at once, as long as they fit into its registers."""
    return {"BLOCK": 8192, "num_warps": 16} if size > 1024 else {"BLOCK": 1024, "num_warps": 4}


def scale_rows(gradient: Tensor, scale: Tensor) -> None:
    """Multiply contiguous rows (..., V) by one number, or by one each; a single 1 is seen on the device."""
    if not gradient.numel() or cuda_loss.scale_entries(gradient, scale):
        return
    programs = min(triton.cdiv(gradient.numel(), 4096), 8 * cuda_loss.processors(gradient.device))
    flags = {"PER_ROW": scale.dim() > 0, "BLOCK": 4096}
    with torch.cuda.device_of(gradient):
        _scale_entries[(programs,)](
            gradient, scale.contiguous(), gradient.numel(), gradient.shape[-1], **flags
        )
