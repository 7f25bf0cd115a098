"""Gradients that a script asks for and is handed: torch.autograd.grad, torch.func.grad and grad_and_value.

Listened to only in a script that makes no optimizer: there they are what its own updates are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradproof.probes.guard import quietly
from gradproof.probes.replacing import replace
from gradproof.probes.session import Session


def asked_gradients(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Each call, with the parameters it is about, the gradients it brought and the loss."""
    replace(stack, torch.autograd, "grad", lambda original: _of_autograd(session, original))
    replace(stack, torch.func, "grad", lambda original: _of_func(session, original, with_value=False))
    replace(
        stack, torch.func, "grad_and_value", lambda original: _of_func(session, original, with_value=True)
    )


def _of_autograd(session: Session, original: Callable) -> Callable:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if session.own is None or torch.compiler.is_compiling():
            return original(outputs, inputs, *args, **kwargs)
        roots, wanted = tree_leaves(outputs), tree_leaves(inputs)
        if not _is_training(roots, wanted, args, kwargs):
            return original(outputs, inputs, *args, **kwargs)
        session.lines.note("backward")
        session.backward_begins(roots, [None] * len(roots), wanted)
        result = original(outputs, inputs, *args, **kwargs)
        session.gradients_arrived(_pairs(wanted, tree_leaves(result)))
        return result

    return grad


def _is_training(roots: list[Any], wanted: list[Any], args: tuple, kwargs: dict) -> bool:
    """Gradients of plain leaves, that no further derivative is taken of."""
    tensors = [*roots, *wanted]
    if not all(isinstance(t, Tensor) and not _is_wrapped(t) for t in tensors):
        return False
    return not (kwargs.get("create_graph") or args[2:3] == (True,)) and all(t.is_leaf for t in wanted)


def _of_func(session: Session, original: Callable, with_value: bool) -> Callable:
    def transform(func: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
        if session.own is None or torch.compiler.is_compiling():
            return original(func, argnums, has_aux)
        losses: list[Tensor] = []

        @wraps(func)
        def noted(*args: Any, **kwargs: Any) -> Any:
            value = func(*args, **kwargs)
            with quietly():
                losses[:] = [t for t in tree_leaves(value) if isinstance(t, Tensor)][:1]
            return value

        differentiated = original(noted, argnums, has_aux)

        @wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
            wanted = [t for n in numbers if n < len(args) for t in tree_leaves(args[n])]
            given = tree_leaves(
                (args, kwargs)
            )  # under vmap gradients are those of single samples, not the step's
            plain = bool(wanted) and all(isinstance(t, Tensor) for t in wanted)
            if session.own is None or not plain or any(map(_is_wrapped, given)):
                return differentiated(*args, **kwargs)
            session.lines.note("backward")
            session.backward_begins([], [], wanted)
            result = differentiated(*args, **kwargs)
            gradients = result[0] if has_aux or with_value else result
            session.gradients_arrived(_pairs(wanted, tree_leaves(gradients)), _loss_in(losses))
            losses.clear()
            return result

        return call

    return transform


def _loss_in(losses: list[Tensor]) -> Tensor | None:
    """What the function returned, out of the wrapping in which torch.func gave it its arguments."""
    value = torch._C._functorch.get_unwrapped(losses[0]) if losses and _is_wrapped(losses[0]) else None
    return None if value is None or _is_wrapped(value) else value


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _pairs(wanted: list[Any], gradients: list[Any]) -> list[tuple[Tensor, Tensor]]:
    pairs = zip(wanted, gradients, strict=False)
    return [(p, g) for p, g in pairs if isinstance(p, Tensor) and isinstance(g, Tensor)]
