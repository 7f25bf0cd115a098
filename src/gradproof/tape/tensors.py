"""Small things the tape does with tensors and trees of them: identity of memory, one number for a content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# what a content is summed up in
_SUMMED = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int64,
    torch.bool: torch.int64,
}

# what arguments are besides tensors, told by one look: isinstance asks the class of a tensor, which takes longer
_NO_TREES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))


def alias(source: torch.Tensor, size: tuple, stride: tuple, offset: int) -> torch.Tensor:
    """A second tensor on known memory that no operator made: a saved activation, a shallow copy."""
    same = tuple(source.shape) == tuple(size) and tuple(source.stride()) == tuple(stride)
    return source if same and source.storage_offset() == offset else source.as_strided(size, stride, offset)


def load(target: torch.Tensor) -> None:
    """Memory that something outside PyTorch's operators has written; the value is kept with the operation."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of a tree of tuples, lists and dictionaries."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if type(tree) in _NO_TREES:
        return
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            _collect(part, found)
    elif isinstance(tree, dict):
        for part in tree.values():
            _collect(part, found)


def map_tensors(tree: Any, function: Callable, other: Callable | None = None) -> Any:
    if type(tree) in _NO_TREES:
        return tree if other is None else other(tree)
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        parts = [map_tensors(part, function, other) for part in tree]
        return tuple(parts) if isinstance(tree, tuple) else parts
    if isinstance(tree, dict):
        return {key: map_tensors(part, function, other) for key, part in tree.items()}
    return tree if other is None else other(tree)


def plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool, complex, str)) else None


def storage_key(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # functorch wrappers, meta tensors of some backends
        return None


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes; of a sparse one, what it stores."""
    if tensor.layout == torch.sparse_coo:
        return nbytes(tensor._indices()) + nbytes(tensor._values())
    if tensor.layout != torch.strided:
        return 2 * nbytes(tensor.values())
    return tensor.numel() * tensor.element_size()


def geometry_of(tensor: torch.Tensor) -> tuple:
    if tensor.layout != torch.strided:
        return tuple(tensor.shape), (), 0
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """One number for what an operation made, so that a replay can tell whether it made the same.

    Whole numbers beside real ones do not count: fused attention hands out seeds that it never used.
    """
    if len(tensors) > 1:
        tensors = [t for t in tensors if t.is_floating_point()] or tensors
    summed = [
        (t, kind)
        for t in tensors
        if (kind := _SUMMED.get(t.dtype)) is not None and t.layout is torch.strided and t.numel() > 0
    ]
    if len(summed) < 2:
        return summed[0][0].sum(dtype=summed[0][1]) if summed else None
    # a number is its own sum: an optimizer counts the steps of hundreds of parameters, each in a tensor
    sums = [t if t.dtype is kind and t.dim() == 0 else t.sum(dtype=kind) for t, kind in summed]
    if len({total.device for total in sums}) > 1:
        sums = [total.cpu() for total in sums]
    return torch.stack(sums).sum(dtype=torch.float64)


def numbers_on_host(numbers: list[torch.Tensor]) -> torch.Tensor:
    """Numbers of any kind from any devices as one tensor on the CPU, with one copy from each."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, number in enumerate(numbers):
        alike.setdefault((number.device, number.dtype), []).append(place)
    found = torch.empty(len(numbers), dtype=torch.float64, device="cpu")
    for places in alike.values():
        found[places] = torch.stack([numbers[place] for place in places]).cpu().double()
    return found


def freeze(name: str, values: list[torch.Tensor]) -> tuple:
    """What a random operator drew, as short as it can be said."""
    if name == "native_dropout":
        return (None, values[1])
    if name.startswith("bernoulli"):
        return tuple(value.bool() for value in values)  # one byte instead of four
    return tuple(values)
