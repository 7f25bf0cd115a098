"""All statistics of all tensors of a model in one read: what the probes write down every step.

On a GPU one Triton launch a dtype reads each element once and nothing waits for the host. On a CPU the
elements go by in cache-sized chunks, and because a look at a CPU number is free, the expensive questions (how
many NaN, how many subnormal) are only asked where the cheap statistics say that there is something to count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gradproof.errors import UserError

# min, max, absmax, sum and sumsq are over the finite entries, 0 when there are none; over_* counts finite
# entries beyond the largest number of float16, bfloat16, float8_e4m3fn; subnormal is by the own dtype
COLUMNS = (
    "count",
    "nan",
    "inf",
    "zero",
    "subnormal",
    "min",
    "max",
    "absmax",
    "sum",
    "sumsq",
    "over_fp16",
    "over_bf16",
    "over_fp8",
)
LIMITS = tuple(torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn))
CHUNK = 1 << 17  # elements: 512 KiB of float32, so that the second pass over a chunk finds it in the cache
SMALL = 1 << 13  # tensors up to here are stacked with others of their size: one torch call for all of them
SAFE_SQUARE = 1e-20  # below it, squares of entries that still matter underflow in float32


@torch.no_grad()
def tensor_stats(tensors: Sequence[Tensor], before: Sequence[Tensor] | None = None) -> Tensor:
    """One row of COLUMNS for each tensor, float64, on the tensors' device, without synchronisation on a GPU.

    Takes any mix of shapes and dtypes; complex numbers count as two entries; of a sparse tensor the stored
    values, of a DTensor the local shard. Sums are right to 1e-7 of the sum of magnitudes at any size. With
    `before`, copies of the tensors as they were, the rows of what has changed in each follow.
    """
    flat = list(tensors)
    old = None if before is None else list(before)
    if old is not None and any(a.stride() != b.stride() for a, b in zip(flat, old, strict=True)):
        flat, old = [x.contiguous() for x in flat], [x.contiguous() for x in old]
    flat = _as_vectors(flat)
    old = None if old is None else _as_vectors(old)
    if not flat:
        return torch.zeros(0, len(COLUMNS), dtype=torch.float64, device="cpu")
    devices = {tensor.device for tensor in flat}
    if len(devices) > 1:
        raise UserError(f"tensor_stats needs all tensors on one device, got {sorted(map(str, devices))}")
    if flat[0].is_cuda and _triton_is_here():
        from gradproof.kernels.triton_stats import stats_on_gpu

        return stats_on_gpu(flat, old)
    if old is not None:
        flat = [*flat, *(a - b for a, b in zip(flat, old, strict=True))]
    if flat[0].is_cpu:
        return _stats_on_cpu([tensor.view(-1) for tensor in flat])
    return torch.cat([look_closely(tensor.view(1, -1)) for tensor in flat])


def exponent_histogram(tensor: Tensor, sample: int = 65536) -> Tensor:
    """How many of `sample` evenly spaced entries have each float32 exponent: 256 counts, no synchronisation.

    Bin b counts |x| in [2**(b - 127), 2**(b - 126)); bin 0 holds zero and subnormal, bin 255 inf and NaN.
    """
    flat = _flatten(tensor)
    step = max(1, -(-flat.numel() // sample))
    bits = flat[::step].float().view(torch.int32)
    exponent = ((bits >> 23) & 255).long()
    counts = torch.zeros(256, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, exponent, torch.ones_like(exponent))


def look_closely(rows: Tensor) -> Tensor:
    """The statistics of each row, (R, n) -> (R, len(COLUMNS)), by the definition, on any device."""
    x = rows.double()
    nan, inf = x.isnan(), x.isinf()
    finite = ~(nan | inf)
    size = torch.where(finite, x.abs(), 0.0)
    clean = torch.where(finite, x, 0.0)
    tiny = torch.finfo(rows.dtype).tiny if rows.dtype.is_floating_point else 0.0
    zero = x == 0
    if x.shape[1]:
        low = torch.where(finite, x, torch.inf).amin(1)
        high = torch.where(finite, x, -torch.inf).amax(1)
        absmax = size.amax(1)
    else:
        low = high = absmax = x.new_zeros(len(x))
    some = finite.any(1)
    columns = [
        torch.full_like(absmax, x.shape[1]),
        nan.sum(1),
        inf.sum(1),
        zero.sum(1),
        (finite & ~zero & (size < tiny)).sum(1),
        torch.where(some, low, 0.0),
        torch.where(some, high, 0.0),
        absmax,
        clean.sum(1),
        (clean * clean).sum(1),
        *((size > limit).sum(1) for limit in LIMITS),
    ]
    return torch.stack([column.double() for column in columns], dim=1)


def _are_plain(tensors: list[Tensor]) -> bool:
    """Whether the entries of all lie one after the other, as they are. Asked every step: loops of C are fast."""
    return (
        {Tensor, torch.nn.Parameter}.issuperset(map(type, tensors))
        and {tensor.layout for tensor in tensors} <= {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_complex, tensors))
    )


def _as_vectors(tensors: list[Tensor]) -> list[Tensor]:
    if _are_plain(tensors):
        return tensors
    return [tensor if _are_plain([tensor]) else _flatten(tensor) for tensor in tensors]


def _flatten(tensor: Tensor) -> Tensor:
    """The entries of a tensor as one real vector, without a copy wherever its memory has no gaps."""
    if hasattr(tensor, "to_local"):  # DTensor
        tensor = tensor.to_local()
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout != torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():  # the order of entries does not matter: walk the memory as it lies
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.detach().reshape(-1)


def _triton_is_here() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


# ---- CPU


def _stats_on_cpu(flat: list[Tensor]) -> Tensor:
    out = torch.zeros(len(flat), len(COLUMNS), dtype=torch.float64, device="cpu")
    alike: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(flat):
        if tensor.numel() > SMALL:
            out[i] = torch.tensor(_stats_by_chunks(tensor), dtype=torch.float64, device="cpu")
        elif tensor.numel():
            alike[tensor.numel(), tensor.dtype].append(i)
    for (size, _), places in alike.items():
        for some in torch.tensor(places, device="cpu").split(CHUNK // size):
            out[some] = _stats_of_rows(torch.stack([flat[i] for i in some.tolist()]))
    return out


def _stats_by_chunks(x: Tensor) -> list[float]:
    scratch = torch.empty(CHUNK, dtype=_working_dtype(x.dtype), device="cpu")
    tiny = torch.finfo(x.dtype).tiny if x.dtype.is_floating_point else 0.0
    chunks = [_stats_of_chunk(chunk, scratch, tiny) for chunk in x.split(CHUNK)]
    if len(chunks) == 1:
        return chunks[0]
    finite = [c for c in chunks if c[1] + c[2] < c[0]]
    columns = list(zip(*chunks, strict=True))
    row = [math.fsum(column) for column in columns]
    row[5] = min((c[5] for c in finite), default=0.0)
    row[6] = max((c[6] for c in finite), default=0.0)
    row[7] = max(columns[7])
    return row


def _stats_of_chunk(chunk: Tensor, scratch: Tensor, tiny: float) -> list[float]:
    x = chunk.to(scratch.dtype)
    squares = torch.mul(x, x, out=scratch[: len(x)])
    sumsq = _accurate_sum(squares)
    if not math.isfinite(sumsq):  # NaN, inf, or a square that overflowed
        return look_closely(chunk[None])[0].tolist()
    least = squares.amin().item()
    low, high = (extreme.item() for extreme in torch.aminmax(x))
    if max(low * low, high * high) < SAFE_SQUARE:
        wide = x.double()
        sumsq = torch.dot(wide, wide).item()
    zero = subnormal = 0
    if least <= tiny * tiny:
        zero, subnormal = _count_small(x, squares, tiny)
    absmax = max(-low, high)
    over = [int((x.abs() > limit).sum()) if absmax > limit else 0 for limit in LIMITS]
    return [len(x), 0, 0, zero, subnormal, low, high, absmax, _accurate_sum(x), sumsq, *over]


def _accurate_sum(x: Tensor) -> float:
    """Sums of 128 in the tensor's own precision (four additions a lane, then a tree), the rest in float64."""
    whole = len(x) // 128 * 128
    total = x[:whole].view(-1, 128).sum(1).sum(dtype=torch.float64).item()
    return total + x[whole:].sum(dtype=torch.float64).item() if whole < len(x) else total


def _count_small(x: Tensor, squares: Tensor, tiny: float) -> tuple[int, int]:
    """Zeros and subnormals. Signs are summed because torch counts booleans five times slower."""
    squares_above_zero = round(torch.sign(squares, out=squares).sum().item())
    signs = torch.sign(x, out=squares)
    nonzero = round(torch.dot(signs, signs).item())  # at most CHUNK, exact in float32
    zero = len(x) - nonzero
    squares_underflow = tiny < 1e-30  # a subnormal float32 or float64 has a square of zero
    if squares_underflow and squares_above_zero == nonzero:
        return zero, 0
    return zero, int((x.abs() < tiny).sum()) - zero


def _stats_of_rows(rows: Tensor) -> Tensor:
    """As `look_closely`, fast when the rows are finite, free of zeros and of common size."""
    x = rows.to(_working_dtype(rows.dtype))
    squares = x * x
    low, high = x.amin(1).double(), x.amax(1).double()
    least, most, sumsq = squares.amin(1), squares.amax(1), squares.sum(1, dtype=torch.float64)
    tiny = torch.finfo(rows.dtype).tiny if rows.dtype.is_floating_point else 0.0
    absmax = torch.maximum(-low, high)
    zeros = torch.zeros_like(low)
    count = torch.full_like(low, x.shape[1])
    columns = [
        count,
        zeros,
        zeros,
        zeros,
        zeros,
        low,
        high,
        absmax,
        x.sum(1, dtype=torch.float64),
        sumsq,
        zeros,
        zeros,
        zeros,
    ]
    out = torch.stack(columns, dim=1)
    plain = (most >= SAFE_SQUARE) & (least > tiny * tiny) & (absmax <= min(LIMITS)) & sumsq.isfinite()
    unusual = (~plain).nonzero()[:, 0]
    if len(unusual):
        out[unusual] = look_closely(rows[unusual])
    return out


def _working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 holds every narrower float exactly; integers and float64 need float64."""
    narrow = dtype.is_floating_point and dtype != torch.float64
    return torch.float32 if narrow else torch.float64
