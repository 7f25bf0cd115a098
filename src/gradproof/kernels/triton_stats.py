"""tensor_stats on a GPU: one launch for all tensors of a dtype reads each element once, a second adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # elements a CTA holds in registers
WARPS = 8
FIELDS = 12  # what a chunk is reduced to: the COLUMNS of tensor_stats without absmax


@triton.jit
def _count(condition):
    return tl.sum(condition.to(tl.int32), 0).to(tl.float64)


@triton.jit
def _sum_of_fours(x, BLOCK: tl.constexpr):
    """The sum in float64 of sums of four, a quarter of the block apart, which one thread holds."""
    return tl.sum(tl.sum(tl.reshape(x, (4, BLOCK // 4)), 0).to(tl.float64), 0)


@triton.jit
def _reduce_chunks(
    addresses, sizes, chunk_tensor, chunk_start, parts, chunks, like,
    TINY: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One CTA a chunk: parts[field, chunk]."""
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    data = tl.load(addresses + tensor).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    start = tl.load(chunk_start + chunk)
    offsets = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    size = tl.load(sizes + tensor)
    inside = offsets < size
    if start + BLOCK <= size:  # without a mask the loads are 16 bytes wide
        raw = tl.load(data + offsets)
    else:
        raw = tl.load(data + offsets, mask=inside, other=0)
    x = raw.to(tl.float64 if WIDE else tl.float32)

    a = tl.abs(x)
    finite = a < float("inf")  # not for NaN
    low = tl.min(tl.where(finite & inside, x, float("inf")), 0)
    high = tl.max(tl.where(finite & inside, x, float("-inf")), 0)
    clean = tl.where(finite, x, 0.0)
    absmax = tl.maximum(tl.maximum(-low, high), 0.0)
    if WIDE:
        total = tl.sum(clean, 0)
        sumsq = tl.sum(clean * clean, 0)
    else:
        # times a power of two near 1 / absmax, neither sums nor squares overflow or underflow
        exponent = (absmax.to(tl.int32, bitcast=True) >> 23) & 255
        times = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
        near_one = clean * times
        back = times.to(tl.float64)
        total = _sum_of_fours(near_one, BLOCK) / back
        sumsq = _sum_of_fours(near_one * near_one, BLOCK) / (back * back)
    small = inside & (a < TINY)
    smalls = _count(small)
    zeros = tl.zeros((), tl.float64)
    if smalls > 0:
        zeros = _count(small & (a == 0))
    strange = _count(~finite)
    nans = tl.zeros((), tl.float64)
    if strange > 0:
        nans = _count(x != x)
    over_fp16 = tl.zeros((), tl.float64)
    over_bf16 = tl.zeros((), tl.float64)
    over_fp8 = tl.zeros((), tl.float64)
    if absmax > 448.0:
        over_fp8 = _count(finite & (a > 448.0))
        over_fp16 = _count(finite & (a > 65504.0))
        over_bf16 = _count(finite & (a > 3.3895313892515355e38))
    part = parts + chunk
    tl.store(part, tl.minimum(size - start, BLOCK).to(tl.float64))
    tl.store(part + chunks, nans)
    tl.store(part + 2 * chunks, strange - nans)
    tl.store(part + 3 * chunks, zeros)
    tl.store(part + 4 * chunks, smalls - zeros)
    tl.store(part + 5 * chunks, low.to(tl.float64))
    tl.store(part + 6 * chunks, high.to(tl.float64))
    tl.store(part + 7 * chunks, total)
    tl.store(part + 8 * chunks, sumsq)
    tl.store(part + 9 * chunks, over_fp16)
    tl.store(part + 10 * chunks, over_bf16)
    tl.store(part + 11 * chunks, over_fp8)


@triton.jit
def _add_chunks(parts, first, last, out, chunks, BLOCK: tl.constexpr):
    """One CTA a (tensor, column), in a fixed order: out[tensor, column]."""
    tensor = tl.program_id(0)
    column = tl.program_id(1)
    begin = tl.load(first + tensor)
    end = tl.load(last + tensor)
    if (column >= 5) & (column <= 7):  # min, max, absmax: the largest of -low, of high, of both
        most = tl.full((BLOCK,), float("-inf"), tl.float64)
        for start in range(begin, end, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            low = tl.load(parts + 5 * chunks + offsets, mask=offsets < end, other=float("inf"))
            high = tl.load(parts + 6 * chunks + offsets, mask=offsets < end, other=float("-inf"))
            most = tl.maximum(most, tl.where(column == 6, high, -low))
            most = tl.maximum(most, tl.where(column == 5, -low, high))
        extreme = tl.max(most, 0)
        extreme = tl.where(extreme == float("-inf"), 0.0, extreme)  # nothing finite
        tl.store(out + tensor * 13 + column, tl.where(column == 5, -extreme, extreme))
    else:
        part = parts + tl.where(column < 5, column, column - 1) * chunks
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(begin, end, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            total += tl.load(part + offsets, mask=offsets < end, other=0.0)
        tl.store(out + tensor * 13 + column, tl.sum(total, 0))


@dataclass(frozen=True)
class Plan:
    """Which chunk is which part of which tensor; tensors of one dtype and alignment follow each other."""

    sizes: Tensor  # of the tensors
    first: Tensor  # chunk of each tensor, and the one after its last
    last: Tensor
    chunk_tensor: Tensor  # of each chunk: its tensor, and where in it the chunk starts
    chunk_start: Tensor
    launches: tuple[tuple[torch.dtype, bool, int, int], ...]  # dtype, aligned, first chunk, number of chunks


def stats_on_gpu(flat: Sequence[Tensor], block: int = BLOCK, warps: int = WARPS) -> Tensor:
    """The rows of `tensor_stats` for vectors on one GPU, without waiting for it.

    Where the tensors lie is sent to the device when it changes; a CUDA graph needs a call before capture.
    """
    flat = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in flat]
    device = flat[0].device
    kinds = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in flat)
    plan = _plan(tuple(x.numel() for x in flat), kinds, block, device)
    addresses = _on_device(tuple(x.data_ptr() for x in flat), device)
    chunks = len(plan.chunk_tensor)
    parts = torch.empty(FIELDS, max(chunks, 1), dtype=torch.float64, device=device)
    for dtype, aligned, begin, number in plan.launches:
        _reduce_chunks[(number,)](
            addresses,
            plan.sizes,
            plan.chunk_tensor[begin:],
            plan.chunk_start[begin:],
            parts[:, begin:],
            chunks,
            torch.empty(0, dtype=dtype, device=device),
            TINY=torch.finfo(dtype).tiny if dtype.is_floating_point else 0.5,
            BLOCK=block,
            WIDE=dtype == torch.float64 or not dtype.is_floating_point,
            ALIGNED=aligned,
            num_warps=warps,
        )
    out = torch.empty(len(flat), FIELDS + 1, dtype=torch.float64, device=device)
    _add_chunks[(len(flat), FIELDS + 1)](parts, plan.first, plan.last, out, parts.shape[1], BLOCK=512)
    return out


@lru_cache(maxsize=64)
def _plan(sizes: tuple[int, ...], kinds: tuple, block: int, device: torch.device) -> Plan:
    first, last = [0] * len(sizes), [0] * len(sizes)
    owners: list[int] = []
    starts: list[int] = []
    launches = []
    for kind in sorted(set(kinds), key=str):
        begin = len(owners)
        for i in (i for i in range(len(sizes)) if kinds[i] == kind):
            first[i] = len(owners)
            owners += [i] * triton.cdiv(sizes[i], block)
            starts += range(0, sizes[i], block)
            last[i] = len(owners)
        if len(owners) > begin:
            launches.append((*kind, begin, len(owners) - begin))
    tables = [_on_device(tuple(numbers), device) for numbers in (sizes, first, last, owners, starts)]
    return Plan(tables[0], tables[1], tables[2], tables[3], tables[4], tuple(launches))


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    host = torch.tensor(numbers, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
