"""Small things the tape does with tensors and trees of them: identity of memory, one number for a content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def alias(source: torch.Tensor, size: tuple, stride: tuple, offset: int) -> torch.Tensor:
    """A second tensor on known memory that no operator made: a saved activation, a shallow copy."""
    same = tuple(source.shape) == tuple(size) and tuple(source.stride()) == tuple(stride)
    return source if same and source.storage_offset() == offset else source.as_strided(size, stride, offset)


def load(target: torch.Tensor) -> None:
    """Memory that something outside PyTorch's operators has written; the value is kept with the operation."""


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a tree of tuples, lists and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensors_in(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors_in(part)


def map_tensors(tree: Any, function: Callable, other: Callable = lambda value: value) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return (tuple if isinstance(tree, tuple) else list)(
            map_tensors(part, function, other) for part in tree
        )
    if isinstance(tree, dict):
        return {key: map_tensors(part, function, other) for key, part in tree.items()}
    return other(tree)


def plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool, complex, str)) else None


def storage_key(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # functorch wrappers, meta tensors of some backends
        return None


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def geometry_of(tensor: torch.Tensor) -> tuple:
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
    if any(t.is_floating_point() for t in tensors):
        tensors = [t for t in tensors if t.is_floating_point()]
    sums = [_sum(t) for t in tensors if t.layout == torch.strided and t.numel() > 0 and t.dtype in _SUMMED]
    return sum(sums[1:], sums[0]) if sums else None


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    low = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.sum(dtype=torch.float32) if low else tensor.sum()).double()


def on_host(numbers: list[torch.Tensor]) -> torch.Tensor:
    """Numbers from any devices as one tensor on the CPU, with one copy from each."""
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(place)
    found = torch.empty(len(numbers), dtype=torch.float64)
    for places in by_device.values():
        found[places] = torch.stack([numbers[place] for place in places]).cpu()
    return found


def freeze(name: str, values: list[torch.Tensor]) -> tuple:
    if name == "native_dropout":
        return (None, values[1].clone())
    if name.startswith("bernoulli"):
        return tuple(value.bool() for value in values)  # one byte instead of four
    return tuple(value.detach().clone() for value in values)
