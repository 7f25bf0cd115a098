"""Who calls what during a recorded step: modules, hand-written autograd functions, operators from outside, optimizers.

Each function installs its watch for the time of a `with` block and takes it away again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.jit._trace as tracing
from torch.autograd.function import BackwardCFunction, FunctionCtx, FunctionMeta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from gradproof.tape.operations import (
    FunctionCall,
    ModuleCall,
    Operation,
    OperatorFunction,
    Ref,
    Tape,
    references,
)
from gradproof.tape.shards import local
from gradproof.tape.tensors import tensors_in

if TYPE_CHECKING:
    from gradproof.tape.state import State

WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


@contextmanager
def watched_modules(state: State) -> Iterator[None]:
    """Keeps the path of the running module, and which operations each call consists of."""

    def enter(module: torch.nn.Module, args: Any) -> None:
        if is_someone_elses():
            return
        state.guarded(_enter_module, state, module, args)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if is_someone_elses():
            return
        state.guarded(_leave_module, state, output)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield


def is_someone_elses() -> bool:
    """Whether a compiler, functorch or a tracer records the call: what is done beside it would be in its graph."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def _enter_module(state: State, module: torch.nn.Module, args: Any) -> None:
    if state.idle:
        if not state.wakes(module):
            return
        state.restart()
    kind = type(module).__name__
    state.tape.compiled = state.tape.compiled or kind == "OptimizedModule"
    if id(module) not in state.module_paths:
        _learn_paths(state, module)
    path = state.module_paths[id(module)]
    call = ModuleCall(path, kind, first=len(state.tape.operations))
    state.tape.modules.append(call)
    state.module_stack.append((call, path or kind))
    state.running.append(module)
    state.grad_enabled = torch.is_grad_enabled()
    call.inputs = [state.slot(tensor) for tensor in tensors_in(args)]
    call.first = len(state.tape.operations)


def _leave_module(state: State, output: Any) -> None:
    if not state.module_stack:
        return
    call, _ = state.module_stack.pop()
    if state.running:
        state.running.pop()
    if call is not None:
        call.last = len(state.tape.operations)
        held = [local(t) if state.sharded else t for t in tensors_in(output)]
        call.outputs = [slot for t in held if (slot := state.slot_of.get(t._cdata)) is not None]


def _learn_paths(state: State, root: torch.nn.Module) -> None:
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
        state.parameters[parameter] = None


def _without_wrappers(path: str, dropped: list[str]) -> str:
    for name in sorted(dropped, key=len, reverse=True):
        head = f"{name}." if name else ""
        if path.startswith(head):
            rest = path[len(head) :].split(".", 1)  # the wrapper's own attribute: module, _orig_mod
            if rest[0] in ("module", "_orig_mod"):
                path = f"{head}{rest[1] if len(rest) > 1 else ''}".rstrip(".")
    return path


@contextmanager
def watched_functions(state: State) -> Iterator[None]:
    """Notes every call of a hand-written autograd.Function: its class, arguments, operations and results."""
    with ExitStack() as stack:
        for cls in _function_classes(torch.autograd.Function):
            _watch_class(state, stack, cls)
        begin = FunctionMeta.__init__

        def watched_begin(cls: Any, *args: Any, **kwargs: Any) -> None:
            begin(cls, *args, **kwargs)
            _watch_class(state, stack, cls)  # a class made inside the step

        FunctionMeta.__init__ = watched_begin  # type: ignore[method-assign]
        stack.callback(setattr, FunctionMeta, "__init__", begin)
        yield


def _watch_class(state: State, stack: ExitStack, cls: Any) -> None:
    own = cls.__dict__.get("forward")
    theirs = cls.__module__.startswith("torch.") and cls.__name__ != "CheckpointFunction"
    if own is None or theirs or issubclass(cls, BackwardCFunction):
        return
    watched = staticmethod(_watched_forward(state, cls, own.__get__(None, cls)))
    setattr(cls, "forward", watched)  # noqa: B010
    stack.callback(setattr, cls, "forward", own)


def _function_classes(cls: type) -> Iterator[type]:
    child: type
    for child in cls.__subclasses__():
        if not issubclass(child, BackwardCFunction):
            yield child
        yield from _function_classes(child)


def _watched_forward(state: State, cls: type, forward: Callable) -> Callable:
    @wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        call = state.guarded(_enter_function, state, cls, args) if state.active else None
        output = None
        try:
            output = forward(*args, **kwargs)
        finally:
            if call is not None:
                state.guarded(_leave_function, state, call, output)
        return output

    return watched


def _enter_function(state: State, cls: type, args: tuple) -> FunctionCall | None:
    if state.idle:
        return None
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
        line=state.user_line()[0],
        sequence=torch.autograd._get_sequence_nr() - 1,
    )
    call.dtypes = {slot: state.tape.slots[slot].dtype for slot in call.inputs}
    call.first = len(state.tape.operations)
    state.tape.functions.append(call)
    state.call = call
    return call


def _leave_function(state: State, call: FunctionCall, output: Any) -> None:
    state.call_depth -= 1
    if call.index < 0:
        return
    state.look_at_lent()
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
            state.tape.slots[slot].kind, state.tape.slots[slot].name = (
                "outside",
                f"result of {call.cls.__name__}",
            )
            call.opaque = call.opaque or "its result is made outside PyTorch"
        call.outputs.append(slot)
    call.last = len(state.tape.operations)
    if not call.opaque and not depends_on_inputs(state.tape, call):
        call.opaque = "its result is made outside PyTorch"
    state.forward_at.setdefault(call.sequence, min(call.first, max(len(state.tape.operations) - 1, 0)))
    state.call = None


def note_operator(state: State, operation: Operation, kwargs: dict) -> None:
    """An operator from outside PyTorch: the tape sees its result, not its inside."""
    if tensors_in(kwargs) or not any(ref.tracked for ref in references(operation.args)):
        return
    call = FunctionCall(
        index=len(state.tape.functions),
        cls=OperatorFunction(operation.func, kwargs),
        args=operation.args,
        first=operation.index,
        last=operation.index + 1,
        module=operation.module,
        line=operation.line,
        sequence=torch.autograd._get_sequence_nr() - 1,
        outputs=[*operation.makes],
        opaque="an operator from outside PyTorch",
    )
    call.dtypes = {slot: state.tape.slots[slot].dtype for slot in call.inputs}
    state.tape.functions.append(call)
    state.forward_at.setdefault(call.sequence, operation.index)


def depends_on_inputs(tape: Tape, call: FunctionCall) -> bool:
    """True when the operations of a forward lead from its inputs to its results."""
    reached = {arg.slot for arg in call.args if isinstance(arg, Ref) and arg.tracked}
    if not reached:
        return True
    for operation in tape.operations[call.first : call.last]:
        if not reached.isdisjoint(operation.reads):
            reached.update((*operation.makes, *operation.writes))
    storages = {tape.slots[slot].storage for slot in reached}
    return any(
        slot in reached or tape.slots[slot].storage in storages for slot in call.outputs if slot is not None
    )


@contextmanager
def eager_compiler(state: State) -> Iterator[None]:
    """Compiled code runs operation by operation; with fullgraph=True it would refuse to run under a tape."""
    loaded = any(name in sys.modules for name in ("torch._dynamo", "torch.nn.attention.flex_attention"))
    with torch.compiler.set_stance("force_eager") if loaded else nullcontext():
        yield


@contextmanager
def watched_optimizers(state: State) -> Iterator[None]:
    """Marks the operations of an optimizer's step."""
    with ExitStack() as stack:
        stack.callback(
            register_optimizer_step_pre_hook(lambda optimizer, *_: enter_optimizer(state, optimizer)).remove
        )
        stack.callback(register_optimizer_step_post_hook(lambda *_: leave_optimizer(state)).remove)
        yield


def enter_optimizer(state: State, optimizer: torch.optim.Optimizer) -> None:
    state.optimizer_depth += 1
    state.tape.stepped_at.append(len(state.tape.operations))
    if any(call.accumulates for call in state.tape.backwards):
        state.guarded(state.note_gradients, [p for group in optimizer.param_groups for p in group["params"]])


def leave_optimizer(state: State) -> None:
    state.optimizer_depth = max(0, state.optimizer_depth - 1)


@contextmanager
def watched_clearing(state: State) -> Iterator[None]:
    """Notes every zero_grad: setting .grad to None is no operation."""
    with ExitStack() as stack:
        for cls in (torch.nn.Module, torch.optim.Optimizer):
            own = cls.zero_grad

            def watched(self: Any, *args: Any, _own: Callable = own, **kwargs: Any) -> Any:
                state.tape.cleared_at.append(len(state.tape.operations))
                return _own(self, *args, **kwargs)

            stack.callback(setattr, cls, "zero_grad", own)
            cls.zero_grad = wraps(own)(watched)  # type: ignore[method-assign]
        yield


@contextmanager
def left_to_tracers(state: State) -> Iterator[None]:
    """torch.jit.trace goes without our mode: below any mode what it traces is other operations, and may raise."""
    with ExitStack() as stack:
        for place, name in ((tracing, "_trace_impl"), (tracing, "trace_module"), (torch.jit, "trace_module")):
            own = getattr(place, name, None)
            if own is None:  # another version of PyTorch
                continue

            def alone(*args: Any, _own: Callable = own, **kwargs: Any) -> Any:
                # the script's own modes see what they would see
                ours_only = torch._C._len_torch_dispatch_stack() == 1
                with state.unseen(), _disable_current_modes() if ours_only else nullcontext():
                    return _own(*args, **kwargs)

            stack.callback(setattr, place, name, own)
            setattr(place, name, wraps(own)(alone))
        yield


@contextmanager
def ctc_by_numbers(state: State) -> Iterator[None]:
    """torch.ctc_loss is given its lengths as numbers, which is what it makes of tensors where nobody watches.

    Below a mode it keeps them as tensors instead, and raises where they are not on the device of the rest.
    """
    own = torch.ctc_loss

    def by_numbers(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = [arg.tolist() if isinstance(arg, torch.Tensor) else arg for arg in args[:2]]
        for name in ("input_lengths", "target_lengths"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return own(log_probs, targets, *lengths, *args[2:], **kwargs)  # type: ignore[arg-type]

    torch.ctc_loss = wraps(own)(by_numbers)
    try:
        yield
    finally:
        torch.ctc_loss = own
