"""Kernels that the dispatcher does not see in a recorded step: Triton's launches, and memory lent by its address."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from gradproof.tape.tensors import fingerprint, tensors_in

if TYPE_CHECKING:
    from gradproof.tape.state import State


@contextmanager
def watched_kernels(state: State) -> Iterator[None]:
    """Notes which memory a Triton kernel changes: its launch is no operation of PyTorch."""
    with ExitStack() as stack:
        for module, name in (
            ("triton.runtime.jit", "JITFunction"),
            ("triton.runtime.interpreter", "InterpretedFunction"),
        ):
            cls: Any = getattr(sys.modules.get(module), name, None)
            own = getattr(cls, "run", None)
            if own is None:  # not loaded, or a Triton of 3.2 whose interpreter has a `run` for each kernel
                continue
            stack.callback(setattr, cls, "run", own)
            cls.run = _watched_launch(state, own)
        yield


@contextmanager
def watched_addresses(state: State) -> Iterator[None]:
    """Notes whose memory is handed to code outside PyTorch by its address, as ctypes does."""
    own = torch.Tensor.data_ptr

    def lend(tensor: torch.Tensor) -> None:
        number = _fingerprints([tensor])[0]
        state.lent.append((tensor, number))

    @wraps(own)
    def watched(self: torch.Tensor) -> int:
        seen = not (state.idle or state.paused or state.tape.broken) and torch._C._len_torch_dispatch_stack()
        seen = seen and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        if seen and not any(tensor is self for tensor, _ in state.lent):
            state.guarded(lend, self)
        return own(self)

    torch.Tensor.data_ptr = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del torch.Tensor.data_ptr  # its base class has the real one


def _watched_launch(state: State, run: Callable) -> Callable:
    @wraps(run)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.idle or state.tape.broken or not torch._C._len_torch_dispatch_stack():
            return run(self, *args, **kwargs)  # a measurement of ours: the tape's mode is away meanwhile
        tensors = tensors_in((args, kwargs))
        outer, state.paused = state.paused, True  # what we look at is no part of the step
        before = state.guarded(_fingerprints, tensors)
        for tensor in tensors if state.optimizer_depth else ():
            state.guarded(state.keep_before_write, tensor, "")  # a fused optimizer writes the parameters
        try:
            return run(self, *args, **kwargs)
        finally:
            if before is not None and not outer:
                state.guarded(state.changed_outside, tensors, before)
                if state.call is not None:
                    state.call.opaque = f"the Triton kernel {getattr(self, '__name__', '?')} computes in it"
            state.paused = outer

    return watched


def _fingerprints(tensors: list[torch.Tensor]) -> list[float | None]:
    numbers = [fingerprint([tensor.detach()]) for tensor in tensors]
    return [None if number is None else float(number) for number in numbers]
