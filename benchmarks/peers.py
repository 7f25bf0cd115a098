"""The same computations by others: torch, torch.compile, and Liger, CCE and quack where installed."""

from __future__ import annotations

import torch
from torch import Tensor

from gradproof.kernels.tensor_stats import LIMITS


def ce_peers(x: Tensor, y: Tensor) -> dict:
    """name -> a function that returns the mean loss."""

    def plain(logits, targets):
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    compiled = torch.compile(plain, dynamic=False)
    peers = {"eager": lambda: plain(x, y), "compile": lambda: compiled(x, y)}
    try:
        from quack.cross_entropy import cross_entropy as quack_ce

        peers["quack"] = lambda: quack_ce(x, y, ignore_index=-100, reduction="mean")
    except ImportError:
        pass
    try:
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        peers["liger"] = lambda: LigerCrossEntropyFunction.apply(x, y)[0]  # last: it overwrites its input
    except ImportError:
        pass
    return peers


def linear_peers(h: Tensor, w: Tensor, y: Tensor) -> dict:
    def plain(h, w, y):
        return torch.nn.functional.cross_entropy((h @ w.mT).float(), y)

    peers = {"eager": lambda: plain(h, w, y)}
    compiled = torch.compile(plain, dynamic=False)
    peers["compile"] = lambda: compiled(h, w, y)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        peers["liger"] = lambda: LigerFusedLinearCrossEntropyFunction.apply(h, w, y)[0]
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy as cce

        peers["cce"] = lambda: cce(h, w, y)
    except ImportError:
        pass
    return peers


def separate_operators(tensors: list[Tensor]) -> Tensor:
    """The same statistics, one torch operator after the other."""
    rows = []
    for x in tensors:
        size = x.abs()
        tiny = torch.finfo(x.dtype).tiny
        row = [
            torch.full((), float(x.numel()), device=x.device),
            x.isnan().sum(),
            x.isinf().sum(),
            (x == 0).sum(),
            ((size < tiny) & (x != 0)).sum(),
            x.min(),
            x.max(),
            size.max(),
            x.sum(dtype=torch.float64),
            (x * x).sum(dtype=torch.float64),
            *((size > limit).sum() for limit in LIMITS),
        ]
        rows.append(torch.stack([number.double() for number in row]))
    return torch.stack(rows)
