"""Fused attention in a replay: as the formula in any precision; with dropout, by the kernel with its own numbers.

The fused operators know no float64 on a GPU. Without dropout all of them compute softmax(q kᵀ · scale + bias) v, so
that is what is replayed. With dropout the mask exists only inside the kernel: the state of the generator before the
call is kept, and the kernel is run again from there, in its own precision. Its backward is PyTorch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradproof.tape.operators import argument


def attention_formula(func: Callable, args: tuple, kwargs: dict) -> tuple:
    """What a fused attention operator computes without dropout; (B, H, T, D)."""
    weights, _, value, _ = attention_weights(func, args, kwargs)
    out = weights @ value
    # the memory order of the fused operators is (B, T, H, D): the views that follow rely on it
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return (out,)  # what else they return only their own backward reads


def attention_weights(
    func: Callable, args: tuple, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(weights (B, H, T, S), key, value, scale): key and value once for each head that reads them."""
    query, key, value = args[:3]
    bias = argument(func, args, kwargs, "attn_bias")
    if bias is None:
        bias = argument(func, args, kwargs, "attn_mask")
    scale = argument(func, args, kwargs, "scale")
    factor = scale if isinstance(scale, float) else 1.0 / math.sqrt(query.shape[-1])
    if key.shape[1] != query.shape[1]:  # grouped queries
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = (query @ key.mT) * factor
    if argument(func, args, kwargs, "is_causal", False):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if isinstance(bias, torch.Tensor):
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    if not isinstance(bias, torch.Tensor):
        return torch.softmax(scores, -1), key, value, factor
    nothing = scores.amax(-1, keepdim=True) == -math.inf  # a row without any key gives zero, not NaN
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    return weights, key, value, factor


def generator_state(device: torch.device) -> torch.Tensor:
    """What a kernel on this device will draw its random numbers from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def drawing_from(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Random numbers as they were drawn from a kept state; afterwards the generator is where it was."""
    now = generator_state(device)
    _set_generator(state, device)
    try:
        yield
    finally:
        _set_generator(now, device)


def _set_generator(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def attention_with_dropout(func: Callable, args: tuple, kwargs: dict, state: torch.Tensor) -> Any:
    """The kernel again, with the mask it drew."""
    with drawing_from(state, args[0].device):
        return func(*args, **kwargs)
