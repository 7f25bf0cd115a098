"""Who calls what during a recorded step: modules, hand-written autograd functions, the engine, the optimizer.

Each function installs its watch for the time of a `with` block and takes it away again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradproof.tape.operations import BackwardCall, FunctionCall, ModuleCall

if TYPE_CHECKING:
    from gradproof.tape.record import _State

WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


@contextmanager
def watched_modules(state: _State) -> Iterator[None]:
    """Keeps the path of the running module, and which operations each call consists of."""

    def enter(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        state.guarded(_enter_module, state, module, args)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        state.guarded(_leave_module, state, output)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


def _enter_module(state: _State, module: torch.nn.Module, args: Any) -> None:
    kind = type(module).__name__
    state.tape.compiled = state.tape.compiled or kind == "OptimizedModule"
    if id(module) not in state.module_paths:
        _learn_paths(state, module)
    path = state.module_paths[id(module)]
    call = ModuleCall(path, kind, first=len(state.tape.operations))
    state.tape.modules.append(call)
    state.module_stack.append((call, path or kind))
    call.inputs = [state.slot(tensor) for tensor in _nested_tensors(args)]
    call.first = len(state.tape.operations)


def _leave_module(state: _State, output: Any) -> None:
    if not state.module_stack:
        return
    call, _ = state.module_stack.pop()
    if call is not None:
        call.last = len(state.tape.operations)
        call.outputs = [slot for t in _nested_tensors(output) if (slot := state.slot_of.get(t._cdata)) is not None]


def _learn_paths(state: _State, root: torch.nn.Module) -> None:
    """Paths of a module and all it contains, in the words of the parameter names; wrappers leave no trace."""
    plain = {}
    dropped = [name for name, module in root.named_modules() if type(module).__name__ in WRAPPERS]
    for name, module in root.named_modules():
        plain[id(module)] = _without_wrappers(name, dropped)
    prefix = ""
    for name, parameter in root.named_parameters():
        full = state.name_of_parameter(parameter) or ""
        short = _without_wrappers(name, dropped)
        if full.endswith(short):
            prefix = full[: len(full) - len(short)]
            break
    for key, path in plain.items():
        state.module_paths.setdefault(key, f"{prefix}{path}".strip("."))
    for name, buffer in root.named_buffers():
        state.buffers[id(buffer)] = prefix + _without_wrappers(name, dropped)
    for parameter in root.parameters():
        state.parameters[id(parameter)] = parameter


def _without_wrappers(path: str, dropped: list[str]) -> str:
    for name in sorted(dropped, key=len, reverse=True):
        head = f"{name}." if name else ""
        if path.startswith(head):
            rest = path[len(head) :].split(".", 1)  # the wrapper's own attribute: module, _orig_mod
            if rest[0] in ("module", "_orig_mod"):
                path = f"{head}{rest[1] if len(rest) > 1 else ''}".rstrip(".")
    return path


@contextmanager
def watched_functions(state: _State) -> Iterator[None]:
    """Notes every call of a hand-written autograd.Function: its class, arguments, operations and results."""
    with ExitStack() as stack:
        for cls in _function_classes(torch.autograd.Function):
            own = cls.__dict__.get("forward")
            if own is None or (cls.__module__.startswith("torch.") and cls.__name__ != "CheckpointFunction"):
                continue
            setattr(cls, "forward", staticmethod(_watched_forward(state, cls, cls.forward)))
            stack.callback(setattr, cls, "forward", own)
        yield


def _function_classes(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        if not issubclass(child, BackwardCFunction):
            yield child
        yield from _function_classes(child)


def _watched_forward(state: _State, cls: type, forward: Callable) -> Callable:
    @wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = state.guarded(_enter_function, state, cls, args)
        output = None
        try:
            output = forward(*args, **kwargs)
        finally:
            if call is not None:
                state.guarded(_leave_function, state, call, output)
        return output

    return watched


def _enter_function(state: _State, cls: type, args: tuple) -> FunctionCall | None:
    state.call_depth += 1
    if state.call_depth > 1 or state.backward:
        return FunctionCall(-1, cls, (), 0, "", None, 0)  # inside another one: part of it
    if args and isinstance(args[0], FunctionCtx):
        cls = getattr(type(args[0]), "_forward_cls", cls)
        args = args[1:]
    call = FunctionCall(
        index=len(state.tape.functions),
        cls=cls,
        args=tuple(state.reference(arg) if isinstance(arg, torch.Tensor) else arg for arg in args),
        first=0,
        module=state.module_stack[-1][1] if state.module_stack else "",
        line=_caller(state),
        sequence=torch.autograd._get_sequence_nr() - 1,
    )
    call.dtypes = {slot: state.tape.slots[slot].dtype for slot in call.inputs}
    call.first = len(state.tape.operations)
    state.tape.functions.append(call)
    state.call = call
    return call


def _caller(state: _State) -> Any:
    return state.user_line()[0]


def _leave_function(state: _State, call: FunctionCall, output: Any) -> None:
    state.call_depth -= 1
    if call.index < 0:
        return
    outputs = output if isinstance(output, (tuple, list)) else [output]
    call.outputs = []
    for value in outputs:
        if not isinstance(value, torch.Tensor):
            call.outputs.append(None)
            continue
        known = state.slot_of.get(value._cdata)
        state.load_unknown([value], call.line)
        slot = state.slot(value)
        if known is None and state.tape.slots[slot].made_by is None:
            state.tape.slots[slot].kind, state.tape.slots[slot].name = "outside", f"result of {call.cls.__name__}"
            call.opaque = call.opaque or "its result is made outside PyTorch"
        call.outputs.append(slot)
    call.last = len(state.tape.operations)
    state.forward_at.setdefault(call.sequence, min(call.first, max(len(state.tape.operations) - 1, 0)))
    state.call = None


@contextmanager
def watched_backwards(state: _State) -> Iterator[None]:
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

    global BACKWARD_CODE
    BACKWARD_CODE = _run_backward.__code__
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run


BACKWARD_CODE: Any = None


def _enter_backward(state: _State, hooks: ExitStack, outputs: Any, args: tuple, kwargs: dict) -> BackwardCall | None:
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
        line=_caller(state),
    )
    call.first = len(state.tape.operations)
    state.tape.backwards.append(call)
    _watch_nodes(state, hooks, call, roots)
    state.backward.append(call)
    return call


def _leave_backward(state: _State, call: BackwardCall, result: Any) -> None:
    if call.inputs is not None:
        call.results = [None if value is None else state.slot(value) for value in result]
    for _, slot, _ in call.contributions:
        parameter = next((p for p in state.parameters.values() if state.slot_of.get(p._cdata) == slot), None)
        if parameter is not None and parameter.grad is not None:
            call.stored[slot] = state.slot(parameter.grad)
    call.last = len(state.tape.operations)


def _watch_nodes(state: _State, hooks: ExitStack, call: BackwardCall, roots: list[torch.Tensor]) -> None:
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
            function = functions.get(sequence) if isinstance(node, BackwardCFunction) else None
            if function is not None:
                hooks.callback(node.register_hook(_function_hook(state, call, function)).remove)
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _contribution_hook(state: _State, call: BackwardCall, parameter: torch.Tensor) -> Callable:
    def note(gradients: tuple) -> None:
        if gradients[0] is not None:
            call.contributions.append((0, state.slot(parameter), state.slot(gradients[0])))
            call.contributions[-1] = (len(state.tape.operations), *call.contributions[-1][1:])

    return lambda gradients: state.guarded(note, gradients)


def _received_hook(state: _State, call: BackwardCall, sequence: int) -> Callable:
    def note(gradients: tuple) -> None:
        for output, gradient in enumerate(gradients):
            slot = state.made_at.get((sequence, output))
            if gradient is not None and slot is not None:
                made = state.slot(gradient)
                call.received.append((len(state.tape.operations), slot, made))

    return lambda gradients: state.guarded(note, gradients)


def _function_hook(state: _State, call: BackwardCall, function: FunctionCall) -> Callable:
    def note(gradients_out: tuple, gradients_in: tuple) -> None:
        slots_in = [None if g is None else state.slot(g) for g in gradients_in]
        slots_out = [None if g is None else state.slot(g) for g in gradients_out]
        function.backwards.append((len(state.tape.operations), slots_in, slots_out, call.first))

    return lambda gradients_out, gradients_in: state.guarded(note, gradients_out, gradients_in)


@contextmanager
def watched_optimizers(state: _State) -> Iterator[None]:
    """Operations inside optimizer.step belong to the optimizer, except those of a closure."""
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(lambda optimizer, *_: enter_optimizer(state, optimizer)).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: leave_optimizer(state)).remove)
        yield


def enter_optimizer(state: _State, optimizer: torch.optim.Optimizer) -> None:
    state.optimizer_depth += 1
    if any(call.accumulates for call in state.tape.backwards):
        state.guarded(state.note_gradients, [p for group in optimizer.param_groups for p in group["params"]])


def leave_optimizer(state: _State) -> None:
    state.optimizer_depth = max(0, state.optimizer_depth - 1)


def _nested_tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _nested_tensors(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from _nested_tensors(part)
