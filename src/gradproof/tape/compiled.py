"""Tapes a step whose modules were compiled, and leaves the step as it is to the last bit.

An active tape would run compiled code operation by operation, with other roundings. So each call of a compiled module
is made twice: once eagerly, under the tape, from the same arguments and random numbers, and once as it is, with no tape
in sight; that one's results are the training's, and stand for the taped ones in what follows. Backward runs unseen: the
gradients that it brought are leaves of the tape, beside the derivative that a replay computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradproof.tape.operators import is_random
from gradproof.tape.tensors import geometry_of, storage_key, tensors_in

if TYPE_CHECKING:
    from gradproof.tape.state import State

Suspended = Callable[[], AbstractContextManager[Any]]


@contextmanager
def compiled_calls(state: State, suspended: Suspended) -> Iterator[None]:
    """While it lasts, calls of compiled modules are taped from their eager twins."""
    classes: list[Any] = [nn.Module, *(cls for cls in _wrappers() if "__call__" in vars(cls))]
    with ExitStack() as stack:
        for cls in classes:
            own: Any = cls.__call__
            stack.callback(setattr, cls, "__call__", own)
            setattr(cls, "__call__", _taped_call(state, suspended, own))  # noqa: B010
        yield


def _wrappers() -> list[type[nn.Module]]:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return [eval_frame.OptimizedModule] if eval_frame is not None else []


def _taped_call(state: State, suspended: Suspended, own: Callable) -> Callable:
    @wraps(own)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_compiled(self) or state.twin or state.idle or state.tape.broken or state.paused:
            return own(self, *args, **kwargs)
        return _call_twice(state, suspended, own, self, args, kwargs)

    return call


def is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None
    )


def _call_twice(
    state: State, suspended: Suspended, own: Callable, module: nn.Module, args: tuple, kwargs: dict
) -> Any:
    state.tape.compiled = True
    eager = state.guarded_call(lambda: _eager_twin(state, module, args, kwargs))
    with suspended():
        real = own(module, *args, **kwargs)
    state.guarded(_stand_in, state, tensors_in(real), eager)
    return real


def _eager_twin(state: State, module: nn.Module, args: tuple, kwargs: dict) -> list[Tensor]:
    """The call operation by operation; generators and buffers are afterwards as they were, and no graph is kept."""
    inner: Any = module._orig_mod if type(module).__name__ == "OptimizedModule" else module
    buffers = [(buffer, buffer.detach().clone()) for buffer in inner.buffers()]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    before = len(state.tape.operations)
    state.twin = True
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(_drop, _gone),
            torch.compiler.set_stance("force_eager"),
        ):
            output = nn.Module._call_impl(inner, *args, **kwargs)
    finally:
        state.twin = False
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        with state.unseen(), torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    made = state.tape.operations[before:]
    if any(is_random(op.func, op.args, op.kwargs) for op in made):
        state.tape.drawn_apart = True  # compiled code draws random numbers in its own way
    return tensors_in(output)


def _drop(tensor: Tensor) -> None:
    return None


def _gone(nothing: None) -> Tensor:
    raise RuntimeError("gradproof: an eager twin has no backward")


def _stand_in(state: State, real: list[Tensor], eager: list[Tensor] | None) -> None:
    """What compiled code returned takes the slots of what the tape saw computed."""
    if eager is None or len(eager) != len(real):
        raise RuntimeError("a compiled module returned something else than its eager twin")
    for ours, theirs in zip(eager, real, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise RuntimeError("a compiled module returned other shapes than its eager twin")
        slot = state.slot(ours)
        state.slot_of[theirs._cdata] = slot
        state.pins.tensor(theirs)
        key = storage_key(theirs)
        if key is not None and slot not in state.on_storage.setdefault(key, []):
            state.on_storage[key].append(slot)
            state.geometry[slot] = geometry_of(theirs)
