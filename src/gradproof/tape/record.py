"""Records one training step as a list of operations, without keeping what the operations compute.

    with record(names={p: n for n, p in model.named_parameters()}) as tape:
        loss = loss_fn(model(x), y)
        loss.backward()

Nothing is installed while no step is recorded. A recorder that fails stops recording (`tape.broken` says
why); it never raises into the training it watches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradproof.tape.calls import (
    eager_compiler,
    enter_optimizer,
    leave_optimizer,
    watched_clearing,
    watched_functions,
    watched_modules,
    watched_optimizers,
)
from gradproof.tape.engine import watched_backwards
from gradproof.tape.kernels import watched_kernels
from gradproof.tape.operations import Tape
from gradproof.tape.state import State

Names = Mapping[torch.Tensor, str] | Callable[[torch.Tensor], str | None]


@contextmanager
def record(names: Names | None = None) -> Iterator[Tape]:
    """Tapes what happens inside the block; the tape is complete when the block ends."""
    recorder = Recorder(names)
    tape = recorder.start()
    try:
        yield tape
    finally:
        recorder.stop()


class Recorder:
    """Tapes from start() to stop(); both may be called anywhere in a training loop."""

    def __init__(self, names: Names | None = None) -> None:
        self.tape = Tape()
        self._name_of = names if callable(names) else (names or {}).get
        self._known_parameters = [] if names is None or callable(names) else list(names)
        self._stack = ExitStack()

    def start(self, inside_optimizer_hook: bool = False) -> Tape:
        """Begins to tape; what cannot be installed ends in `tape.broken`, not in an exception.

        Inside a hook of an optimizer no other can be registered: there, tell by enter_optimizer and leave_optimizer.
        """
        self.state = State(self.tape, self._name_of, self._known_parameters)
        self._inside_optimizer_hook = inside_optimizer_hook
        self._listen()
        return self.tape

    def _listen(self) -> None:
        try:
            for watched in WATCHES:
                if self._inside_optimizer_hook and watched is watched_optimizers:
                    continue
                self._stack.enter_context(watched(self.state))
            self._stack.enter_context(_Mode(self.state))
        except Exception as error:
            self.tape.broken = f"recording could not start: {error!r}"
            self._stack.close()

    @contextmanager
    def interrupted(self) -> Iterator[Tape]:
        """The tape as it stands, to be replayed while nothing is recorded; afterwards recording goes on."""
        self._stack.close()
        try:
            yield replace(self.tape)  # what is worked out of it now will not hold for the whole tape
        finally:
            self._listen()

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        enter_optimizer(self.state, optimizer)

    def leave_optimizer(self) -> None:
        leave_optimizer(self.state)

    def stop(self) -> Tape:
        """Ends the tape, which owns everything it needs from here on."""
        self._stack.close()
        self.state.finish()
        return self.tape


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True  # they are taped as one operation

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and its kin unfold themselves, and come back here
        state = self.state
        foreign = state.tape.broken or state.paused or state.pid != os.getpid()
        if foreign or getattr(func, "namespace", "") == "profiler":
            return func(*args, **kwargs)
        grad_enabled = state.grad_enabled = torch.is_grad_enabled()
        with torch.no_grad():
            pending = state.guarded(state.before, func, args, kwargs, grad_enabled)
        result = func(*args, **kwargs)
        if pending is not None:
            with torch.no_grad():
                state.guarded(state.after, pending, func, args, kwargs, result)
        return result


WATCHES = (
    watched_modules,
    watched_functions,
    watched_backwards,
    watched_optimizers,
    watched_clearing,
    watched_kernels,
    eager_compiler,
)
