"""Triton kernels launched during a recorded step: the dispatcher does not see them, their launcher does."""

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
            cls = getattr(sys.modules.get(module), name, None)
            if cls is None:
                continue
            own = cls.run
            stack.callback(setattr, cls, "run", own)
            cls.run = _watched_launch(state, own)
        yield


def _watched_launch(state: State, run: Callable) -> Callable:
    @wraps(run)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in((args, kwargs)))
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
    return [None if (number := fingerprint([tensor])) is None else float(number) for tensor in tensors]
