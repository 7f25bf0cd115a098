"""What the tape has to know about an operator: what it writes, whether it is random, what it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
READS_NO_VALUES = FRESH | {
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "is_same_size", "sym_size", "record_stream",
}  # fmt: skip
OVERWRITES = {
    "zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_", "bernoulli_", "normal_", "uniform_",
    "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
}  # fmt: skip
BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"}
FUSED_ATTENTION = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
}  # fmt: skip

# the mask of their dropout exists only inside them
DROPS_INSIDE = FUSED_ATTENTION | {"_flash_attention_forward", "_efficient_attention_forward"}
# of what they make so much is written to the last number; behind it lies scratch, part of it fresh memory
WRITTEN_RESULTS = {"_ctc_loss": 1}
OWN_NAMESPACES = {"aten", "prims", "c10d", "_c10d_functional", "higher_order", "mkldnn", "quantized"}


@cache
def name_of(func: Callable) -> str:
    packet = getattr(func, "overloadpacket", func)
    return getattr(packet, "__name__", str(packet))


def is_collective(func: Callable) -> bool:
    return getattr(func, "namespace", "") in ("c10d", "_c10d_functional")


def has_own_backward(func: Callable) -> bool:
    """True for an operator from outside PyTorch."""
    return getattr(func, "namespace", "aten") not in OWN_NAMESPACES


@cache
def written_arguments(func: Callable) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments an operator changes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    hidden = ("running_mean", "running_var") if name_of(func) in BATCH_NORMS else ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden
    )


@cache
def is_view(func: Callable) -> bool:
    """True when a result looks into an argument's memory, so that nothing is computed."""
    schema = getattr(func, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returns)


@cache
def _is_seeded(func: Callable) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@cache
def _is_given_its_seed(func: Callable) -> bool:
    return any(declared.name == "philox_seed" for declared in func._schema.arguments)  # type: ignore[attr-defined]


class Traits(NamedTuple):
    """What the tape asks about an operator at each of its calls, found once."""

    name: str
    writes: tuple[tuple[int, str], ...]
    views: bool
    fresh: bool  # makes memory and leaves it as it is
    reads_values: bool
    collective: bool
    foreign: bool
    seeded: bool
    drops_inside: bool
    profiles: bool


@cache
def traits_of(func: Callable) -> Traits:
    name = name_of(func)
    return Traits(
        name,
        written_arguments(func),
        is_view(func),
        name in FRESH,
        name not in READS_NO_VALUES and not is_view(func),
        is_collective(func),
        has_own_backward(func),
        _is_seeded(func),
        name in DROPS_INSIDE,
        getattr(func, "namespace", "") == "profiler",
    )


def argument(func: Callable, args: tuple, kwargs: dict, name: str, default: object = None) -> object:
    """An argument by its name in the schema, however it was passed."""
    if name in kwargs:
        return kwargs[name]
    for position, declared in enumerate(func._schema.arguments):  # type: ignore[attr-defined]
        if declared.name == name:
            if position < len(args):
                return args[position]
            return declared.default_value if declared.has_default_value() else default
    return default


RRELU = ("rrelu_with_noise", "rrelu_with_noise_")


def is_random(func: Callable, args: tuple, kwargs: dict) -> bool:
    """True when the result depends on the random generator."""
    if not _is_seeded(func):
        return False
    if _is_given_its_seed(func):  # the backward of a fused attention draws nothing itself
        return False
    if name_of(func) in DROPS_INSIDE:
        return bool(argument(func, args, kwargs, "dropout_p", 0.0))
    if name_of(func) in ("_cudnn_rnn", "miopen_rnn", "_fused_rms_norm"):
        return False
    if name_of(func) in RRELU:  # in evaluation it is a leaky ReLU, and its noise stays as it was
        return bool(argument(func, args, kwargs, "training", False))
    if name_of(func) == "native_dropout":
        return argument(func, args, kwargs, "train", True) is not False and bool(
            argument(func, args, kwargs, "p", 0.5)
        )
    return True


def ignores_first_argument(func: Callable, args: tuple, kwargs: dict) -> bool:
    """addmm and its kin with beta = 0 never read what they add to."""
    if name_of(func) not in ("addmm", "baddbmm", "addbmm", "addmv", "addr"):
        return False
    return argument(func, args, kwargs, "beta", 1) == 0
