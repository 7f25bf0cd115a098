"""Fixes applied to a script from outside, so that a cause can be undone and the run tried again.

Each is a function of the stack and a value; all of them are undone when the stack closes. The tuple at the end is
the list. They change training on purpose, and only when `gradproof run --fix` or `--verify` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradproof.errors import UserError
from gradproof.probes.names import find_roots
from gradproof.probes.optimizer import parameters_of
from gradproof.probes.replacing import replace


def intervene(stack: ExitStack, name: str, value: float) -> None:
    """Put one fix in place until the stack closes."""
    fixes = {fix.__name__: fix for fix in INTERVENTIONS}
    if name not in fixes:
        raise UserError(f"there is no fix {name!r}; there are {', '.join(sorted(fixes))}")
    fixes[name](stack, value)


def on_new_optimizer(stack: ExitStack, change: Callable[[Optimizer], None]) -> None:
    """Change every optimizer when it is made, before a scheduler reads it."""

    def wrapper(original: Callable) -> Callable:
        def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            change(self)

        return init

    replace(stack, Optimizer, "__init__", wrapper)


def set_in_groups(stack: ExitStack, key: str, new: Callable[[Any], Any]) -> None:
    def change(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if key in group:
                group[key] = new(group[key])

    on_new_optimizer(stack, change)


def lr(stack: ExitStack, factor: float) -> None:
    set_in_groups(stack, "lr", lambda old: old * factor)


def eps(stack: ExitStack, value: float) -> None:
    set_in_groups(stack, "eps", lambda old: value)


def weight_decay(stack: ExitStack, value: float) -> None:
    set_in_groups(stack, "weight_decay", lambda old: min(old, value))


def constant_lr(stack: ExitStack, value: float) -> None:
    """Whatever a scheduler wants, every step is taken with the learning rate of the first one that was not zero."""
    first: dict[int, list[Any]] = {}

    def hold(optimizer: Optimizer, *_: Any) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        initial = [
            group.get("initial_lr", rate) for group, rate in zip(optimizer.param_groups, rates, strict=True)
        ]
        for group, rate in zip(optimizer.param_groups, first.setdefault(id(optimizer), initial), strict=True):
            group["lr"] = rate

    stack.callback(register_optimizer_step_pre_hook(hold).remove)


def zero_grad(stack: ExitStack, value: float) -> None:
    """Gradients are cleared before the first backward after a step, and at no other time."""
    stepped: set[int] = set()
    optimizers: dict[int, Optimizer] = {}

    def after(optimizer: Optimizer, *_: Any) -> None:
        stepped.add(id(optimizer))
        optimizers[id(optimizer)] = optimizer

    def backward(original: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            for key in list(stepped):
                for parameter in parameters_of(optimizers[key]):
                    parameter.grad = None
            stepped.clear()
            return original(*args, **kwargs)

        return wrapped

    stack.callback(register_optimizer_step_post_hook(after).remove)
    replace(stack, torch.autograd, "backward", backward)
    replace(stack, Optimizer, "zero_grad", lambda original: lambda self, *args, **kwargs: None)
    replace(stack, nn.Module, "zero_grad", lambda original: lambda self, *args, **kwargs: None)


def all_parameters(stack: ExitStack, value: float) -> None:
    """Every trainable parameter of the models that an optimizer trains in part."""
    seen: set[int] = set()

    def complete(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        held = {id(p) for p in parameters_of(optimizer)}
        missing = [
            p
            for root in find_roots(parameters_of(optimizer))
            for p in root.parameters()
            if p.requires_grad and id(p) not in held
        ]
        if missing:
            optimizer.add_param_group({"params": missing})

    stack.callback(register_optimizer_step_pre_hook(complete).remove)


def clip(stack: ExitStack, limit: float) -> None:
    def before(optimizer: Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for p in parameters_of(optimizer) if p.grad is not None], limit)

    stack.callback(register_optimizer_step_pre_hook(before).remove)


def clip_before_step(stack: ExitStack, value: float) -> None:
    """The script's own limit, applied where it takes effect."""
    limits: list[float] = []

    def note(original: Callable) -> Callable:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            limits[:] = [float(max_norm)]
            total = nn.utils.get_total_norm([p.grad for p in list(parameters) if p.grad is not None])
            return total

        return clip_grad_norm_

    def before(optimizer: Optimizer, *_: Any) -> None:
        if limits:
            held = [p for p in parameters_of(optimizer) if p.grad is not None]
            grads = nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            nn.utils.clip_grads_with_norm_(held, limits[0], grads)

    replace(stack, nn.utils, "clip_grad_norm_", note)
    replace(stack, nn.utils.clip_grad, "clip_grad_norm_", note)
    stack.callback(register_optimizer_step_pre_hook(before).remove)


def no_clip(stack: ExitStack, value: float) -> None:
    def none(original: Callable) -> Callable:
        def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            return original(parameters, float("inf"), *args, **kwargs)

        return clip_grad_norm_

    replace(stack, nn.utils, "clip_grad_norm_", none)
    replace(stack, nn.utils.clip_grad, "clip_grad_norm_", none)


def train_mode(stack: ExitStack, value: float) -> None:
    """A model that is called with gradients on is in train mode; frozen parts stay as they are."""

    def before(module: nn.Module, args: Any) -> None:
        if (
            torch.is_grad_enabled()
            and not module.training
            and any(p.requires_grad for p in module.parameters(False))
        ):
            module.train()

    stack.callback(nn.modules.module.register_module_forward_pre_hook(before).remove)


def float32(stack: ExitStack, value: float) -> None:
    """No autocast, and no weights or inputs in half precision."""

    def off(original: Callable) -> Callable:
        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            kwargs["enabled"] = False
            original(self, device_type, *args, **kwargs)

        return init

    replace(stack, torch.autocast, "__init__", off)
    for name in ("half", "bfloat16"):
        replace(stack, torch.Tensor, name, lambda original: lambda self, *args, **kwargs: self.float())
        replace(stack, nn.Module, name, lambda original: lambda self: self.float())


def autograd(stack: ExitStack, value: float) -> None:
    """Hand-written backwards are passed over: what forward computes is differentiated by PyTorch itself."""

    def wrapper(original: Callable) -> Callable:
        def apply(cls: type, *args: Any) -> Any:
            if cls.__module__.startswith("torch."):
                return original.__func__(cls, *args)  # type: ignore[attr-defined]
            return cls.forward(_Context(), *args)  # type: ignore[attr-defined]

        return classmethod(apply)  # type: ignore[return-value]

    function = torch.autograd.Function
    held = function.__dict__.get("apply")
    function.apply = wrapper(function.apply)  # type: ignore[method-assign]
    stack.callback(lambda: setattr(function, "apply", held) if held else delattr(function, "apply"))


class _Context:
    """Stands in for the ctx of an autograd.Function whose backward is not used."""

    needs_input_grad = (True,) * 64

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


INTERVENTIONS = (
    lr,
    eps,
    weight_decay,
    constant_lr,
    zero_grad,
    all_parameters,
    clip,
    clip_before_step,
    no_clip,
    train_mode,
    float32,
    autograd,
)
