"""Where a training script is listened to: each place it passes through anyway, wrapped while watching lasts.

Every wrapper calls the original with the same arguments and returns what it returned. All of them are undone by
closing the ExitStack, whatever happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradproof.probes.asked_gradients import asked_gradients
from gradproof.probes.datasets import data_sets
from gradproof.probes.files import files_read
from gradproof.probes.lines import makings
from gradproof.probes.loaders import loaders
from gradproof.probes.modes import evals, without_gradient
from gradproof.probes.orders import orders
from gradproof.probes.overwritten import overwritten_loads
from gradproof.probes.pairs import pairs
from gradproof.probes.pretrained import frozen_by_default
from gradproof.probes.printed import prints
from gradproof.probes.rank_calls import collectives, sampler_epochs
from gradproof.probes.replacing import replace
from gradproof.probes.returns import returns
from gradproof.probes.rows import rows
from gradproof.probes.samplers import samplers
from gradproof.probes.session import Session
from gradproof.probes.states import clip_coverage, loads, note_clip, optimizer_states
from gradproof.probes.tables import tables
from gradproof.probes.warned import warned
from gradproof.probes.worker_draws import worker_draws
from gradproof.record.flight import BETWEEN


def attach(session: Session, optimizers: tuple[Optimizer, ...] = ()) -> ExitStack:
    """Listen to everything that trains in this process, or only to the given optimizers."""
    stack = ExitStack()
    try:
        for listen in LISTENERS:
            listen(session, stack, _chosen(optimizers))
    except BaseException:
        stack.close()
        raise
    return stack


def everyone(optimizer: Any) -> bool:
    return True


def _chosen(optimizers: tuple[Optimizer, ...]) -> Callable[[Any], bool]:
    """Whether an optimizer, or the one that accelerate has wrapped in it, is among those to listen to."""
    ids = {id(optimizer) for optimizer in optimizers}
    if not ids:
        return everyone
    return lambda optimizer: bool(ids & {id(optimizer), id(getattr(optimizer, "optimizer", None))})


def optimizer_steps(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Before and after each optimizer step; with a closure, after the first time the closure has run."""

    all_of_them = chosen is everyone  # asked here once: every call in a tiny step is dear

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if session.looks_before:
            look(session.looks_before, optimizer)
        if not (all_of_them or chosen(optimizer)):
            return None
        if "step" not in session.lines.enough:
            session.lines.note("step")
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 and callable(args[1]) else None)
        session.optimizer_begins(optimizer, closure is None)
        if closure is None:
            return None
        seen = False

        def watched_closure() -> Any:
            nonlocal seen
            result = closure()
            if not seen:
                seen = True
                session.before_update(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched_closure}
        return (args[0], watched_closure, *args[2:]), kwargs

    def after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if all_of_them or chosen(optimizer):
            session.after_update(optimizer)
            if session.looks_after:
                look(session.looks_after, optimizer)

    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(after).remove)


def look(looks: list[Callable[[Any], bool]], optimizer: Optimizer) -> None:
    """Takes those that wait for an optimizer's step; which of them go on waiting, they say themselves."""
    looks[:] = [each for each in looks if not each(optimizer)]


def optimizers_made(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """A new optimizer shows which parameters matter, in time for the first forward."""

    def wrapper(original: Callable) -> Callable:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if chosen(self):
                session.optimizer_made(self)

        return init

    replace(stack, Optimizer, "__init__", wrapper)


def backwards(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """`loss.backward()` and `torch.autograd.backward` both come through here."""

    def wrapper(original: Callable) -> Callable:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            losses = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
            weights = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors]
            weights += [None] * (len(losses) - len(weights))
            if "backward" not in session.lines.enough:
                session.lines.note("backward")
            session.backward_begins(losses, weights[: len(losses)])
            step = session.current
            try:
                result = original(tensors, grad_tensors, *args, **kwargs)
            finally:
                if step.used:
                    step.backward_returned()
                if "inside_backward" in session.current.row:
                    session.backward_ends()
            if session.flight is not None:
                session.flight.note(session.step, BETWEEN)
            if session.own is not None:
                session.gradients_arrived()
            return result

        return backward

    replace(stack, torch.autograd, "backward", wrapper)


def zero_grads(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    lines, cleared, all_of_them = session.lines, session.facts["_cleared"], chosen is everyone

    def of_optimizer(original: Callable) -> Callable:
        def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if all_of_them or chosen(self):
                if "zero_grad" not in lines.enough:
                    lines.note("zero_grad")
                if self not in cleared:
                    cleared[self] = None
                session.zero_grad()
            return original(self, *args, **kwargs)

        return zero_grad

    def of_module(original: Callable) -> Callable:
        def zero_grad(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            session.lines.note("zero_grad")
            session.zero_grad()
            return original(self, *args, **kwargs)

        return zero_grad

    replace(stack, Optimizer, "zero_grad", of_optimizer)
    replace(stack, torch.nn.Module, "zero_grad", of_module)


def clips(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Both clips, also where a script had imported the function before watching began."""

    def norm(original: Callable) -> Callable:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            before = original(parameters, max_norm, *args, **kwargs)
            note_clip(session, parameters)
            session.clipped("norm", max_norm, before)
            return before

        return clip_grad_norm_

    def value(original: Callable) -> Callable:
        def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            original(parameters, clip_value, *args, **kwargs)
            note_clip(session, parameters)
            session.clipped("value", clip_value, None)

        return clip_grad_value_

    for name, wrapper in (("clip_grad_norm_", norm), ("clip_grad_value_", value)):
        original = getattr(torch.nn.utils.clip_grad, name)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                replace(stack, module, name, wrapper)


def grad_scalers(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """A step that a scaler skips never reaches the optimizer: seen by its not being there."""
    scaler_class = torch.amp.GradScaler

    def scale(original: Callable) -> Callable:
        def wrapped(self: Any, outputs: Any) -> Any:
            scaled = original(self, outputs)
            if isinstance(outputs, Tensor) and self.is_enabled():
                session.scaled(outputs, scaled, self._scale)
            return scaled

        return wrapped

    def unscale(original: Callable) -> Callable:
        def wrapped(self: Any, optimizer: Optimizer) -> Any:
            result = original(self, optimizer)
            if self.is_enabled() and chosen(optimizer):
                session.unscaled()
            return result

        return wrapped

    def step(original: Callable) -> Callable:
        def wrapped(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = session.step
            result = original(self, optimizer, *args, **kwargs)
            if self.is_enabled() and chosen(optimizer) and session.step == before:
                session.skipped(optimizer)
            return result

        return wrapped

    replace(stack, scaler_class, "scale", scale)
    replace(stack, scaler_class, "unscale_", unscale)
    replace(stack, scaler_class, "step", step)


def schedulers(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    def wrapper(original: Callable) -> Callable:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = getattr(self, "_step_count", 0) == 0  # the scheduler's own call, in its constructor
            result = original(self, *args, **kwargs)
            if not own and chosen(self.optimizer):
                session.lines.note("scheduler")
                session.scheduler_stepped()
            return result

        return step

    def plateau(original: Callable) -> Callable:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if chosen(self.optimizer):
                session.lines.note("scheduler")
                session.scheduler_stepped()
            return result

        return step

    replace(stack, LRScheduler, "step", wrapper)
    replace(stack, ReduceLROnPlateau, "step", plateau)


def epochs(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    def wrapper(original: Callable) -> Callable:
        def iterate(self: Any) -> Any:
            session.epoch_begins()
            return original(self)

        return iterate

    replace(stack, torch.utils.data.DataLoader, "__iter__", wrapper)


def cuda_graphs(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """A step that was captured into a graph never comes through a hook again: each replay of it is one."""

    def capture_begin(original: Callable) -> Callable:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            session.capture_begins()
            return original(self, *args, **kwargs)

        return wrapped

    def capture_end(original: Callable) -> Callable:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            session.graphs.end(self)
            return result

        return wrapped

    def replay(original: Callable) -> Callable:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            captured = session.graphs.of(self)
            if captured is None:
                return original(self, *args, **kwargs)
            session.replay_begins(captured)
            result = original(self, *args, **kwargs)
            session.replay_ends(captured)
            return result

        return wrapped

    for wrapper in (capture_begin, capture_end, replay):
        replace(stack, torch.cuda.CUDAGraph, wrapper.__name__, wrapper)


def made(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Where loaders, schedules, wrappers and seeds are made."""
    makings(session.lines, stack)


def compilation(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    def wrapper(original: Callable) -> Callable:
        def compile(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            in_place = bool(args) and isinstance(getattr(args[0], "__self__", None), torch.nn.Module)
            session.something_compiled(None if in_place else made)
            return made

        return compile

    replace(stack, torch, "compile", wrapper)
    replace(stack, torch.nn.Module, "compile", wrapper)


LISTENERS = (
    warned,
    made,
    optimizers_made,
    optimizer_steps,
    backwards,
    asked_gradients,
    prints,
    zero_grads,
    clips,
    grad_scalers,
    schedulers,
    cuda_graphs,
    epochs,
    data_sets,
    pairs,
    loaders,
    worker_draws,
    files_read,
    samplers,
    rows,
    tables,
    orders,
    frozen_by_default,
    compilation,
    evals,
    without_gradient,
    loads,
    overwritten_loads,
    optimizer_states,
    returns,
    clip_coverage,
    sampler_epochs,
    collectives,
)
