"""Other arguments for a kernel: other numbers, and other sizes: one more than a block, a whole block, many.

Axes of one size are taken for one axis, and grow together. They only ever grow: a kernel with a size built in writes
too little then, and not beyond its memory. What could be a product of others, or is also said by a number, stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradproof.check.blackbox import BlackBox

BLOCK = 32
MOST = 1 << 16  # entries of all arguments
MANY = 1029  # more than the threads of a block, and no multiple of anything


def grown_boxes(box: BlackBox) -> Iterator[tuple[str, BlackBox, bool]]:
    """(in words, the box with longer axes, whether it is the first of a size), one size at a time."""
    for size in free_sizes(box):
        up = -(-size // BLOCK) * BLOCK
        for longer in dict.fromkeys((size + 1, up, MANY)):
            if longer > size and sum(_entries_of(box.leaves[k], size, longer) for k in box.tensors) <= MOST:
                grown = [_grown(x, size, longer) for x in box.leaves]
                yield f"{longer} in place of {size}", box.with_leaves(grown), longer == size + 1


def _entries_of(x: Tensor, size: int, longer: int) -> int:
    return math.prod(longer if n == size else n for n in x.shape)


def free_sizes(box: BlackBox) -> list[int]:
    """The sizes that may change without breaking a relation between arguments.

    >>> from gradproof.check.blackbox import black_box
    >>> free_sizes(black_box(torch.add, (torch.ones(3, 5), torch.ones(5))))
    [3, 5]
    >>> free_sizes(black_box(torch.add, (torch.ones(15, 4), torch.ones(3, 5, 4))))  # 15 is 3 times 5
    [4]
    """
    tensors = [box.leaves[k] for k in box.tensors]
    sizes = sorted({n for x in tensors for n in x.shape if n > 1})
    numbers = {x for x in box.leaves if isinstance(x, int) and not isinstance(x, bool)}
    held = {n for n in sizes if n in numbers}
    factors = [*sizes, *(n for n in numbers if n > 1)]
    for a in sizes:
        for b in factors:
            if a * b in sizes:
                held |= {a, b, a * b}
    for x in tensors:
        if not x.is_floating_point() and x.dim() == 1 and _is_sorted(x):
            held |= set(x.shape) | {
                n - 1 for n in x.shape
            }  # offsets: their last entry says how many there are
    return [n for n in sizes if n not in held]


def _is_sorted(x: Tensor) -> bool:
    return x.dtype != torch.bool and len(x) > 2 and bool((x[1:] >= x[:-1]).all())


def _grown(x: Any, size: int, longer: int) -> Any:
    """The tensor with each axis of a size made longer by numbers of its own."""
    if not isinstance(x, Tensor):
        return x
    generator = torch.Generator().manual_seed(size)
    for axis in [axis for axis, n in enumerate(x.shape) if n == size]:
        more = torch.randint(size, (longer - size,), generator=generator).to(x.device)
        x = torch.cat([x, x.index_select(axis, more)], axis)
    return x


def shaken(box: BlackBox, seed: int = 0) -> list[Any]:
    """Other numbers of the same signs and sizes: what is constant (weights of ones, a bias of zeros) varies."""
    generator = torch.Generator().manual_seed(100 + seed)
    leaves = list(box.leaves)
    for k in box.floats:
        x = leaves[k].detach()
        values = x.unique() if x.numel() < 1 << 20 else x.flatten()[:2]
        if set(values.tolist()) == {0.0, 1.0} or not bool(torch.isfinite(x).any()):
            continue  # a mask
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        wide = x.double()
        if len(values) == 1:
            wide = wide + 0.3 * noise * (abs(float(values)) or 1.0)
            wide = wide.abs() if float(values) >= 0 else wide
        else:
            wide = wide * torch.exp(0.5 * noise)
        leaves[k] = torch.empty_like(x).copy_(wide)
    return leaves


def permuted(box: BlackBox, seed: int) -> list[Any]:
    """The numbers of each argument in another order, which is no other call of a kernel that takes any numbers."""
    generator = torch.Generator().manual_seed(200 + seed)
    leaves = list(box.leaves)
    for k in box.floats:
        x = leaves[k].detach()
        order = torch.randperm(x.numel(), generator=generator).to(x.device)
        leaves[k] = torch.empty_like(x).copy_(x.flatten()[order].view(x.shape))
    return leaves
