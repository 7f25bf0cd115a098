"""Every run of the autograd engine during a recorded step: roots, and the gradient that reached each slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from gradproof.tape.operations import (
    BackwardCall,
    FunctionCall,
    OperatorFunction,
    Ref,
    Tape,
    replace_references,
)

if TYPE_CHECKING:
    from gradproof.tape.state import State


@contextmanager
def watched_backwards(state: State) -> Iterator[None]:
    """Notes every run of the autograd engine: roots, leaves, and the gradient that reached each slot."""
    run = torch.autograd._engine_run_backward

    def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as hooks:
            call = state.guarded(_enter_backward, state, hooks, outputs, args, kwargs)
            hidden = (
                state.suspended() if state.tape.compiled and state.suspended is not None else nullcontext()
            )
            try:
                with hidden:
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
    if state.idle:
        return None
    roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    if not all(isinstance(root, torch.Tensor) for root in roots):
        return None  # gradient edges: the operations are taped, the call is not
    gradients = list(args[0]) if args else [None] * len(roots)
    inputs = args[3] if len(args) > 3 else kwargs.get("inputs")
    accumulates = bool(kwargs.get("accumulate_grad", False))
    explicit = any(_is_wrapped(root) for root in roots)  # torch.func differentiates
    if explicit and not (state.by_hand and _can_be_unwrapped((*roots, *(inputs or ())))):
        return None  # its operations are ordinary ones on the tape
    if explicit:
        roots, gradients, inputs = (_unwrapped(part) for part in (roots, gradients, inputs))
    create_graph = bool(args[2]) if len(args) > 2 and not explicit else False
    if state.by_hand and inputs and not create_graph and all(value.is_leaf for value in inputs):
        state.asked_for = [state.slot(value) for value in inputs]
        accumulates = True  # as good as: what is asked for is what the update is made of
    call = BackwardCall(
        index=len(state.tape.backwards),
        roots=[state.slot(root) for root in roots],
        root_gradients=[None if gradient is None else state.slot(gradient) for gradient in gradients],
        inputs=[state.slot(value) for value in inputs] if inputs and not accumulates else None,
        create_graph=create_graph,
        accumulates=accumulates,
        nested=bool(state.backward),
        first=0,
        line=state.user_line()[0],
    )
    call.first = len(state.tape.operations)
    state.tape.backwards.append(call)
    state.note_owners()
    if explicit:
        _follow_from(state.tape, state.asked_for or [], call.first)
    elif not state.tape.compiled:
        _watch_nodes(state, hooks, call, roots)
    state.backward.append(call)
    return call


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _can_be_unwrapped(values: tuple) -> bool:
    """One level of torch.func.grad, and no batch of them."""
    inner = (torch._C._functorch.get_unwrapped(value) for value in values if _is_wrapped(value))
    tracking = torch._C._functorch.is_gradtrackingtensor
    return all(tracking(value) for value in values if _is_wrapped(value)) and not any(map(_is_wrapped, inner))


def _unwrapped(values: Any) -> list[Any]:
    return [torch._C._functorch.get_unwrapped(v) if _is_wrapped(v) else v for v in values or ()]


def _follow_from(tape: Tape, parameters: list[int], until: int) -> None:
    """Mark what depends on parameters as followed: torch.func follows it where the tape cannot see it."""
    live = set(parameters)
    for operation in tape.operations[:until]:
        if (
            operation.in_backward is not None
            or live.isdisjoint(operation.reads)
            or operation.name == "detach"
        ):
            continue
        operation.args, operation.kwargs = replace_references(
            (operation.args, operation.kwargs), lambda ref: Ref(ref.slot, ref.tracked or ref.slot in live)
        )
        operation.results = replace_references(operation.results, lambda ref: Ref(ref.slot, True))
        for slot in (*operation.makes, *operation.writes):
            live.add(slot)
            tape.slots[slot].followed = True


def _leave_backward(state: State, call: BackwardCall, result: Any) -> None:
    if call.inputs is not None:
        call.results = [None if value is None else state.slot(value) for value in result]
    elif state.asked_for is not None:
        _note_asked(state, call, _unwrapped(result))
    parameters = {state.slot_of.get(p._cdata): p for p in state.parameters}
    if state.tape.compiled:
        _note_what_arrived(state, call)
    for _, slot, _ in call.contributions:
        parameter = parameters.get(slot)
        if parameter is not None and parameter.grad is not None:
            call.stored[slot] = state.slot(parameter.grad)
    call.last = len(state.tape.operations)


def _note_asked(state: State, call: BackwardCall, gradients: list[Any]) -> None:
    """Gradients that were handed over, not added to .grad: the update sees them as they are."""
    end = len(state.tape.operations)
    for parameter, gradient in zip(state.asked_for or (), gradients, strict=True):
        if gradient is not None:
            made = state.slot(gradient)
            call.contributions.append((end, parameter, made))
            call.stored[parameter] = made
            state.tape.final_gradients[parameter] = (end, made)
    state.asked_for = None


def _note_what_arrived(state: State, call: BackwardCall) -> None:
    """Compiled code ran backward, unseen: what it left in .grad is what it brought, if nothing was there before."""
    state.note_owners()
    for parameter in state.parameters if call.accumulates and call.index == 0 else ():
        slot = state.slot_of.get(parameter._cdata)
        if slot is not None and parameter.grad is not None:
            call.contributions.append((len(state.tape.operations), slot, state.slot(parameter.grad)))


def _watch_nodes(state: State, hooks: ExitStack, call: BackwardCall, roots: list[torch.Tensor]) -> None:
    functions = {function.sequence: function for function in state.tape.functions}
    guarded = state.guarded
    handles: list[RemovableHandle] = []
    hooks.callback(_remove_all, handles)
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            hook = partial(guarded, _note_contribution, state, call, node.variable)
            handles.append(node.register_prehook(hook))
        else:
            sequence = node._sequence_nr()
            handles.append(node.register_prehook(partial(guarded, _note_received, state, call, sequence)))
            function = functions.get(sequence)
            ours = isinstance(node, BackwardCFunction) or (
                function and isinstance(function.cls, OperatorFunction)
            )
            if function is not None and ours:
                handles.append(node.register_hook(partial(guarded, _note_function, state, call, function)))
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _note_contribution(state: State, call: BackwardCall, parameter: torch.Tensor, gradients: tuple) -> None:
    if gradients[0] is not None:
        state.load_unknown([gradients[0]], None)  # what a kernel behind a pointer has written
        owner, gradient = state.slot(parameter), state.slot(gradients[0])
        call.contributions.append((len(state.tape.operations), owner, gradient))


def _note_received(state: State, call: BackwardCall, sequence: int, gradients: tuple) -> None:
    for output, gradient in enumerate(gradients):
        slot = state.made_at.get((sequence, output))
        if gradient is not None and slot is not None:
            made = state.slot(gradient)
            call.received.append((len(state.tape.operations), slot, made))


def _note_function(
    state: State, call: BackwardCall, function: FunctionCall, gradients_out: tuple, gradients_in: tuple
) -> None:
    state.look_at_lent()
    state.load_unknown([g for g in gradients_out if g is not None], None)
    slots_in = [None if g is None else state.slot(g) for g in gradients_in]
    slots_out = [None if g is None else state.slot(g) for g in gradients_out]
    function.backwards.append((len(state.tape.operations), slots_in, slots_out, call.first))
