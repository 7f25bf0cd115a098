"""Measures tensors: all of a step's statistics in few launches, and one transfer to the host.

Nothing here draws random numbers, writes into a tensor that is not its own, or waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from gradproof.kernels.tensor_stats import COLUMNS, tensor_stats
from gradproof.record.schema import EXPONENT_BINS, EXPONENT_LOW, PERCENTILES, STATISTICS

Name = TypeVar("Name", bound=Hashable)

PIECE = 1 << 14  # entries that one float32 norm may run over on a CPU
SAMPLE = 1024  # entries of a tensor that percentiles, exponents, cosines and ε shares are taken from
FEWEST, MOST_SAMPLED = 16, 1 << 22  # entries of each, and of all: of very many tensors, fewer each
SLAB = 1 << 20  # entries that are sorted and counted at a time

COUNT, NAN, INF, ZERO, SUBNORMAL, MIN, MAX, ABSMAX, SUM, SUMSQ = (
    COLUMNS.index(name)
    for name in ("count", "nan", "inf", "zero", "subnormal", "min", "max", "absmax", "sum", "sumsq")
)


def is_measurable(value: object) -> bool:
    """A real tensor of floating-point numbers: no fake, functorch, meta or integer tensor."""
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and not value.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and (type(value) is Tensor or not isinstance(value, FakeTensor))
    )


def local(tensor: Tensor) -> Tensor:
    """The plain, dense part of a tensor that lies on this rank, detached."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:  # compressed sparse
        tensor = tensor.values()
    return tensor


def measure(tensors: Sequence[Tensor]) -> Tensor:
    """Statistics of tensors on one device: (N, columns of tensor_stats), float64, still on that device."""
    return tensor_stats(tensors)


def measure_changes(now: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """Statistics of tensors, and of their changes since the copies in `before`: (2 N, columns).

    A GPU subtracts while it measures, a CPU in the memory of the copies.
    """
    if now[0].is_cuda:
        return tensor_stats(now, before)
    for new, old in zip(now, before, strict=True):
        torch.sub(new, old, out=old)
    return tensor_stats([*now, *before])


def sample_changes(now: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """As `sample`, of the tensors and their changes, after `measure_changes`."""
    was = sample(before)
    new = sample(now)
    return torch.cat((new, new - was if now[0].is_cuda else was))


def to_statistics(raw: np.ndarray) -> np.ndarray:
    """Rows of tensor_stats as rows of a statistics frame; columns measured elsewhere stay nan."""
    rows = np.full((len(raw), len(STATISTICS)), np.nan)
    finite = np.maximum(raw[:, COUNT] - raw[:, NAN] - raw[:, INF], 1)
    mean = raw[:, SUM] / finite
    variance = np.maximum(raw[:, SUMSQ] / finite - mean * mean, 0)
    columns = {
        "nan": raw[:, NAN],
        "inf": raw[:, INF],
        "zero": raw[:, ZERO],
        "subnormal": raw[:, SUBNORMAL],
        "min": raw[:, MIN],
        "max": raw[:, MAX],
        "absmax": raw[:, ABSMAX],
        "mean": mean,
        "std": np.sqrt(variance),
        "norm": np.sqrt(raw[:, SUMSQ]),
    }
    for name, values in columns.items():
        rows[:, STATISTICS.index(name)] = values
    return rows


def divide(raw: np.ndarray, scale: float) -> np.ndarray:
    """Rows of tensor_stats as they would be of tensors divided by a number above zero."""
    raw = raw.copy()
    raw[:, [MIN, MAX, ABSMAX, SUM]] /= scale
    raw[:, SUMSQ] /= scale * scale
    return raw


def merge_calls(raw: np.ndarray) -> np.ndarray:
    """Several calls of one module in a step, as one row."""
    merged = raw.sum(axis=0)
    merged[MIN], merged[MAX], merged[ABSMAX] = raw[:, MIN].min(), raw[:, MAX].max(), raw[:, ABSMAX].max()
    return merged


def whole_norm(raw: np.ndarray) -> float:
    """The L2 norm of several tensors together; nan or inf if one of them holds such a value."""
    if raw[:, NAN].any():
        return float("nan")
    return float("inf") if raw[:, INF].any() else float(np.sqrt(raw[:, SUMSQ].sum()))


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Σx² of each tensor, non-finite if an entry is, float64: what a light step measures.

    `_foreach_norm` is the fastest read there is, but on a CPU it loses digits on long rows (0.3 % at 39M
    entries), so long tensors are read in pieces, each right to 3e-6, and added up in float64.
    """
    pieces: list[Tensor] = []
    owner: list[int] = []
    for index, tensor in enumerate(tensors):
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.device.type == "cpu" and tensor.numel() > PIECE and tensor.is_contiguous():
            parts = tensor.view(-1).split(PIECE)
        else:
            parts = (tensor,)
        pieces += parts
        owner += [index] * len(parts)
    norms = torch.stack(torch._foreach_norm(pieces)).double()
    squares = norms * norms
    if len(pieces) == len(tensors):
        return squares
    places = torch.tensor(owner, device=squares.device)
    return torch.zeros(len(tensors), dtype=torch.float64, device=squares.device).index_add_(
        0, places, squares
    )


def sample(tensors: Iterable[Tensor]) -> Tensor:
    """Evenly spaced entries of each tensor as rows of a matrix (N, width), float32, short ones padded by nan.

    The width is SAMPLE for up to 4096 tensors, and less for more: together they have 4 million entries at most. However
    many tensors there are, a GPU gets four launches: views are put together, then laid out by an index.
    """
    tensors = list(tensors)
    width = min(SAMPLE, max(FEWEST, MOST_SAMPLED // max(len(tensors), 1)))
    views = [_view(tensor, width) for tensor in tensors]
    if len({view.dtype for view in views}) > 1:
        views = [view.to(torch.float32) for view in views]
    picked = torch.cat(views).to(torch.float32)
    rows = torch.full((len(views), width), float("nan"), dtype=torch.float32, device=picked.device)
    places = _places(tuple(view.numel() for view in views), width, picked.device)
    return rows.view(-1).index_copy_(0, places, picked).view(len(views), width)


def _view(tensor: Tensor, most: int) -> Tensor:
    """At most so many evenly spaced entries, not copied."""
    flat = local(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if not flat.is_contiguous():
        flat = _spread(flat)
    stride = max(1, -(-flat.numel() // most))
    return flat.as_strided((-(-flat.numel() // stride),), (stride,), flat.storage_offset())


@lru_cache(maxsize=16)
def _places(lengths: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """Where the entries of rows of these lengths go in a matrix (N, width)."""
    inside = torch.arange(width, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    return inside.view(-1).nonzero().view(-1).to(device, non_blocking=True)


def _spread(tensor: Tensor) -> Tensor:
    """A few entries of a tensor whose memory is not in order, without copying all of it."""
    while tensor.dim() > 1 and tensor.numel() > 4 * SAMPLE:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        if tensor.shape[longest] < 2:
            break
        step = [slice(None)] * tensor.dim()
        step[longest] = slice(None, None, 2)
        tensor = tensor[tuple(step)]
    return tensor.reshape(-1)


def distributions(samples: np.ndarray) -> np.ndarray:
    """Percentiles and exponent counts of each row of a sample: one row of a distribution frame."""
    slabs = range(0, len(samples), max(1, SLAB // samples.shape[1]))
    return np.concatenate([_distributions(samples[at : at + slabs.step]) for at in slabs])


def _distributions(samples: np.ndarray) -> np.ndarray:
    out = np.zeros((len(samples), len(PERCENTILES) + EXPONENT_BINS), dtype=np.float32)
    finite = np.where(np.isfinite(samples), samples, np.nan)
    ordered = np.sort(finite, axis=1)  # nan last
    counts = np.isfinite(ordered).sum(axis=1)
    for column, percent in enumerate(PERCENTILES):
        place = np.clip(np.round((counts - 1) * percent / 100).astype(int), 0, None)
        out[:, column] = np.where(counts > 0, ordered[np.arange(len(ordered)), place], np.nan)
    _, exponents = np.frexp(np.nan_to_num(finite))
    bins = np.clip((exponents - EXPONENT_LOW) // 2, 0, EXPONENT_BINS - 1)
    bins = np.where(finite == 0, 0, bins)
    places = (bins + EXPONENT_BINS * np.arange(len(bins))[:, None])[np.isfinite(finite)]
    found = np.bincount(places, minlength=len(bins) * EXPONENT_BINS)
    out[:, len(PERCENTILES) :] = found.reshape(len(bins), EXPONENT_BINS)
    return out


def distributions_on_device(samples: Tensor) -> Tensor:
    """As `distributions`, where the sample lies: a GPU sorts and counts while the host goes on."""
    finite = samples.isfinite()
    counts = finite.sum(dim=1, keepdim=True)
    ordered = torch.where(finite, samples, torch.nan).sort(dim=1).values  # nan last
    percents = _constant(PERCENTILES, samples.device)
    places = ((counts - 1) * percents / 100).round().long().clamp_min(0)
    percentiles = torch.where(counts > 0, ordered.gather(1, places).double(), torch.nan)
    _, exponents = torch.frexp(torch.where(finite, samples, 0.0))
    bins = torch.div(exponents - EXPONENT_LOW, 2, rounding_mode="floor").clamp(0, EXPONENT_BINS - 1).long()
    bins = torch.where(samples == 0, 0, bins)
    found = torch.zeros(len(samples), EXPONENT_BINS, dtype=torch.float64, device=samples.device)
    return torch.cat((percentiles, found.scatter_add_(1, bins, finite.double())), dim=1)


@lru_cache(maxsize=16)
def _constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu").to(device, non_blocking=True)


def cosines(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine of each row with the row of the step before, and of all rows together."""
    before, after = torch.nan_to_num(before.double()), torch.nan_to_num(after.double())
    dots = (before * after).sum(dim=1)
    squares = (before * before).sum(dim=1), (after * after).sum(dim=1)
    tiny = torch.finfo(torch.float64).tiny
    rows = dots / (squares[0] * squares[1]).sqrt().clamp_min(tiny)
    return rows, dots.sum() / (squares[0].sum() * squares[1].sum()).sqrt().clamp_min(tiny)


def dead_share(output: Tensor) -> Tensor:
    """Share of units (last dimension; channels of an image) whose output is the same all over the batch."""
    units = output.detach()
    if units.dim() >= 4:
        units = units.transpose(1, -1)
    units = units.reshape(-1, units.shape[-1])
    return (units == units[:1]).all(dim=0).mean(dtype=torch.float64)


def group_by_device(tensors: Mapping[Name, Tensor]) -> dict[torch.device, dict[Name, Tensor]]:
    """The same tensors, apart by device: what is on one device is measured there together."""
    groups: dict[torch.device, dict[Name, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.device, {})[name] = tensor
    return groups
