"""What recording has to remember while a step runs; the tape keeps only what a replay needs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradproof.tape.arrays import Arrays
from gradproof.tape.attention import generator_state
from gradproof.tape.calls import note_operator
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
    DROPS_INSIDE,
    FRESH,
    OVERWRITES,
    READS_NO_VALUES,
    has_own_backward,
    ignores_first_argument,
    is_collective,
    is_random,
    is_view,
    name_of,
    written_arguments,
)
from gradproof.tape.places import user_line
from gradproof.tape.tensors import (
    alias,
    contiguous_strides,
    fingerprint,
    freeze,
    geometry_of,
    load,
    map_tensors,
    nbytes,
    on_host,
    plain,
    storage_key,
    tensors_in,
)

_WHOLE_STORAGE = 1 << 20  # bytes: a leaf's memory up to this size, or twice the leaf, is kept whole
_LARGE = 64 << 20  # bytes: an input larger than this is a data set
_FILLED = 1 << 30  # bytes: larger fresh memory is left as it is
SENTINEL = 1.4142135e-5  # fills fresh memory while recording: what still holds it was never written


class State:
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
        self.apart: set[int] = set()  # storages too large to keep whole: each view is a leaf of its own
        self.large: set[int] = set()  # slots of a whole data set: what is picked from them is kept instead
        self.gradient_of = {id(p.grad): p for p in parameters if p.grad is not None}
        self.count: Counter[str] = Counter()
        self.unknown: dict[int, bool] = {}  # storages of unknown content; True: filled by us
        self.arrays = Arrays()
        self.was_read: set[int] = set()
        self.pins: list = []  # weak references: as long as they live, no address is used twice
        self.module_stack: list[tuple[ModuleCall | None, str]] = []
        self.module_paths: dict[int, str] = {}
        self.call: FunctionCall | None = None
        self.call_depth = 0
        self.backward: list[BackwardCall] = []
        self.optimizer_depth = 0
        self.grad_enabled = True
        self.paused = False
        self.active = True
        self.pid = os.getpid()  # a forked data loader inherits the mode
        self.engine_code: CodeType | None = None  # the frame below which backward runs
        self.forward_at: dict[int, int] = {}  # autograd sequence number -> forward operation
        self.made_at: dict[tuple[int, int], int] = {}  # (sequence number, output) -> slot
        self.fill = not (
            torch.are_deterministic_algorithms_enabled()
            and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        )

    def guarded(self, function: Callable, *args: Any) -> Any:
        """Runs a piece of recording: not taped itself, and what it raises ends the tape, not the training."""
        outer, self.paused = self.paused, True
        try:
            return function(*args)
        except Exception as error:
            self.tape.broken = f"recording stopped at operation {len(self.tape.operations)}: {error!r}"
            return None
        finally:
            self.paused = outer

    # -- operations

    def before(self, func: Any, args: tuple, kwargs: dict, grad_enabled: bool) -> tuple:
        """Everything that has to be known before the operator changes its arguments."""
        line, scaled = self.user_line()
        name = name_of(func)
        written = [
            value
            for position, key in written_arguments(func)
            for value in tensors_in(args[position] if position < len(args) else kwargs.get(key))
        ]
        if name not in READS_NO_VALUES and not is_view(func):
            skip = {id(tensor) for tensor in written}
            if args and ignores_first_argument(func, args, kwargs):
                skip.add(id(args[0]))
            self.load_unknown([t for t in tensors_in((args, kwargs)) if id(t) not in skip], line)
        refs = map_tensors((args, kwargs), self.reference)
        for tensor in written:
            self.keep_before_write(tensor, name)
        self.was_read.update(ref.slot for ref in references(refs))
        drawn_from = None
        if name in DROPS_INSIDE and is_random(func, args, kwargs):
            drawn_from = generator_state(args[0].device)
        return refs, written, line, scaled, grad_enabled, drawn_from

    def after(self, pending: tuple, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        (ref_args, ref_kwargs), written, line, scaled, grad_enabled, drawn_from = pending
        name = name_of(func)
        if is_collective(func):  # may still be running: its result is read when somebody reads it
            written = list(tensors_in((args, kwargs)))
            self.unknown.update({key: False for t in written if (key := storage_key(t)) is not None})
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
        operation.results = map_tensors(result, lambda t: self.result(t, index), other=plain)
        if has_own_backward(func) and self.call is None and not self.backward:
            note_operator(self, operation, kwargs)
        if scaled and name == "mul":
            self.tape.scaled.add(index)
        if name in ("stack", "cat"):
            self.arrays.look(self.tape, index, list(tensors_in(args)))
        fresh = list(tensors_in(result))
        if name in FRESH:
            self.fill_fresh(fresh)
        elif not is_collective(func):
            for tensor in written:
                self.unknown.pop(storage_key(tensor) or 0, None)
        if not self.large.isdisjoint(operation.reads) and fresh:
            self.pick_from_large(operation, fresh)
        elif drawn_from is not None:
            operation.frozen = (drawn_from,)
        elif (
            is_random(func, args, kwargs) or name == "wait_tensor"
        ):  # awaited: now a collective's result is known
            operation.frozen = freeze(name, written if name == "rrelu_with_noise" else fresh or written)
        if not is_view(func) and name not in FRESH:
            number = fingerprint(fresh or written)
            if number is not None:
                operation.fingerprint = len(self.tape.fingerprints)
                self.tape.fingerprints.append(number)  # type: ignore[union-attr]

    def pick_from_large(self, operation: Operation, results: list[torch.Tensor]) -> None:
        """A batch taken out of a data set: the batch is kept, not the data set."""
        if sum(nbytes(result) for result in results) <= _LARGE:
            operation.frozen = tuple(result.detach().clone() for result in results)
        else:
            self.large.update(operation.makes)

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
        stepping = self.optimizer_depth > 0 and not grad_enabled and self.call is None  # closures enable it
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

    # -- slots

    def reference(self, tensor: torch.Tensor) -> Ref:
        return Ref(self.slot(tensor), tensor.requires_grad)

    def slot(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor; one never seen is an alias of known memory, or a leaf."""
        index = self.slot_of.get(tensor._cdata)
        if index is None:
            index = self.alias_or_leaf(tensor)
        if tensor.requires_grad and (node := tensor.grad_fn) is not None:
            self.made_at[(node._sequence_nr(), tensor.output_nr)] = index
            self.tape.slots[index].followed = True
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
        self.pins.append(torch._C._WeakTensorRef(tensor))  # type: ignore[attr-defined]
        key = storage_key(tensor)
        if key is not None:
            if key not in self.on_storage:
                self.on_storage[key] = []
                self.pins.append(StorageWeakRef(tensor.untyped_storage()))
            self.on_storage[key].append(index)
            slot.storage = self.storage_number.setdefault(key, len(self.storage_number))
            self.geometry[index] = geometry_of(tensor)
        return index

    def alias_or_leaf(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        same_type = [
            other
            for other in self.on_storage.get(key or 0, ())
            if self.tape.slots[other].dtype == tensor.dtype
        ]
        geometry = geometry_of(tensor)
        same = [other for other in same_type if self.geometry[other] == geometry]
        if not same_type or (key in self.apart and not same):
            return self.leaf(tensor, key)
        source = (same or same_type)[-1]
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
        if slot.kind == "input" and nbytes(tensor) > _LARGE:
            self.large.add(index)
            return index
        self.arrays.note(tensor, key)
        memory = self.whole_memory(tensor)
        if memory is None:
            memory = Memory(tensor.detach().clone().reshape(-1), kept=True)
            memory.views[index] = (tuple(tensor.shape), contiguous_strides(tensor.shape), 0)
            self.apart.add(key)
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
        # where nobody said what the parameters are, leaves that require gradients are
        free = not self.parameters and tensor.is_leaf and tensor.requires_grad
        if name is not None or isinstance(tensor, torch.nn.Parameter) or free:
            self.parameters[id(tensor)] = tensor
            return "parameter", name or self.numbered("parameter")
        if id(tensor) in self.buffers:
            return "buffer", self.buffers[id(tensor)]
        owner = self.gradient_of.get(id(tensor))
        if owner is not None and owner.grad is tensor:
            return "gradient", f"{self.name_of_parameter(owner) or 'parameter'}.grad"
        if self.optimizer_depth > 0 and not self.grad_enabled:
            return "state", self.numbered("optimizer state")
        if self.backward:
            return "outside", "made outside PyTorch"
        return "input", self.numbered("input")

    def numbered(self, word: str) -> str:
        self.count[word] += 1
        return f"{word}{self.count[word] - 1}"

    # -- memory

    def keep_before_write(self, tensor: torch.Tensor, name: str) -> None:
        """A leaf's memory is copied only when somebody is about to change it."""
        memory = self.memory_of.get(storage_key(tensor) or 0)
        if memory is None or memory.kept:
            return
        memory.kept = True
        covers = tensor.numel() == memory.flat.numel()
        needed = not covers or name not in OVERWRITES or not self.was_read.isdisjoint(memory.views)
        memory.flat = memory.flat.clone() if needed else torch.zeros_like(memory.flat)

    def load_unknown(self, tensors: list[torch.Tensor], line: Line | None) -> None:
        """Memory the tape does not know is about to be read: keep what it holds."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is None or key not in self.unknown:
                continue
            ours = self.unknown.pop(key)
            slot = self.slot(tensor)
            operation = self.append(load, (Ref(slot, False),), {}, line, writes=(slot,))
            operation.frozen = (tensor.detach().clone(),)
            if self.call is not None:
                self.call.opaque = (
                    self.call.opaque or "a kernel that PyTorch does not dispatch writes its results"
                )
            if ours and tensor.is_floating_point():
                untouched = int((tensor == torch.tensor(SENTINEL).to(tensor.dtype)).sum())
                if untouched:
                    text = f"{untouched} of {tensor.numel()} elements of {self.tape.slots[slot]}"
                    self.tape.never_written[operation.index] = text

    def changed_outside(self, tensors: list[torch.Tensor], before: list[float | None]) -> None:
        """A kernel has run: the memory it changed is no longer known."""
        for tensor, number in zip(tensors, before, strict=True):
            key = storage_key(tensor)
            now = fingerprint([tensor])
            if key is not None and now is not None and float(now) != number and key not in self.unknown:
                self.keep_before_write(tensor, "")
                self.unknown[key] = False

    def fill_fresh(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            key = storage_key(tensor)
            if key is None or tensor.numel() == 0:
                continue
            fill = self.fill and tensor.is_floating_point() and tensor.element_size() >= 2
            fill = fill and nbytes(tensor) <= _FILLED
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
        self.active = False
        tape = self.tape
        try:
            written = {slot for operation in tape.operations for slot in operation.writes}
            tape.stepped = [slot.index for slot in tape.parameters if slot.index in written]
            self.note_gradients(self.parameters.values())
            for memory in tape.memories:
                if not memory.kept:
                    memory.flat, memory.kept = memory.flat.clone(), True
            tape.fingerprints = on_host(list(tape.fingerprints))
        except Exception as error:
            tape.broken = tape.broken or f"the tape could not be closed: {error!r}"
        self.pins.clear()

    def user_line(self) -> tuple[Line | None, bool]:
        """The user's line that is running; of a backward, only what runs inside the engine."""
        return user_line(self.engine_code if self.backward else None)
