"""Runs the model's calls of a step again, from what they were called with: for a NaN in a step that was not taped.

Each call of a model is remembered until the step ends: its arguments by reference, the states of the random
generators, autocast, and the gradient that came back to its output. Parameters change only in the update, so before
it everything is there. What is left out: code around the model (the loss), arguments that were changed in place
since, models that remember calls, and several processes, where running again would talk to the others.
"""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.probes.aside import is_recorded
from gradproof.probes.distributed import rank_and_world
from gradproof.probes.guard import raised_by_signal
from gradproof.probes.modules import recomputing
from gradproof.probes.modules import tensors_in as outputs_in
from gradproof.tape.living import Living, alive
from gradproof.tape.modes import unseen_by_modes
from gradproof.tape.record import Recorder
from gradproof.tape.tensors import map_tensors, nbytes, tensors_in

MOST_CALLS = 16  # of one step: micro-batches, players
LARGEST_GRADIENT = (
    64 << 20
)  # bytes: a larger output's gradient is not kept, and only its forward is run again
DEVICES = ("cpu", "cuda")


@dataclass
class Call:
    """One call of a model, with what it takes to make it again."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    generators: dict[str, Tensor]
    autocasts: list[tuple[str, torch.dtype]]
    gradients: dict[int, Tensor] = field(default_factory=dict)  # output -> gradient that came back to it


@dataclass(frozen=True)
class Again:
    """A call made again, operation by operation and, where a compiler is in use, by its code."""

    recorder: Recorder
    eager: str  # what was not finite when it ran operation by operation: the output, a gradient, or nothing
    compiled: str  # the same of the compiled code


class Calls:
    """The calls of the models in the step that is under way."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self._fail = fail
        self._stack = ExitStack()
        self.listens = False
        self._attached: Living[None] = Living()
        self._outer: Living[weakref.ref[nn.Module]] = Living()  # a model -> the compiled module around it
        self._compiler = False
        self._making = False
        self.kept: deque[Call] = deque(maxlen=MOST_CALLS)
        self._seconds = 0.0  # that keeping has taken
        self.steady = True  # listening may begin and end at any step

    def attach(self, models: Iterable[nn.Module]) -> None:
        """Listen to these models, each at its outermost call."""
        wanted = [self._around(model) for model in models]
        if len(wanted) == len(self._attached) and all(model in self._attached for model in wanted):
            return
        self.detach()
        self.listens = True
        self._attached = Living((model, None) for model in wanted)
        for cls in {type(model) for model in wanted if not isinstance(model, torch.jit.ScriptModule)}:
            self._stack.enter_context(_listening(cls, self._attached, self._called, self._returned))

    def _around(self, model: nn.Module) -> nn.Module:
        """What is called in place of a model: the compiled module around it."""
        known = self._outer.get(model)
        outer = None if known is None else alive(known)
        return model if outer is None else outer

    def detach(self) -> None:
        if self.listens:
            self.listens = False
            self._stack.close()
            self._attached.clear()

    def take_seconds(self) -> float:
        """What keeping has cost since this was last asked: PyTorch's hooks take as long again as ours."""
        seconds, self._seconds = 2 * self._seconds, 0.0
        return seconds

    def something_compiled(self, made: Any) -> None:
        """A module or a function, or None where a module was compiled in place: what is called may be another now."""
        self.detach()
        self.kept.clear()
        self._compiler = True
        inner = getattr(made, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            self._outer[inner] = weakref.ref(made)
        elif made is not None and not isinstance(made, nn.Module):
            self.steady = (
                False  # a function may call the model: whenever listening began or ended, it would recompile
            )

    def _called(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._making or not torch.is_grad_enabled() or recomputing() or _transformed() or is_recorded():
            return
        start = time.perf_counter()
        try:
            with unseen_by_modes():
                if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
                    args, kwargs = map_tensors((args, kwargs), _without_history)
                autocasts = [
                    (d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d)
                ]
                self.kept.append(Call(model, args, kwargs, _generators(), autocasts))
        except Exception as error:
            if raised_by_signal(error):
                raise
            self._fail(error)
        self._seconds += time.perf_counter() - start

    def _returned(self, model: nn.Module, output: Any) -> None:
        call = self.kept[-1] if self.kept else None
        if self._making or call is None or call.model is not model or recomputing():
            return
        if _transformed() or is_recorded():
            return
        start = time.perf_counter()
        try:
            with unseen_by_modes():
                outputs = (output,) if isinstance(output, Tensor) else outputs_in(output)
                for index, tensor in enumerate(outputs):
                    if tensor.requires_grad and nbytes(tensor) <= LARGEST_GRADIENT:
                        tensor.register_hook(functools.partial(call.gradients.__setitem__, index))
        except Exception as error:
            if raised_by_signal(error):
                raise
            self._fail(error)
        self._seconds += time.perf_counter() - start

    def make_again(self, names: Living[str]) -> Iterator[Again]:
        """The calls that were kept, made again one after another; nothing of it is left behind in the models."""
        if rank_and_world()[1] > 1:
            return
        self._making = True
        try:
            for call in list(self.kept):
                recorder = Recorder(names)
                try:
                    with _as_it_was(call):
                        recorder.start(inside_optimizer_hook=True)
                        try:
                            eager = _make(call)
                        finally:
                            recorder.stop()
                    compiled = "" if eager else self._by_compiled_code(call)
                except Exception:  # what it was called with is no longer what it was
                    continue
                yield Again(recorder, eager, compiled)
        finally:
            self._making = False

    def differ_when_compiled(self) -> str:
        """What is not finite when compiled code makes the kept calls again: the output, a gradient, or nothing."""
        self._making = True
        try:
            return next(filter(None, map(self._by_compiled_code, list(self.kept))), "")
        finally:
            self._making = False

    def _by_compiled_code(self, call: Call) -> str:
        if not self._compiler or rank_and_world()[1] > 1:
            return ""
        with _as_it_was(call):
            return _make(call)


@contextmanager
def _listening(
    cls: type[nn.Module], watched: Living[None], called: Callable, returned: Callable
) -> Iterator[None]:
    """Around the calls of some modules of a class: hooks on the modules themselves would be pickled with them."""
    before = cls.__dict__.get("__call__")

    @functools.wraps(cls.__call__)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # looked up at each call: torch.fx puts something else in place of nn.Module.__call__ for a while
        own = super(cls, self).__call__ if before is None else functools.partial(before, self)  # type: ignore[misc]
        if torch.compiler.is_compiling() or self not in watched:
            return own(*args, **kwargs)
        called(self, args, kwargs)
        output = own(*args, **kwargs)
        returned(self, output)
        return output

    cls.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del cls.__call__
        else:
            cls.__call__ = before  # type: ignore[method-assign]


def _make(call: Call) -> str:
    """The call, and from the gradients that came back to it, its backward: what was not finite first."""
    with torch.enable_grad():
        outputs = dict(enumerate(outputs_in(call.model(*call.args, **call.kwargs))))
        if not _finite(outputs.values()):
            return "output"
        weights = {i: g for i, g in call.gradients.items() if i in outputs and outputs[i].requires_grad}
        if not weights or not _finite(weights.values()):
            return ""
        parameters = [p for p in call.model.parameters() if p.requires_grad]
        roots = [outputs[index] for index in weights]
        # not backward(): .grad and the hooks of the parameters are the training's own
        found = torch.autograd.grad(roots, parameters, list(weights.values()), allow_unused=True)
        return "" if _finite(g for g in found if g is not None) else "gradient"


def _finite(tensors: Iterable[Tensor]) -> bool:
    with unseen_by_modes(), torch.no_grad():
        return all(
            bool(torch.isfinite(t.float().sum() if t.is_floating_point() else t.sum())) for t in tensors
        )


def _transformed() -> bool:
    """Inside torch.func: what a model is given there does not outlive the transformation."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _without_history(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


@contextmanager
def _as_it_was(call: Call) -> Iterator[None]:
    """Generators and autocast as they were at a call; afterwards generators and buffers as they are now."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in call.model.buffers()]
    now = _generators()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the call has said them once
        for device, dtype in call.autocasts:
            stack.enter_context(torch.autocast(device, dtype))
        _set_generators(call.generators)
        try:
            yield
        finally:
            _set_generators(now)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _set_generators(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
