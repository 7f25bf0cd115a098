"""Every run of the autograd engine during a recorded step: roots, and the gradient that reached each slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from gradproof.tape.operations import BackwardCall, FunctionCall, OperatorFunction

if TYPE_CHECKING:
    from gradproof.tape.state import State


@contextmanager
def watched_backwards(state: State) -> Iterator[None]:
    """Notes every run of the autograd engine: roots, leaves, and the gradient that reached each slot."""
    run = torch.autograd._engine_run_backward

    def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as hooks:
            call = state.guarded(_enter_backward, state, hooks, outputs, args, kwargs)
            try:
                result = run(outputs, *args, **kwargs)
            finally:
                if call is not None:
                    state.backward.pop()
            if call is not None:
                state.guarded(_leave_backward, state, call, result)
            return result

    state.engine_code = _run_backward.__code__
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run


def _enter_backward(
    state: State, hooks: ExitStack, outputs: Any, args: tuple, kwargs: dict
) -> BackwardCall | None:
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if not all(isinstance(root, torch.Tensor) for root in roots):
        return None  # gradient edges: the operations are taped, the call is not
    if any(torch._C._functorch.is_functorch_wrapped_tensor(root) for root in roots):
        return None  # torch.func differentiates explicitly: its operations are ordinary ones on the tape
    gradients = list(args[0]) if args else [None] * len(roots)
    inputs = args[3] if len(args) > 3 else kwargs.get("inputs")
    accumulates = bool(kwargs.get("accumulate_grad", False))
    call = BackwardCall(
        index=len(state.tape.backwards),
        roots=[state.slot(root) for root in roots],
        root_gradients=[None if gradient is None else state.slot(gradient) for gradient in gradients],
        inputs=[state.slot(value) for value in inputs] if inputs and not accumulates else None,
        create_graph=bool(args[2]) if len(args) > 2 else False,
        accumulates=accumulates,
        nested=bool(state.backward),
        first=0,
        line=state.user_line()[0],
    )
    call.first = len(state.tape.operations)
    state.tape.backwards.append(call)
    state.gradient_of = {id(p.grad): p for p in state.parameters.values() if p.grad is not None}
    _watch_nodes(state, hooks, call, roots)
    state.backward.append(call)
    return call


def _leave_backward(state: State, call: BackwardCall, result: Any) -> None:
    if call.inputs is not None:
        call.results = [None if value is None else state.slot(value) for value in result]
    parameters = {state.slot_of.get(p._cdata): p for p in state.parameters.values()}
    for _, slot, _ in call.contributions:
        parameter = parameters.get(slot)
        if parameter is not None and parameter.grad is not None:
            call.stored[slot] = state.slot(parameter.grad)
    call.last = len(state.tape.operations)


def _watch_nodes(state: State, hooks: ExitStack, call: BackwardCall, roots: list[torch.Tensor]) -> None:
    functions = {function.sequence: function for function in state.tape.functions}
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            hook = _contribution_hook(state, call, node.variable)
            hooks.callback(node.register_prehook(hook).remove)
        else:
            sequence = node._sequence_nr()
            hooks.callback(node.register_prehook(_received_hook(state, call, sequence)).remove)
            function = functions.get(sequence)
            ours = isinstance(node, BackwardCFunction) or (
                function and isinstance(function.cls, OperatorFunction)
            )
            if function is not None and ours:
                hooks.callback(node.register_hook(_function_hook(state, call, function)).remove)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _contribution_hook(state: State, call: BackwardCall, parameter: torch.Tensor) -> Callable:
    def note(gradients: tuple) -> None:
        if gradients[0] is not None:
            owner, gradient = state.slot(parameter), state.slot(gradients[0])
            call.contributions.append((len(state.tape.operations), owner, gradient))

    return lambda gradients: state.guarded(note, gradients)


def _received_hook(state: State, call: BackwardCall, sequence: int) -> Callable:
    def note(gradients: tuple) -> None:
        for output, gradient in enumerate(gradients):
            slot = state.made_at.get((sequence, output))
            if gradient is not None and slot is not None:
                made = state.slot(gradient)
                call.received.append((len(state.tape.operations), slot, made))

    return lambda gradients: state.guarded(note, gradients)


def _function_hook(state: State, call: BackwardCall, function: FunctionCall) -> Callable:
    def note(gradients_out: tuple, gradients_in: tuple) -> None:
        slots_in = [None if g is None else state.slot(g) for g in gradients_in]
        slots_out = [None if g is None else state.slot(g) for g in gradients_out]
        function.backwards.append((len(state.tape.operations), slots_in, slots_out, call.first))

    return lambda gradients_out, gradients_in: state.guarded(note, gradients_out, gradients_in)
