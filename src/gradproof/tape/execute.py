"""Runs one recorded operator again, in its own precision or in another, and says so when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradproof.tape.attention import attention_formula, attention_with_dropout
from gradproof.tape.operations import Operation, Ref, Slot, replace_references
from gradproof.tape.operators import (
    DROPS_INSIDE,
    FRESH,
    FUSED_ATTENTION,
    RRELU,
    argument,
    name_of,
    written_arguments,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class CannotReplay(Exception):
    """Why an operator could not be run again."""


def converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in another precision; integers and booleans stay what they are."""
    if dtype is None:
        return tensor
    if tensor.is_floating_point():
        return tensor.to(dtype)
    if tensor.is_complex() and dtype in _COMPLEX:
        return tensor.to(_COMPLEX[dtype])
    return tensor


def execute(
    operation: Operation,
    value: Callable[[Ref], torch.Tensor],
    slots: list[Slot],
    dtype: torch.dtype | None,
    fresh: float,
) -> tuple[Any, str]:
    """(result, note): the operator run again; the note says when it was not run as recorded."""
    func, name = operation.func, operation.name
    if operation.frozen is not None and name in DROPS_INSIDE:
        return _attention_with_dropout(operation, value, slots, dtype)
    if operation.frozen is not None and not operation.writes and name != "native_dropout":
        return _frozen_constants(operation, operation.frozen, dtype), ""
    if operation.kept is not None and is_foreign(func):
        note = f"{name} comes from outside PyTorch and is not installed here: its recorded results were taken"
        return _frozen_constants(operation, operation.kept, dtype), note
    args = replace_references(operation.args, value)
    kwargs = replace_references(operation.kwargs, value)
    if operation.frozen is not None:
        return _frozen_result(operation, args, kwargs, dtype), ""
    if name in FRESH:
        return _fresh_memory(func, args, kwargs, dtype, fresh), ""
    if name == "detach" and operation.call is not None:
        return torch.ops.aten.alias.default(args[0]), ""  # inside a custom forward nothing is followed anyway
    if torch.is_grad_enabled() and any(key in kwargs for _, key in written_arguments(func)):
        return _functional_out(func, args, kwargs, dtype), ""
    if dtype is None or not hasattr(func, "_schema"):
        return func(*args, **kwargs), ""
    if name in FUSED_ATTENTION:
        return attention_formula(func, args, kwargs), ""
    if not any(isinstance(part, torch.Tensor) for part in _flat((args, kwargs))):
        return _map(func(*args, **kwargs), lambda t: converted(t, dtype)), ""  # a constant: as it was
    if name == "view" and any(isinstance(part, torch.dtype) for part in args):
        return _own_precision(operation, value, slots, dtype, TypeError("looks at bits"))
    try:
        result = func(*_in_precision(name, args, dtype), **_in_precision(name, kwargs, dtype))
        return _map(result, lambda t: converted(t, dtype)), ""
    except Exception as error:
        return _own_precision(operation, value, slots, dtype, error)


def _own_precision(
    operation: Operation, value: Callable, slots: list[Slot], dtype: torch.dtype, error: Exception
) -> tuple[Any, str]:
    """The operator knows no other precision: lower its arguments, run it, raise its results."""
    if operation.writes:
        return _written_in_own_precision(operation, value, slots, dtype, error)
    if operation.name == "view" and not any(isinstance(part, torch.dtype) for part in operation.args):
        args = replace_references(operation.args, value)
        return args[0].reshape(args[1]), ""  # another memory layout than recorded
    args, kwargs = _lowered(operation, value, slots)
    try:
        result = operation.func(*args, **kwargs)
    except Exception as second:
        raise CannotReplay(f"{operation.name} cannot be run again: {_first_line(second)}") from second
    return _map(result, lambda t: converted(t, dtype)), f"{operation.name} was run in its own precision"


def _written_in_own_precision(
    operation: Operation, value: Callable, slots: list[Slot], dtype: torch.dtype, error: Exception
) -> tuple[Any, str]:
    """The same for what is changed in place: it is changed in a copy, and copied back. A GradScaler's scale is such."""
    lowered: dict[int, torch.Tensor] = {}

    def lower(ref: Ref) -> torch.Tensor:
        tensor = value(ref)
        if ref.slot in operation.writes and tensor.requires_grad:
            raise CannotReplay(f"{operation.name} cannot be run in {dtype}: {_first_line(error)}") from error
        return lowered.setdefault(
            ref.slot, tensor.to(slots[ref.slot].dtype) if tensor.is_floating_point() else tensor
        )

    args, kwargs = replace_references((operation.args, operation.kwargs), lower)
    try:
        with torch.no_grad():
            result = operation.func(*args, **kwargs)
            for slot in operation.writes:
                value(Ref(slot, False)).copy_(lowered[slot])
    except (RuntimeError, TypeError, KeyError) as second:
        raise CannotReplay(f"{operation.name} cannot be run again: {_first_line(second)}") from second
    exact = operation.name.startswith("_amp_")  # powers of two, and whether something was infinite
    note = "" if exact else f"{operation.name} was run in its own precision"
    return _map(result, lambda t: converted(t, dtype)), note


def _lowered(operation: Operation, value: Callable, slots: list[Slot]) -> tuple[tuple, dict]:
    """The arguments in the precision in which they were recorded."""

    def lower(ref: Ref) -> torch.Tensor:
        tensor = value(ref)
        return tensor.to(slots[ref.slot].dtype) if tensor.is_floating_point() else tensor

    return replace_references((operation.args, operation.kwargs), lower)


def _attention_with_dropout(
    operation: Operation, value: Callable, slots: list[Slot], dtype: torch.dtype | None
) -> tuple[Any, str]:
    assert operation.frozen is not None
    args, kwargs = _lowered(operation, value, slots)
    result = attention_with_dropout(operation.func, args, kwargs, operation.frozen[0])
    note = f"{operation.name} was run in its own precision: only the kernel knows what its dropout dropped"
    return _map(result, lambda t: converted(t, dtype)), note if dtype is not None else ""


def _functional_out(func: Any, args: tuple, kwargs: dict, dtype: torch.dtype | None) -> Any:
    """op(…, out=x) as x.copy_(op(…)): autograd follows the second, not the first."""
    outs = [kwargs[key] for _, key in written_arguments(func) if key in kwargs]
    rest = {key: part for key, part in kwargs.items() if key not in {k for _, k in written_arguments(func)}}
    if dtype is not None:
        args, rest = _in_precision(name_of(func), args, dtype), _in_precision("", rest, dtype)
    made = func.overloadpacket(*args, **rest)
    values = [made] if isinstance(made, torch.Tensor) else list(made)
    for out, value in zip(outs, values, strict=True):
        out.copy_(value)
    return outs[0] if isinstance(made, torch.Tensor) else tuple(outs)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:160]


def _frozen_result(operation: Operation, args: tuple, kwargs: dict, dtype: torch.dtype | None) -> Any:
    """A random operator with its recorded numbers: dropout by its mask, in-place ones by what they left."""
    assert operation.frozen is not None
    if operation.name == "native_dropout":
        mask = operation.frozen[1]
        p = argument(operation.func, args, kwargs, "p", 0.5)
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0  # type: ignore[operator]
        return args[0] * mask * scale, mask
    if operation.name in RRELU:
        noise = converted(operation.frozen[-1], dtype)
        args[1].copy_(noise)
        return args[0].mul_(noise) if operation.name.endswith("_") else args[0] * noise
    targets = [args[0]] if isinstance(args[0], torch.Tensor) else list(args[0])
    for target, frozen in zip(targets, operation.frozen, strict=True):
        with torch.no_grad():
            target.detach().copy_(frozen)
    return args[0]


def is_foreign(func: Callable) -> bool:
    """An operator that this process knows only by name."""
    return not hasattr(func, "_schema") and hasattr(func, "backward_line")


def _frozen_constants(operation: Operation, kept: tuple, dtype: torch.dtype | None) -> Any:
    """Recorded results as they were; nothing leads from the arguments to them."""
    values = [
        converted(frozen.to(dtype=_recorded_dtype(operation, frozen), copy=True), dtype) for frozen in kept
    ]
    return values[0] if isinstance(operation.results, Ref) else tuple(values)


def _recorded_dtype(operation: Operation, frozen: torch.Tensor) -> torch.dtype:
    if not operation.name.startswith("bernoulli"):
        return frozen.dtype
    return torch.get_default_dtype() if frozen.dtype == torch.bool else frozen.dtype


def _fresh_memory(
    func: Callable, args: tuple, kwargs: dict, dtype: torch.dtype | None, fresh: float
) -> torch.Tensor:
    result = (
        func(*args, **_in_precision(name_of(func), kwargs, dtype))
        if dtype is not None
        else func(*args, **kwargs)
    )
    result = converted(result, dtype)
    with torch.no_grad():
        return result.fill_(fresh) if result.is_floating_point() or result.is_complex() else result.zero_()


def _in_precision(name: str, tree: Any, dtype: torch.dtype) -> Any:
    """Arguments that name a precision follow the replay's."""
    if isinstance(tree, torch.dtype):
        if tree in _FLOATS:
            return dtype
        return _COMPLEX.get(dtype, tree) if tree.is_complex else tree
    if isinstance(tree, dict):
        return {key: _in_precision(name, part, dtype) for key, part in tree.items()}
    if isinstance(tree, tuple) and name in ("_softmax", "_log_softmax"):
        return (*tree[:2], False)  # half_to_float
    if isinstance(tree, (tuple, list)):
        return type(tree)(_in_precision("", part, dtype) for part in tree)
    return tree


def _flat(tree: Any) -> list:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for part in tree for leaf in _flat(part)] if isinstance(tree, (tuple, list)) else [tree]


def _map(tree: Any, function: Callable) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(part, function) for part in tree)
    return tree
