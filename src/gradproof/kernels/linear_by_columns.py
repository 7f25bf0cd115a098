"""Cross-entropy of a linear layer in the least memory: slabs of the vocabulary, and all logits made twice.

A slab of columns has all positions, so its rows of dweight are one product, and no float32 sum of dweight is needed.
But a row's softmax is known only after all slabs: the first pass keeps the log-sum-exp of each slab, the second
gives the loss kernel the slab and, as one more column, the log-sum-exp of all others. To the kernel that column is
a class like any other, and the target where the target is in another slab.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gradproof.kernels.cross_entropy import backend_of
from gradproof.kernels.loss_options import LossOptions, valid_positions
from gradproof.kernels.product import multiply

# N positions, D width of hidden
ROOM = 64  # columns of memory for the one more, so that rows stay aligned


def columns_of_a_slab(n: int, d: int, size: int) -> int:
    """How many columns of float32 logits and 16-bit gradients, with dhidden in float32, take `size` bytes.

    A sixty-fourth is left for what has an entry for each position and slab.
    """
    columns = (size * 63 // 64 - 4 * n * d) // (6 * max(1, n)) - ROOM
    return max(64, columns // 64 * 64)


def by_columns(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each row of hidden (N, D); fills dhidden and dweight."""
    (n, d), v = hidden.shape, len(weight)
    width = min(columns_of_a_slab(n, d, size), v)
    logits = torch.empty(n, width + ROOM, device=hidden.device)
    dlogits = torch.empty(n, width + ROOM, dtype=weight.dtype, device=hidden.device)
    total = None if dhidden is None else torch.zeros(n, d, device=hidden.device)
    one, anywhere = torch.ones((), dtype=torch.float64, device=hidden.device), torch.zeros_like(targets)
    plain, losses_and_gradient = LossOptions(reduction="none"), backend_of(hidden).losses_and_gradient

    slabs = weight.split(width)
    lses = torch.empty(len(slabs), n, dtype=torch.float64, device=hidden.device)
    for lse, rows in zip(lses, slabs, strict=True):
        x = logits[:, : len(rows)]
        multiply(hidden, rows.mT, out=x)
        lse.copy_(losses_and_gradient(x, anywhere, None, None, plain, one, None)[1])

    valid = valid_positions(targets, mask, options.ignore_index)
    options = replace(options, ignore_index=-100)
    losses = torch.full((n,), torch.nan, device=hidden.device)
    for i, rows in enumerate(slabs):
        start, end = i * width, i * width + len(rows)
        x, dx = logits[:, : len(rows) + 1], dlogits[:, : len(rows) + 1]
        multiply(hidden, rows.mT, out=x[:, :-1])
        x[:, -1] = torch.cat((lses[:i], lses[i + 1 :])).logsumexp(0)
        here = (targets >= start) & (targets < end)
        elsewhere = torch.where((targets >= 0) & (targets < v), len(rows), -1)  # -1: not a class, NaN
        y = torch.where(here, targets - start, elsewhere).where(valid, -100)
        found, _ = losses_and_gradient(x, y, None, None, options, scale, dx)
        losses = torch.where(here, found, losses)
        torch.mm(dx[:, :-1].mT, hidden, out=dweight[start:end])
        if total is not None:
            multiply(dx[:, :-1], rows, out=total, add=True)
    if dhidden is not None and total is not None:
        dhidden.copy_(total)
    return torch.where(valid, losses, 0), torch.where(valid, lses.logsumexp(0), 0).float()
