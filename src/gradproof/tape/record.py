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
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradproof.tape.aside import Ahead, Room
from gradproof.tape.calls import (
    ctc_by_numbers,
    eager_compiler,
    enter_optimizer,
    leave_optimizer,
    left_to_tracers,
    watched_clearing,
    watched_functions,
    watched_modules,
    watched_optimizers,
)
from gradproof.tape.collector import rare_full_collections
from gradproof.tape.compiled import compiled_calls
from gradproof.tape.engine import watched_backwards
from gradproof.tape.kernels import watched_addresses, watched_kernels
from gradproof.tape.living import Living
from gradproof.tape.modes import below_all, unseen_by_modes
from gradproof.tape.operations import Tape
from gradproof.tape.operators import traits_of
from gradproof.tape.shards import is_hypothetical
from gradproof.tape.state import State

Names = Mapping[torch.Tensor, str] | Living[str] | Callable[[torch.Tensor], str | None]


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

    def __init__(self, names: Names | None = None, *, waits: bool = False, compiled: bool = False) -> None:
        """`waits`: a long preparation is forgotten, and the tape begins with the step's own forward pass.

        `compiled`: what torch.compile has made is run as it is, and taped from its calls, made beforehand.
        """
        self._waits, self._compiled = waits, compiled
        known: Living[str] = Living(() if names is None or callable(names) else names.items())
        self._name_of = names if callable(names) else known.get
        self._known_parameters = known
        self._stack = ExitStack()

    @property
    def tape(self) -> Tape:
        return self.state.tape

    def start(self, inside_optimizer_hook: bool = False) -> Tape:
        """Begins to tape; what cannot be installed ends in `tape.broken`, not in an exception.

        Inside a hook of an optimizer no other can be registered: there, tell by enter_optimizer and leave_optimizer.
        """
        with unseen_by_modes():
            self.state = State(Tape(), self._name_of, self._known_parameters, waits=self._waits)
        self._inside_optimizer_hook = inside_optimizer_hook
        self._listen()
        return self.tape

    def _listen(self) -> None:
        try:
            self._stack.enter_context(rare_full_collections())
            for watched in WATCHES:
                if self._inside_optimizer_hook and watched is watched_optimizers:
                    continue
                self._stack.enter_context(watched(self.state))
            if self._compiled:
                self.state.suspended = self.interrupted
                self._stack.enter_context(compiled_calls(self.state, self.interrupted))
            else:
                self._stack.enter_context(eager_compiler(self.state))
            self._stack.enter_context(below_all(_Mode(self.state)))
        except Exception as error:
            self.tape.broken = f"recording could not start: {error!r}"
            self._stack.close()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Nothing is recorded, and nothing of ours is in sight; afterwards recording goes on."""
        self._stack.close()
        try:
            yield
        finally:
            self._listen()

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        enter_optimizer(self.state, optimizer)

    def leave_optimizer(self) -> None:
        leave_optimizer(self.state)

    def stop(self) -> Tape:
        """Ends the tape, which owns everything it needs from here on."""
        self._stack.close()
        with unseen_by_modes(), rare_full_collections():
            self.state.finish()
        return self.tape

    def leave(self) -> None:
        """Nothing of ours is on the script's way any more; the tape stays as it is."""
        self._stack.close()

    def copy_ahead(self, memories: dict[int, torch.Tensor], room: Room | None = None) -> None:
        """Begin to copy what the update will overwrite; until then nobody may change it unseen."""
        with unseen_by_modes():
            self.state.ahead = Ahead(memories, room)


_is_tracing = torch._C._is_tracing  # what is done beside a traced operation would be in the user's graph


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True  # they are taped as one operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled code ever runs below this mode; the guard would cost 20 µs an operation

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        state, traits = self.state, traits_of(func)
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            if state.sharded and not state.backward and not torch.is_grad_enabled():
                return func(*args, **kwargs)  # an update or a norm of parts, which the ranks make together
            return NotImplemented  # DTensor and its kin unfold themselves, and come back here
        if state.sharded and is_hypothetical(types, args, kwargs):
            return func(*args, **kwargs)
        foreign = state.tape.broken or state.idle or state.paused or state.pid != os.getpid() or _is_tracing()
        if traits.profiles and state.talk.hear(traits.name, args):
            state.sharded = True
        if foreign or traits.profiles or state.talk.depth:
            return func(*args, **kwargs)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            state.tape.broken = "a CUDA graph is captured: nothing of ours may run on its stream"
            return func(*args, **kwargs)
        grad_enabled = state.grad_enabled = torch.is_grad_enabled()
        pending = state.beside(state.before, traits, func, args, kwargs, grad_enabled)
        result = func(*args, **kwargs)
        if pending is not None:
            state.beside(state.after, pending, traits, func, args, kwargs, result)
        return result


WATCHES = (
    watched_modules,
    watched_functions,
    watched_backwards,
    watched_optimizers,
    watched_clearing,
    watched_kernels,
    watched_addresses,
    ctc_by_numbers,
    left_to_tracers,
)
