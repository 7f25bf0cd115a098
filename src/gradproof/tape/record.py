"""Records one training step as a list of operations, without keeping what the operations compute.

    with record(names={p: n for n, p in model.named_parameters()}) as tape:
        loss = loss_fn(model(x), y)
        loss.backward()

Nothing is installed while no step is recorded. A recorder that fails stops recording (`tape.broken` says why); it never
raises into the training it watches.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gradproof.tape import calls
from gradproof.tape.operations import (
    BackwardCall,
    FunctionCall,
    Line,
    Memory,
    ModuleCall,
    Operation,
    Ref,
    Slot,
    Tape,
    references,
)
from gradproof.tape.operators import (
    FRESH,
    OVERWRITES,
    READS_NO_VALUES,
    ignores_first_argument,
    is_collective,
    is_random,
    is_view,
    name_of,
    written_arguments,
)

Names = Mapping[torch.Tensor, str] | Callable[[torch.Tensor], str | None]

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (
    os.path.dirname(os.path.abspath(torch.__file__)),
    *(os.path.join(_OWN, room) for room in ("tape", "probes", "experiments", "integrations", "cli.py")),
    "<",
)
_WHOLE_STORAGE = 1 << 20  # bytes: a leaf's memory up to this size, or twice the leaf, is kept whole
SENTINEL = 1.4142135e-5  # fresh memory is filled with it while recording, so that what was never written is known


def alias(source: torch.Tensor, size: tuple, stride: tuple, offset: int) -> torch.Tensor:
    """A second tensor on known memory that no operator made: a saved activation, a shallow copy."""
    same = tuple(source.shape) == tuple(size) and tuple(source.stride()) == tuple(stride)
    return source if same and source.storage_offset() == offset else source.as_strided(size, stride, offset)


def load(target: torch.Tensor) -> None:
    """Memory that something outside PyTorch's operators has written; the value is kept with the operation."""


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
        """Inside a hook of an optimizer no other can be registered: there, enter_optimizer and leave_optimizer tell."""
        self.state = _State(self.tape, self._name_of, self._known_parameters)
        self.tape.rng["cpu"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                self.tape.rng[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
        self._stack.enter_context(calls.watched_modules(self.state))
        self._stack.enter_context(calls.watched_functions(self.state))
        self._stack.enter_context(calls.watched_backwards(self.state))
        if not inside_optimizer_hook:
            self._stack.enter_context(calls.watched_optimizers(self.state))
        self._stack.enter_context(_Mode(self.state))
        return self.tape

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        calls.enter_optimizer(self.state, optimizer)

    def leave_optimizer(self) -> None:
        calls.leave_optimizer(self.state)

    def stop(self) -> Tape:
        self._stack.close()
        self.state.finish()
        return self.tape


class _Mode(TorchDispatchMode):
    def __init__(self, state: _State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor unfolds itself; its inner operations come back here
        state = self.state
        if state.tape.broken or func.namespace == "profiler":
            return func(*args, **kwargs)
        grad_enabled = torch.is_grad_enabled()
        with torch.no_grad():
            pending = state.guarded(state.before, func, args, kwargs, grad_enabled)
        result = func(*args, **kwargs)
        if pending is not None:
            with torch.no_grad():
                state.guarded(state.after, pending, func, args, kwargs, result)
        return result


class _State:
    """What recording has to remember; the tape keeps only what a replay needs."""

    def __init__(self, tape: Tape, name_of_parameter: Callable, parameters: list[torch.Tensor]) -> None:
        self.tape = tape
        self.name_of_parameter = name_of_parameter
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self.buffers: dict[int, str] = {}
        self.slot_of: dict[int, int] = {}  # address of a tensor -> slot
        self.on_storage: dict[int, list[int]] = {}  # address of a storage -> its slots
        self.storage_number: dict[int, int] = {}
        self.geometry: dict[int, tuple] = {}
        self.memory_of: dict[int, Memory] = {}
        self.unknown: dict[int, bool] = {}  # storages the tape does not know the content of; True: filled by us
        self.was_read: set[int] = set()
        self.pins: list = []  # weak references: as long as they live, no address is used twice
        self.module_stack: list[tuple[ModuleCall | None, str]] = []
        self.module_paths: dict[int, str] = {}
        self.call: FunctionCall | None = None
        self.call_depth = 0
        self.backward: list[BackwardCall] = []
        self.optimizer_depth = 0
        self.forward_at: dict[int, int] = {}  # autograd sequence number -> forward operation
        self.made_at: dict[tuple[int, int], int] = {}  # (sequence number, output) -> slot
        self.fill = not (
            torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
        )

    def guarded(self, function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            self.tape.broken = f"recording stopped at operation {len(self.tape.operations)}: {error!r}"
            return None

    # -- operations ----------------------------------------------------------------------------------------------

    def before(self, func: Any, args: tuple, kwargs: dict, grad_enabled: bool) -> tuple:
        """Everything that has to be known before the operator changes its arguments."""
        line, scaled = self.user_line()
        name = name_of(func)
        written = [
            value
            for position, key in written_arguments(func)
            for value in _tensors(args[position] if position < len(args) else kwargs.get(key))
        ]
        if name not in READS_NO_VALUES and not is_view(func):
            skip = {id(tensor) for tensor in written}
            if args and ignores_first_argument(func, args, kwargs):
                skip.add(id(args[0]))
            self.load_unknown([t for t in _tensors((args, kwargs)) if id(t) not in skip], line)
        refs = _map_tensors((args, kwargs), self.reference)
        for tensor in written:
            self.keep_before_write(tensor, name)
        self.was_read.update(ref.slot for ref in references(refs))
        return refs, written, line, scaled, grad_enabled

    def after(self, pending: tuple, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        (ref_args, ref_kwargs), written, line, scaled, grad_enabled = pending
        name = name_of(func)
        if is_collective(func):  # may still be running: its result is read when somebody reads it
            written = _tensors((args, kwargs))
            self.unknown.update({key: False for t in written if (key := _storage_key(t)) is not None})
        index = len(self.tape.operations)
        operation = self.append(
            func,
            ref_args,
            ref_kwargs,
            line=line,
            grad_enabled=grad_enabled,
            writes=tuple(self.slot_of[t._cdata] for t in written),
            tracked=grad_enabled and any(ref.tracked for ref in references((ref_args, ref_kwargs))),
        )
        operation.results = _map_tensors(result, lambda t: self.result(t, index), other=_plain)
        if scaled and name == "mul":
            self.tape.scaled.add(index)
        fresh = _tensors(result)
        if name in FRESH:
            self.fill_fresh(fresh)
        elif not is_collective(func):
            for tensor in written:
                self.unknown.pop(_storage_key(tensor) or 0, None)
        if is_random(func, args, kwargs):
            operation.frozen = _freeze(name, fresh or written)
        if not is_view(func) and name not in FRESH:
            number = fingerprint(fresh or written)
            if number is not None:
                operation.fingerprint = len(self.tape.fingerprints)
                self.tape.fingerprints.append(number)  # type: ignore[union-attr]

    def append(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict,
        line: Line | None,
        grad_enabled: bool = False,
        writes: tuple[int, ...] = (),
        tracked: bool = False,
    ) -> Operation:
        node = torch._C._current_autograd_node() if self.backward else None
        origin = self.forward_at.get(node._sequence_nr()) if node is not None else None
        stepping = self.optimizer_depth > 0 and not grad_enabled and self.call is None  # a closure enables gradients
        phase = "backward" if self.backward else "optimizer" if stepping else "forward"
        module = self.module_stack[-1][1] if self.module_stack else ""
        if origin is not None and not module:
            module = self.tape.operations[origin].module
        operation = Operation(
            index=len(self.tape.operations),
            func=func,
            args=args,
            kwargs=kwargs,
            results=None,
            writes=writes,
            phase=phase,
            module=module,
            line=line,
            grad_enabled=grad_enabled,
            call=self.call.index if self.call is not None else None,
            node=node.name().removeprefix("torch::autograd::") if node is not None else "",
            made_from=origin,
            in_backward=self.backward[0].index if self.backward else None,
        )
        if tracked:
            self.forward_at.setdefault(torch.autograd._get_sequence_nr() - 1, operation.index)
        self.tape.operations.append(operation)
        return operation

    # -- slots ---------------------------------------------------------------------------------------------------

    def reference(self, tensor: torch.Tensor) -> Ref:
        return Ref(self.slot(tensor), tensor.requires_grad)

    def slot(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor; one never seen is an alias of known memory, or a leaf."""
        index = self.slot_of.get(tensor._cdata)
        if index is None:
            index = self.alias_or_leaf(tensor)
        if tensor.requires_grad and (node := tensor.grad_fn) is not None:
            self.made_at[(node._sequence_nr(), tensor.output_nr)] = index
        return index

    def result(self, tensor: torch.Tensor, operation: int) -> Ref:
        index = self.slot_of.get(tensor._cdata)
        if index is None:
            index = self.new_slot(tensor, made_by=operation)
        return Ref(index, tensor.requires_grad)

    def new_slot(self, tensor: torch.Tensor, made_by: int | None) -> int:
        index = len(self.tape.slots)
        slot = Slot(index, tuple(tensor.shape), tensor.dtype, tensor.device, made_by)
        self.tape.slots.append(slot)
        self.slot_of[tensor._cdata] = index
        self.pins.append(torch._C._WeakTensorRef(tensor))
        key = _storage_key(tensor)
        if key is not None:
            if key not in self.on_storage:
                self.on_storage[key] = []
                self.pins.append(StorageWeakRef(tensor.untyped_storage()))
            self.on_storage[key].append(index)
            slot.storage = self.storage_number.setdefault(key, len(self.storage_number))
            self.geometry[index] = _geometry(tensor)
        return index

    def alias_or_leaf(self, tensor: torch.Tensor) -> int:
        key = _storage_key(tensor)
        same_type = [
            other for other in self.on_storage.get(key or 0, ()) if self.tape.slots[other].dtype == tensor.dtype
        ]
        memory = self.memory_of.get(key or 0)
        if memory is not None and not memory.views:
            same_type = []
        if not same_type:
            return self.leaf(tensor, key)
        geometry = _geometry(tensor)
        source = next((o for o in reversed(same_type) if self.geometry[o] == geometry), same_type[-1])
        line, _ = self.user_line()
        refs = (Ref(source, tensor.requires_grad), *geometry)
        operation = self.append(alias, refs, {}, line, grad_enabled=torch.is_grad_enabled())
        operation.results = self.result(tensor, operation.index)
        return operation.results.slot

    def leaf(self, tensor: torch.Tensor, key: int | None) -> int:
        index = self.new_slot(tensor, made_by=None)
        slot = self.tape.slots[index]
        slot.kind, slot.name = self.kind_and_name(tensor)
        if key is None:
            self.tape.loose[index] = tensor.detach().clone()
            return index
        memory = self.whole_memory(tensor)
        if memory is None:
            memory = Memory(tensor.detach().clone().reshape(-1), kept=True)
            memory.views[index] = (tuple(tensor.shape), _contiguous(tensor.shape), 0)
            self.on_storage[key].remove(index)  # another view of this memory will be a leaf of its own
        else:
            memory.views[index] = self.geometry[index]
            self.memory_of[key] = memory
        self.tape.memories.append(memory)
        return index

    def whole_memory(self, tensor: torch.Tensor) -> Memory | None:
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        if storage.nbytes() > max(2 * tensor.numel() * size, _WHOLE_STORAGE) or storage.nbytes() % size:
            return None
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
        return Memory(flat)

    def kind_and_name(self, tensor: torch.Tensor) -> tuple[str, str]:
        name = self.name_of_parameter(tensor)
        free = not self.parameters and tensor.is_leaf and tensor.requires_grad  # nobody said what the parameters are
        if name is not None or isinstance(tensor, torch.nn.Parameter) or free:
            self.parameters[id(tensor)] = tensor
            return "parameter", name or f"parameter{len(self.tape.parameters)}"
        if id(tensor) in self.buffers:
            return "buffer", self.buffers[id(tensor)]
        owner = next((p for p in self.parameters.values() if p.grad is tensor), None)
        if owner is not None:
            return "gradient", f"{self.name_of_parameter(owner) or 'parameter'}.grad"
        if self.optimizer_depth > 0:
            return "state", f"optimizer state{len(self.tape.leaves('state'))}"
        if self.backward:
            return "outside", "made outside PyTorch"
        return "input", f"input{len(self.tape.inputs)}"

    # -- memory --------------------------------------------------------------------------------------------------

    def keep_before_write(self, tensor: torch.Tensor, name: str) -> None:
        """A leaf's memory is copied only when somebody is about to change it."""
        memory = self.memory_of.get(_storage_key(tensor) or 0)
        if memory is None or memory.kept:
            return
        memory.kept = True
        covers = tensor.numel() == memory.flat.numel()
        needed = not covers or name not in OVERWRITES or not self.was_read.isdisjoint(memory.views)
        memory.flat = memory.flat.clone() if needed else torch.zeros_like(memory.flat)

    def load_unknown(self, tensors: list[torch.Tensor], line: Line | None) -> None:
        """Memory the tape does not know is about to be read: keep what it holds."""
        for tensor in tensors:
            key = _storage_key(tensor)
            if key is None or key not in self.unknown:
                continue
            ours = self.unknown.pop(key)
            slot = self.slot(tensor)
            operation = self.append(load, (Ref(slot, False),), {}, line, writes=(slot,))
            operation.frozen = (tensor.detach().clone(),)
            if self.call is not None:
                self.call.opaque = "a kernel that PyTorch does not dispatch writes its results"
            if ours and tensor.is_floating_point():
                untouched = int((tensor == torch.tensor(SENTINEL).to(tensor.dtype)).sum())
                if untouched:
                    text = f"{untouched} of {tensor.numel()} elements of {self.tape.slots[slot]}"
                    self.tape.never_written[operation.index] = text

    def fill_fresh(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            key = _storage_key(tensor)
            if key is None or tensor.numel() == 0:
                continue
            fill = self.fill and tensor.is_floating_point() and tensor.element_size() >= 2
            self.unknown[key] = fill
            if fill:
                tensor.fill_(SENTINEL)

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Which tensor is each parameter's .grad, when the optimizer is about to read it or the tape ends."""
        for parameter in parameters:
            slot = self.slot_of.get(parameter._cdata)
            if slot is None or slot in self.tape.final_gradients or parameter.grad is None:
                continue
            gradient = self.slot_of.get(parameter.grad._cdata)
            if gradient is not None:
                self.tape.final_gradients[slot] = (len(self.tape.operations), gradient)

    def finish(self) -> None:
        """What the tape must own before training goes on."""
        tape = self.tape
        try:
            written = {slot for operation in tape.operations for slot in operation.writes}
            tape.stepped = [slot.index for slot in tape.parameters if slot.index in written]
            self.note_gradients(self.parameters.values())
            for memory in tape.memories:
                if not memory.kept:
                    memory.flat, memory.kept = memory.flat.clone(), True
            by_device: dict = {}
            prints = list(tape.fingerprints)
            for place, value in enumerate(prints):
                by_device.setdefault(value.device, []).append((place, value))
            tape.fingerprints = torch.empty(len(prints), dtype=torch.float64)
            for pairs in by_device.values():
                places, values = zip(*pairs, strict=True)
                tape.fingerprints[list(places)] = torch.stack(values).cpu()
        except Exception as error:
            tape.broken = tape.broken or f"the tape could not be closed: {error!r}"
        self.pins.clear()

    # -- places --------------------------------------------------------------------------------------------------

    def user_line(self) -> tuple[Line | None, bool]:
        """The innermost frame that is neither torch nor gradproof; of a backward, only inside the engine."""
        frame = sys._getframe(3)
        scaled = False
        while frame is not None:
            code = frame.f_code
            if self.backward and code is calls.BACKWARD_CODE:
                return None, False
            if not code.co_filename.startswith(_HIDDEN):
                return Line(code.co_filename, frame.f_lineno, code.co_name), scaled
            scaled = scaled or code.co_filename.endswith("grad_scaler.py")
            frame = frame.f_back  # type: ignore[assignment]
        return None, False


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [tensor for part in tree for tensor in _tensors(part)] if isinstance(tree, (tuple, list)) else []


def _map_tensors(tree: Any, function: Callable, other: Callable = lambda value: value) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return (tuple if isinstance(tree, tuple) else list)(_map_tensors(part, function, other) for part in tree)
    if isinstance(tree, dict):
        return {key: _map_tensors(part, function, other) for key, part in tree.items()}
    return other(tree)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool, complex, str)) else None


def _storage_key(tensor: torch.Tensor) -> int | None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # functorch wrappers, meta tensors of some backends
        return None


def _geometry(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fingerprint(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """One number for what an operation made, so that a replay can tell whether it made the same."""
    sums = [_sum(t) for t in tensors if t.layout == torch.strided and t.numel() > 0 and t.dtype in _SUMMED]
    return sum(sums[1:], sums[0]) if sums else None


_SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    low = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.sum(dtype=torch.float32) if low else tensor.sum()).double()


def _freeze(name: str, values: list[torch.Tensor]) -> tuple:
    if name == "native_dropout":
        return (None, values[1].clone())
    if name.startswith("bernoulli"):
        return tuple(value.bool() for value in values)  # one byte instead of four
    return tuple(value.detach().clone() for value in values)
