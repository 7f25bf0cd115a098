"""tensor_stats on a GPU: one launch for all tensors of a dtype reads each element once, a second adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 32768  # elements of a CTA
BLOCK = 1024  # of them at a time, times four
WARPS = 8
FIELDS = 12  # what a chunk is reduced to: the COLUMNS of tensor_stats without absmax


@triton.jit
def _finite_extremes(x, inside):
    """Lowest and highest of the finite entries of a block, entry by entry."""
    finite = inside & (tl.abs(x) < float("inf"))  # not for NaN
    return tl.where(finite, x, float("inf")), tl.where(finite, x, float("-inf"))


@triton.jit
def _block_at(data, before, begin, size, BLOCK: tl.constexpr, kind: tl.constexpr, CHANGE: tl.constexpr):
    """A block of a tensor, or of its change since before, and which of it lies inside."""
    offsets = begin + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(data + offsets, mask=inside, other=0).to(kind)
    if CHANGE:
        x -= tl.load(before + offsets, mask=inside, other=0).to(kind)
    return x, inside


@triton.jit
def _whole_block(data, before, kind: tl.constexpr, CHANGE: tl.constexpr):
    """As `_block_at`, where all lies inside: without a mask, loads are 16 bytes wide."""
    x = tl.load(data).to(kind)
    if CHANGE:
        x -= tl.load(before).to(kind)
    return x


@triton.jit(
    do_not_specialize=["chunks"]
)  # one kernel for every number of chunks: each takes a second to compile
def _reduce_chunks(
    addresses, befores, sizes, chunk_tensor, chunk_start, parts, chunks, like,
    TINY: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    CHANGES: tl.constexpr,
):  # fmt: skip
    """One CTA a chunk. With CHANGES a second one measures its change: it is next, and finds the chunk in the cache."""
    place = tl.program_id(0)
    chunk = place // 2 if CHANGES else place
    tensor = tl.load(chunk_tensor + chunk)
    data = tl.load(addresses + tensor).to(tl.pointer_type(like.dtype.element_ty))
    before = tl.load(befores + tensor).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
        before = tl.multiple_of(before, 16)
    start = tl.multiple_of(tl.load(chunk_start + chunk), CHUNK)
    size = tl.load(sizes + tensor)
    part = parts + chunk
    if CHANGES:
        if place % 2 == 1:
            _reduce_chunk(
                data, before, start, size, part + chunks, 2 * chunks, TINY, CHUNK, BLOCK, WIDE, True
            )
        else:
            _reduce_chunk(data, before, start, size, part, 2 * chunks, TINY, CHUNK, BLOCK, WIDE, False)
    else:
        _reduce_chunk(data, before, start, size, part, chunks, TINY, CHUNK, BLOCK, WIDE, False)


@triton.jit
def _reduce_chunk(
    data, before, start, size, part, fields,
    TINY: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, CHANGE: tl.constexpr,
):  # fmt: skip
    """part[field * fields]. A chunk not finite, or not of common size, is looked at again."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    stop = tl.minimum(start + CHUNK, size)
    low = tl.full((BLOCK,), float("inf"), kind)
    high = tl.full((BLOCK,), float("-inf"), kind)
    total = tl.zeros((BLOCK,), kind)
    squares = tl.zeros((BLOCK,), kind)
    zeros = tl.zeros((BLOCK,), tl.int32)
    smalls = tl.zeros((BLOCK,), tl.int32)
    for begin in range(start, stop, 4 * BLOCK):
        if begin + 4 * BLOCK <= size:
            offsets = tl.multiple_of(begin, BLOCK) + tl.arange(0, BLOCK)
            a = _whole_block(data + offsets, before + offsets, kind, CHANGE)
            b = _whole_block(data + offsets + BLOCK, before + offsets + BLOCK, kind, CHANGE)
            c = _whole_block(data + offsets + 2 * BLOCK, before + offsets + 2 * BLOCK, kind, CHANGE)
            d = _whole_block(data + offsets + 3 * BLOCK, before + offsets + 3 * BLOCK, kind, CHANGE)
            low = tl.minimum(low, tl.minimum(tl.minimum(a, b), tl.minimum(c, d)))
            high = tl.maximum(high, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
            total += (a + b) + (c + d)
            squares += (a * a + b * b) + (c * c + d * d)
            zeros += (
                (a == 0).to(tl.int32) + (b == 0).to(tl.int32) + (c == 0).to(tl.int32) + (d == 0).to(tl.int32)
            )
            smalls += (tl.abs(a) < TINY).to(tl.int32) + (tl.abs(b) < TINY).to(tl.int32)
            smalls += (tl.abs(c) < TINY).to(tl.int32) + (tl.abs(d) < TINY).to(tl.int32)
        else:
            for each in range(begin, stop, BLOCK):
                x, inside = _block_at(data, before, each, size, BLOCK, kind, CHANGE)
                low = tl.minimum(low, tl.where(inside, x, float("inf")))
                high = tl.maximum(high, tl.where(inside, x, float("-inf")))
                total += x
                squares += x * x
                zeros += (inside & (x == 0)).to(tl.int32)
                smalls += (inside & (tl.abs(x) < TINY)).to(tl.int32)
    lowest = tl.min(low, 0)
    highest = tl.max(high, 0)
    zero = tl.sum(zeros, 0)
    small = tl.sum(smalls, 0)
    sum_ = tl.sum(total.to(tl.float64), 0)
    sumsq = tl.sum(squares.to(tl.float64), 0)
    absmax = tl.maximum(-lowest, highest)
    nan = tl.zeros((), tl.int32)
    inf = tl.zeros((), tl.int32)
    over_fp16 = tl.zeros((), tl.int32)
    over_bf16 = tl.zeros((), tl.int32)
    over_fp8 = tl.zeros((), tl.int32)
    common = (absmax <= 448.0) & ((absmax >= 1e-15) | (absmax == 0)) & (sum_ == sum_)  # NaN is not itself
    if not common:
        low = tl.full((BLOCK,), float("inf"), kind)
        high = tl.full((BLOCK,), float("-inf"), kind)
        for begin in range(start, stop, BLOCK):
            x, inside = _block_at(data, before, begin, size, BLOCK, kind, CHANGE)
            below, above = _finite_extremes(x, inside)
            low = tl.minimum(low, below)
            high = tl.maximum(high, above)
            size_of = tl.abs(x)
            finite = size_of < float("inf")
            nan += tl.sum((x != x).to(tl.int32), 0)
            inf += tl.sum((size_of == float("inf")).to(tl.int32), 0)
            over_fp16 += tl.sum((finite & (size_of > 65504.0)).to(tl.int32), 0)
            over_bf16 += tl.sum((finite & (size_of > 3.3895313892515355e38)).to(tl.int32), 0)
            over_fp8 += tl.sum((finite & (size_of > 448.0)).to(tl.int32), 0)
        lowest = tl.min(low, 0)
        highest = tl.max(high, 0)
        # times a power of two near 1 / absmax, neither sums nor squares overflow or underflow
        largest = tl.maximum(tl.maximum(-lowest, highest), 0.0).to(tl.float32)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        times = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True).to(kind)
        if WIDE:
            times = tl.full((), 1.0, kind)
        total = tl.zeros((BLOCK,), kind)
        squares = tl.zeros((BLOCK,), kind)
        for begin in range(start, stop, BLOCK):
            x, inside = _block_at(data, before, begin, size, BLOCK, kind, CHANGE)
            near_one = tl.where(tl.abs(x) < float("inf"), x, 0.0) * times
            total += near_one
            squares += near_one * near_one
        back = times.to(tl.float64)
        sum_ = tl.sum(total.to(tl.float64), 0) / back
        sumsq = tl.sum(squares.to(tl.float64), 0) / (back * back)
    tl.store(part, (stop - start).to(tl.float64))
    tl.store(part + fields, nan.to(tl.float64))
    tl.store(part + 2 * fields, inf.to(tl.float64))
    tl.store(part + 3 * fields, zero.to(tl.float64))
    tl.store(part + 4 * fields, (small - zero).to(tl.float64))
    tl.store(part + 5 * fields, lowest.to(tl.float64))
    tl.store(part + 6 * fields, highest.to(tl.float64))
    tl.store(part + 7 * fields, sum_)
    tl.store(part + 8 * fields, sumsq)
    tl.store(part + 9 * fields, over_fp16.to(tl.float64))
    tl.store(part + 10 * fields, over_bf16.to(tl.float64))
    tl.store(part + 11 * fields, over_fp8.to(tl.float64))


@triton.jit(do_not_specialize=["tensors", "chunks", "fields"])
def _add_chunks(parts, first, last, out, tensors, chunks, fields, BLOCK: tl.constexpr):
    """One CTA a (tensor or change, column), in a fixed order: out[tensor, column]; changes follow the tensors."""
    tensor = tl.program_id(0)
    column = tl.program_id(1)
    skip = tensor // tensors * chunks
    begin = tl.load(first + tensor % tensors) + skip
    end = tl.load(last + tensor % tensors) + skip
    if (column >= 5) & (column <= 7):  # min, max, absmax: the largest of -low, of high, of both
        most = tl.full((BLOCK,), float("-inf"), tl.float64)
        for start in range(begin, end, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            low = tl.load(parts + 5 * fields + offsets, mask=offsets < end, other=float("inf"))
            high = tl.load(parts + 6 * fields + offsets, mask=offsets < end, other=float("-inf"))
            most = tl.maximum(most, tl.where(column == 6, high, -low))
            most = tl.maximum(most, tl.where(column == 5, -low, high))
        extreme = tl.max(most, 0)
        extreme = tl.where(extreme == float("-inf"), 0.0, extreme)  # nothing finite
        tl.store(out + tensor * 13 + column, tl.where(column == 5, -extreme, extreme))
    else:
        part = parts + tl.where(column < 5, column, column - 1) * fields
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(begin, end, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            total += tl.load(part + offsets, mask=offsets < end, other=0.0)
        tl.store(out + tensor * 13 + column, tl.sum(total, 0))


@dataclass(frozen=True)
class Launch:
    """Some chunks of tensors of one dtype and alignment."""

    dtype: torch.dtype
    aligned: bool
    begin: int  # of the chunks
    number: int
    tensor: Tensor  # of each chunk: its tensor, and where in it the chunk starts
    start: Tensor
    like: Tensor  # an empty tensor, for the dtype


@dataclass(frozen=True)
class Plan:
    """Which chunk is which part of which tensor; tensors of one dtype and alignment follow each other."""

    sizes: Tensor  # of the tensors
    first: Tensor  # chunk of each tensor, and the one after its last
    last: Tensor
    chunks: int
    launches: tuple[Launch, ...]


def stats_on_gpu(
    flat: Sequence[Tensor],
    before: Sequence[Tensor] | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
    warps: int = WARPS,
) -> Tensor:
    """The rows of `tensor_stats` for contiguous tensors on one GPU, without waiting for it.

    Where the tensors lie is sent to the device when it changes; a CUDA graph needs a call before capture.
    """
    device = flat[0].device
    places = tuple(map(Tensor.data_ptr, flat))
    dtypes = tuple([x.dtype for x in flat])
    olds = places if before is None else tuple(map(Tensor.data_ptr, before))
    aligned = tuple([(place | old) % 16 == 0 for place, old in zip(places, olds, strict=True)])
    plan = _plan(tuple(map(Tensor.numel, flat)), dtypes, aligned, chunk, device)
    addresses, befores = _on_device(places, device), _on_device(olds, device)
    times = 1 if before is None else 2
    parts = torch.empty(FIELDS, max(times * plan.chunks, 1), dtype=torch.float64, device=device)
    out = torch.empty(times * len(flat), FIELDS + 1, dtype=torch.float64, device=device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        for launch in plan.launches:
            dtype = launch.dtype
            _reduce_chunks[(times * launch.number,)](
                addresses,
                befores,
                plan.sizes,
                launch.tensor,
                launch.start,
                parts[:, launch.begin :] if launch.begin else parts,
                plan.chunks,
                launch.like,
                TINY=torch.finfo(dtype).tiny if dtype.is_floating_point else 0.5,
                CHUNK=chunk,
                BLOCK=block,
                WIDE=dtype == torch.float64 or not dtype.is_floating_point,
                ALIGNED=launch.aligned,
                CHANGES=times == 2,
                num_warps=warps,
            )
        _add_chunks[(times * len(flat), FIELDS + 1)](
            parts, plan.first, plan.last, out, len(flat), plan.chunks, parts.shape[1], BLOCK=512
        )
    return out


@lru_cache(maxsize=64)
def _plan(sizes: tuple, dtypes: tuple, aligned: tuple, chunk: int, device: torch.device) -> Plan:
    kinds = [
        (torch.uint8 if dtype == torch.bool else dtype, fits)
        for dtype, fits in zip(dtypes, aligned, strict=True)
    ]
    first, last = [0] * len(sizes), [0] * len(sizes)
    owners: list[int] = []
    starts: list[int] = []
    launches = []
    for kind in sorted(set(kinds), key=str):
        begin = len(owners)
        for i in (i for i in range(len(sizes)) if kinds[i] == kind):
            first[i] = len(owners)
            owners += [i] * triton.cdiv(sizes[i], chunk)
            starts += range(0, sizes[i], chunk)
            last[i] = len(owners)
        if len(owners) > begin:
            tensor, start = (_on_device(tuple(table[begin:]), device) for table in (owners, starts))
            like = torch.empty(0, dtype=kind[0], device=device)
            launches.append(Launch(*kind, begin, len(owners) - begin, tensor, start, like))
    on_device = [_on_device(tuple(table), device) for table in (sizes, first, last)]
    return Plan(on_device[0], on_device[1], on_device[2], len(owners), tuple(launches))


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    host = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default device is
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
