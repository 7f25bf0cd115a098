"""The same computations by others: torch, torch.compile, and Liger, CCE and quack where installed.

Each is called through its public function. One that is installed and cannot be loaded raises when it is timed: a cell
of the table says why.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradproof.kernels.tensor_stats import LIMITS


def public(module: str, name: str) -> Callable[..., Any] | None:
    """A peer's public function: None where it is not installed, one that raises the reason where it does not load."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        reason = error
        return None if missing == module.partition(".")[0] else lambda *args, **kwargs: throw(reason)


def throw(error: Exception) -> None:
    raise error


def ce_peers(x: Tensor, y: Tensor) -> dict:
    """name -> a function that returns the mean loss."""

    def plain(logits, targets):
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    compiled = torch.compile(plain, dynamic=False)
    peers = {"eager": lambda: plain(x, y), "compile": lambda: compiled(x, y)}
    if quack := public("quack.cross_entropy", "cross_entropy"):
        peers["quack"] = lambda: quack(x, y, ignore_index=-100, reduction="mean")
    if liger := public("liger_kernel.transformers.functional", "liger_cross_entropy"):
        peers["liger"] = lambda: liger(x, y)  # last: it overwrites its input
    return peers


def linear_peers(h: Tensor, w: Tensor, y: Tensor) -> dict:
    def plain(h, w, y):
        return torch.nn.functional.cross_entropy((h @ w.mT).float(), y)

    peers = {"eager": lambda: plain(h, w, y)}
    compiled = torch.compile(plain, dynamic=False)
    peers["compile"] = lambda: compiled(h, w, y)
    if liger := public("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"):
        peers["liger"] = lambda: liger(h, w, y)
    if cce := public("cut_cross_entropy", "linear_cross_entropy"):
        peers["cce"] = lambda: cce(h, w, y)
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
