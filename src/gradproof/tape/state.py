"""What recording has to remember while a step runs; the tape keeps only what a replay needs."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch

from gradproof.tape.arrays import Arrays
from gradproof.tape.aside import Ahead, on_host
from gradproof.tape.attention import generator_state
from gradproof.tape.calls import note_operator
from gradproof.tape.living import Living, alive
from gradproof.tape.modes import unseen_by_modes
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
)
from gradproof.tape.operators import (
    OVERWRITES,
    RRELU,
    WRITTEN_RESULTS,
    Traits,
    ignores_first_argument,
    is_random,
)
from gradproof.tape.pins import Pins
from gradproof.tape.places import user_line
from gradproof.tape.shards import Talk, is_sharded, local
from gradproof.tape.tensors import (
    alias,
    contiguous_strides,
    fingerprint,
    freeze,
    geometry_of,
    load,
    map_tensors,
    nbytes,
    numbers_on_host,
    plain,
    storage_key,
    tensors_in,
)

_WHOLE_STORAGE = 1 << 20  # bytes: a leaf's memory up to this size, or twice the leaf, is kept whole
_LARGE = 64 << 20  # bytes: an input larger than this is a data set
_PREPARATION = 20_000  # operations without a gradient before the first that has one
_FILLED = 1 << 30  # bytes: larger fresh memory is left as it is
SENTINEL = 1.4142135e-5  # fills fresh memory while recording: what still holds it was never written


class Pending(NamedTuple):
    """What was known of an operation before it ran."""

    args: tuple
    kwargs: dict
    flat: list[Ref]  # all that it reads
    written: list[torch.Tensor]
    line: Line | None
    scaled: bool  # called through a GradScaler
    grad_enabled: bool
    drawn_from: torch.Tensor | None  # state of the generator


class State:
    """What recording has to remember; the tape keeps only what a replay needs."""

    def __init__(
        self, tape: Tape, name_of_parameter: Callable, parameters: Living[str], waits: bool = False
    ) -> None:
        self.tape = tape
        self.known_parameters = parameters
        self.sharded = is_sharded(parameters)
        self.talk = Talk()
        self.running: list[torch.nn.Module] = []  # who has been called, outermost first
        self.parts = {id(local(p)): p for p in parameters} if self.sharded else {}
        self.uses_parts = False  # tensor parallel: operations read a part of a parameter
        self.waits = waits  # a long preparation is forgotten
        self.began = False  # an operation of the tape was followed by autograd
        self.idle = False  # what runs is no part of a step
        self.name_of_parameter = name_of_parameter
        self.parameters: Living[None] = Living((parameter, None) for parameter in parameters)
        self.buffers: dict[int, str] = {}
        self.slot_of: dict[int, int] = {}  # address of a tensor -> slot
        self.on_storage: dict[int, list[int]] = {}  # address of a storage -> its slots
        self.storage_number: dict[int, int] = {}
        self.geometry: dict[int, tuple] = {}
        self.refs: dict[int, Ref] = {}  # by slot
        self.tracked_refs: dict[int, Ref] = {}
        self.memory_of: dict[int, Memory] = {}
        self.apart: set[int] = set()  # storages too large to keep whole: each view is a leaf of its own
        self.large: set[int] = set()  # slots of a whole data set: what is picked from them is kept instead
        self.note_owners()
        self.count: Counter[str] = Counter()
        self.unknown: dict[int, bool] = {}  # storages of unknown content; True: filled by us
        self.loaded: dict[int, set[int]] = {}  # of those, the slots whose part is known by now
        self.lent: list[tuple[torch.Tensor, float | None]] = []  # by its address, with what it held
        self.arrays = Arrays()
        self.was_read: set[int] = set()
        self.pins = Pins()  # as long as they are there, no address is used twice
        self.module_stack: list[tuple[ModuleCall | None, str]] = []
        self.module_paths: dict[int, str] = {}
        self.call: FunctionCall | None = None
        self.call_depth = 0
        self.backward: list[BackwardCall] = []
        self.optimizer_depth = 0
        self.by_hand = False  # the script changes its parameters itself
        self.updating = False  # and is about to
        self.asked_for: list[int] | None = (
            None  # parameters whose gradients torch.autograd.grad is to hand over
        )
        self.grad_enabled = True
        self.paused = False
        self.ahead: Ahead | None = None  # what is on its way to the host already
        self.twin = False  # a compiled module's call is made eagerly
        self.suspended: Callable[[], AbstractContextManager[Any]] | None = None  # set where code is compiled
        self.active = True
        self.pid = os.getpid()  # a forked data loader inherits the mode
        self.engine_code: CodeType | None = None  # the frame below which backward runs
        self.first_node = torch.autograd._get_sequence_nr()  # of those that the tape sees made
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
            if torch._C._len_torch_dispatch_stack() > 1 or torch._C._len_torch_function_stack():
                with unseen_by_modes():  # the script's own stand above the tape's
                    return function(*args)
            return function(*args)
        except Exception as error:
            self.tape.broken = f"recording stopped at operation {len(self.tape.operations)}: {error!r}"
            return None
        finally:
            self.paused = outer

    def beside(self, function: Callable, *args: Any) -> Any:
        """The same beside an operation, where autograd follows nothing."""
        follows = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)  # inside: when it returns, a signal handler may raise
            return self.guarded(function, *args)
        finally:
            torch._C._set_grad_enabled(follows)

    def guarded_call(self, function: Callable[[], Any]) -> Any:
        """The same for what is to be taped."""
        try:
            return function()
        except Exception as error:
            self.tape.broken = f"recording stopped at operation {len(self.tape.operations)}: {error!r}"
            return None

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is done meanwhile is no part of the step."""
        outer, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = outer

    # -- operations

    def before(self, traits: Traits, func: Any, args: tuple, kwargs: dict, grad_enabled: bool) -> Pending:
        """Everything that has to be known before the operator changes its arguments."""
        if self.lent:
            self.look_at_lent()
        line, scaled = self.user_line()
        written: list[torch.Tensor] = []
        for position, key in traits.writes:
            written += tensors_in(args[position] if position < len(args) else kwargs.get(key))
        if (
            self.unknown and traits.reads_values and not traits.collective
        ):  # a receiver's memory is no value yet
            skip = {id(tensor) for tensor in written}
            if args and ignores_first_argument(func, args, kwargs):
                skip.add(id(args[0]))
            self.load_unknown([t for t in tensors_in((args, kwargs)) if id(t) not in skip], line)
        flat: list[Ref] = []

        def refer(tensor: torch.Tensor) -> Ref:
            flat.append(ref := self.reference(tensor))
            return ref

        ref_args = map_tensors(args, refer)
        ref_kwargs = map_tensors(kwargs, refer) if kwargs else {}
        for tensor in written:
            self.keep_before_write(tensor, traits.name)
        self.was_read.update([ref.slot for ref in flat])
        drawn_from = None
        if traits.drops_inside and is_random(func, args, kwargs):
            drawn_from = generator_state(args[0].device)
        return Pending(ref_args, ref_kwargs, flat, written, line, scaled, grad_enabled, drawn_from)

    def after(
        self, pending: Pending, traits: Traits, func: Any, args: tuple, kwargs: dict, result: Any
    ) -> None:
        written = pending.written
        if traits.name == "set_" and not tensors_in(args[1:]):
            self.slot_of.pop(args[0]._cdata, None)  # a batch that a worker has put into shared memory: a leaf
            return
        if traits.collective:  # may still be running: its result is read when somebody reads it
            written = tensors_in((args, kwargs))
            for tensor in written:
                if (key := storage_key(tensor)) is not None:
                    self.known(key)
                    self.unknown[key] = False
        index = len(self.tape.operations)
        operation = self.append(
            func,
            pending.args,
            pending.kwargs,
            line=pending.line,
            grad_enabled=pending.grad_enabled,
            writes=tuple([self.slot_of[t._cdata] for t in written]),
            tracked=pending.grad_enabled and any(ref.tracked for ref in pending.flat),
        )
        made: list[torch.Tensor] = []

        def refer(tensor: torch.Tensor) -> Ref:
            made.append(tensor)
            return self.result(tensor, index)

        operation.results = map_tensors(result, refer, other=plain)
        if traits.foreign:
            operation.kept = tuple(self.keep(t) for t in made)
            if self.call is None and not self.backward:
                note_operator(self, operation, kwargs)
        if pending.scaled and traits.name == "mul":
            self.tape.scaled.add(index)
        if traits.name in ("stack", "cat"):
            self.arrays.look(self.tape, index, tensors_in(args))
        if traits.fresh:
            self.fill_fresh(made)
        elif self.unknown and not traits.collective:
            for tensor in written:
                self.known(storage_key(tensor) or 0)
        if self.large and made and not self.large.isdisjoint([ref.slot for ref in pending.flat]):
            self.pick_from_large(operation, made)
        elif pending.drawn_from is not None:
            operation.frozen = (pending.drawn_from,)
        elif traits.name == "wait_tensor" or (traits.seeded and is_random(func, args, kwargs)):
            # awaited: now a collective's result is known
            drawn = freeze(traits.name, written if traits.name in RRELU else made or written)
            operation.frozen = tuple(None if value is None else self.keep(value) for value in drawn)
        if not traits.views and not traits.fresh:
            number = fingerprint((made or written)[: WRITTEN_RESULTS.get(traits.name)])
            if number is not None:
                operation.fingerprint = len(self.tape.fingerprints)
                self.tape.fingerprints.append(number)  # type: ignore[union-attr]

    def pick_from_large(self, operation: Operation, results: list[torch.Tensor]) -> None:
        """A batch taken out of a data set: the batch is kept, not the data set."""
        if sum(nbytes(result) for result in results) <= _LARGE:
            operation.frozen = tuple(self.keep(result) for result in results)
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
        number = node._sequence_nr() if node is not None else self.first_node
        origin = self.forward_at.get(number) if node is not None else None
        if number < self.first_node:
            self.tape.older.add(self.backward[0].index)
        stepping = self.optimizer_depth > 0 and not grad_enabled and self.call is None  # closures enable it
        stepping = stepping or self.updating
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
        self.began = self.began or tracked
        if tracked or (self.sharded and grad_enabled and not self.backward):  # autograd follows the DTensors
            self.forward_at.setdefault(torch.autograd._get_sequence_nr() - 1, operation.index)
        self.tape.operations.append(operation)
        if self.waits and not self.began and len(self.tape.operations) > _PREPARATION:
            self.forget()
        return operation

    def forget(self) -> None:
        """So much has run that no gradient follows: data are made, or validated on. The step begins later."""
        self.restart()
        self.idle = True

    def restart(self) -> None:
        """A new tape: what the old one held is a leaf of this one."""
        kept = (self.engine_code, self.pid, self.suspended, self.ahead, self.by_hand)
        self.__init__(Tape(), self.name_of_parameter, self.known_parameters, self.waits)  # type: ignore[misc]
        self.engine_code, self.pid, self.suspended, self.ahead, self.by_hand = kept

    def wakes(self, module: torch.nn.Module) -> bool:
        """Whether a call of a module is where a step begins, after a preparation that was forgotten."""
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        return self.idle and trained and not self.module_stack

    # -- slots

    def reference(self, tensor: torch.Tensor) -> Ref:
        return self.ref(self.slot(tensor), tensor.requires_grad)

    def ref(self, slot: int, tracked: bool) -> Ref:
        """One object for all that name a slot: of every object that is kept, Python's garbage collector hears."""
        refs = self.tracked_refs if tracked else self.refs
        return refs.get(slot) or refs.setdefault(slot, Ref(slot, tracked))

    def slot(self, tensor: torch.Tensor) -> int:
        """The slot of a tensor; one never seen is an alias of known memory, or a leaf."""
        held = local(tensor) if self.sharded else tensor
        index = self.slot_of.get(held._cdata)
        if index is None:
            index = self.alias_or_leaf(held)
        if tensor.requires_grad and (node := tensor.grad_fn) is not None:
            self.made_at[(node._sequence_nr(), tensor.output_nr)] = index
            self.tape.slots[index].followed = True
        return index

    def result(self, tensor: torch.Tensor, operation: int) -> Ref:
        index = self.slot_of.get(tensor._cdata)
        if index is None:
            index = self.new_slot(tensor, operation)
        return self.ref(index, tensor.requires_grad)

    def new_slot(self, tensor: torch.Tensor, made_by: int | None) -> int:
        slots = self.tape.slots
        index, shape, number = len(slots), tuple(tensor.shape), -1
        self.slot_of[tensor._cdata] = index
        self.pins.tensor(tensor)
        key = storage_key(tensor)
        if key is not None:
            on_it = self.on_storage.get(key)
            if on_it is None:
                on_it = self.on_storage[key] = []
                self.pins.storage(tensor.untyped_storage())
            on_it.append(index)
            number = self.storage_number.setdefault(key, len(self.storage_number))
            self.geometry[index] = (shape, tensor.stride(), tensor.storage_offset())
        slots.append(Slot(index, shape, tensor.dtype, tensor.device, made_by, number))
        return index

    def alias_or_leaf(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        on_it = self.on_storage.get(key or 0)
        if on_it is None:
            return self.leaf(tensor, key)
        same_type = [other for other in on_it if self.tape.slots[other].dtype == tensor.dtype]
        geometry = geometry_of(tensor)
        same = [other for other in same_type if self.geometry[other] == geometry]
        if not same_type or (key in self.apart and not same):
            return self.leaf(tensor, key)
        source = self.followed_one(same or same_type) if self.sharded else (same or same_type)[-1]
        line, _ = self.user_line()
        refs = (Ref(source, tensor.requires_grad), *geometry)
        follows = torch.is_grad_enabled() or (self.sharded and tensor.requires_grad)
        operation = self.append(alias, refs, {}, line, grad_enabled=follows)
        operation.results = self.result(tensor, operation.index)
        return operation.results.slot

    def followed_one(self, slots: list[int]) -> int:
        """Of slots on one memory the last that autograd follows: what FSDP hands on in secret is no copy put aside."""
        made = [(slot, self.tape.slots[slot].made_by) for slot in slots]
        kept = [slot for slot, by in made if by is None or self.tape.operations[by].name != "detach"]
        return (kept or slots)[-1]

    def leaf(self, tensor: torch.Tensor, key: int | None) -> int:
        index = self.new_slot(tensor, made_by=None)
        slot = self.tape.slots[index]
        slot.kind, slot.name = self.kind_and_name(tensor)
        if key is None:
            self.tape.loose[index] = self.keep(tensor)
            return index
        if slot.kind == "input" and nbytes(tensor) > _LARGE:
            self.large.add(index)
            return index
        self.arrays.note(tensor, key)
        memory = self.whole_memory(tensor)
        if memory is None:
            memory = Memory(self.keep(tensor).reshape(-1), kept=True)
            memory.views[index] = (tuple(tensor.shape), contiguous_strides(tensor.shape), 0)
            self.apart.add(key)
        else:
            memory.views[index] = self.geometry[index]
            self.memory_of[key] = memory
            if slot.kind == "parameter" and self.sharded:  # FSDP takes its memory away when a layer has run
                memory.flat, memory.kept = self.keep(memory.flat), True
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
        if name is None and self.sharded:
            name = self.name_of_part(tensor)
        # where nobody said what the parameters are, leaves that require gradients are
        free = not self.parameters and tensor.is_leaf and tensor.requires_grad
        if name is not None or isinstance(tensor, torch.nn.Parameter) or free:
            self.parameters[tensor] = None
            return "parameter", name or self.numbered("parameter")
        if id(tensor) in self.buffers:
            return "buffer", self.buffers[id(tensor)]
        owner = alive(self.gradient_of[id(tensor)]) if id(tensor) in self.gradient_of else None
        if owner is not None and owner.grad is tensor:
            return "gradient", f"{self.name_of_parameter(owner) or 'parameter'}.grad"
        if self.updating or (self.optimizer_depth > 0 and not self.grad_enabled):
            return "state", self.numbered("optimizer state")
        if self.backward:
            return "outside", "made outside PyTorch"
        return "input", self.numbered("input")

    def name_of_part(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter whose part this is, or which has been gathered for a layer that runs now."""
        if (whole := self.parts.get(id(tensor))) is not None:
            self.uses_parts = True
            return self.name_of_parameter(whole)
        for module in reversed(self.running):
            for name, parameter in module.named_parameters():
                if parameter is tensor or local(parameter) is tensor:
                    self.uses_parts |= (
                        parameter is not tensor
                    )  # gathered, and still a part of a tensor-parallel layer
                    path = self.module_paths.get(id(module), "")
                    return f"{path}.{name}" if path else name
        return None

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
        memory.flat = self.keep(memory.flat, storage_key(tensor)) if needed else _zeros_for(memory.flat)

    def keep(self, tensor: torch.Tensor, key: int | None = None) -> torch.Tensor:
        """A copy that is the tape's own, in the host's memory: nothing of a step stays on an accelerator beyond it."""
        coming = self.ahead.take(key) if self.ahead is not None else None
        if self.sharded and tensor.untyped_storage().nbytes() < nbytes(tensor):
            raise RuntimeError("the memory of a tensor was taken away before it could be copied")
        return on_host(tensor) if coming is None else coming

    def load_unknown(self, tensors: list[torch.Tensor], line: Line | None) -> None:
        """Memory the tape does not know is about to be read: keep what it holds."""
        for tensor in tensors:
            key = storage_key(tensor)
            if key is None or key not in self.unknown:
                continue
            ours, slot = self.unknown[key], self.slot(tensor)
            if nbytes(tensor) >= tensor.untyped_storage().nbytes():
                self.known(key)
            elif slot in self.loaded.setdefault(key, set()):
                continue
            else:  # the rest of that memory is read when somebody reads it
                self.loaded[key].add(slot)
            operation = self.append(load, (Ref(slot, False),), {}, line, writes=(slot,))
            operation.frozen = (self.keep(tensor),)
            if self.call is not None:
                self.call.opaque = (
                    self.call.opaque or "a kernel that PyTorch does not dispatch writes its results"
                )
            if ours and tensor.is_floating_point():
                untouched = int(
                    (tensor == torch.tensor(SENTINEL, device=tensor.device).to(tensor.dtype)).sum()
                )
                if untouched:
                    text = f"{untouched} of {tensor.numel()} elements of {self.tape.slots[slot]}"
                    self.tape.never_written[operation.index] = text

    def known(self, key: int) -> None:
        self.unknown.pop(key, None)
        self.loaded.pop(key, None)

    def look_at_lent(self) -> None:
        """Memory whose address somebody has asked for: what has changed meanwhile was changed outside."""
        lent, self.lent = self.lent, []
        for tensor, before in lent:
            now = fingerprint([tensor])
            if before is not None and now is not None and float(now) != before and self.call is not None:
                self.call.opaque = (
                    self.call.opaque or "a kernel that PyTorch does not dispatch writes its results"
                )
            self.changed_outside([tensor], [before])

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

    def note_owners(self) -> None:
        """Whose gradient each .grad is that is there now."""
        self.gradient_of = {
            id(local(p.grad) if self.sharded else p.grad): weakref.ref(p)
            for p in self.parameters
            if p.grad is not None
        }

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Which tensor is each parameter's .grad, when the optimizer is about to read it or the tape ends."""
        for parameter in parameters:
            slot = self.slot_of.get(parameter._cdata)
            if slot is None or slot in self.tape.final_gradients or parameter.grad is None:
                continue
            gradient = self.slot_of.get(parameter.grad._cdata)
            if gradient is None and self.tape.compiled and self.tape.top_backwards:
                gradient = self.slot(parameter.grad)  # compiled code made it, unseen
            if gradient is not None:
                self.tape.final_gradients[slot] = (len(self.tape.operations), gradient)

    def name_parameter(self, tensor: torch.Tensor, name: str) -> None:
        """A leaf turns out to be a parameter."""
        self.parameters[tensor] = None
        slot = self.slot_of.get(tensor._cdata)
        if slot is not None and self.tape.slots[slot].made_by is None:
            self.tape.slots[slot].kind, self.tape.slots[slot].name = "parameter", name

    def renew(self, parameter: torch.Tensor, address: int) -> None:
        """Another tensor is about to take a parameter's place: on the tape it is written into the old one."""
        old, new = self.slot_of.get(parameter._cdata), self.slot_of.get(address)
        if old is None or new is None or old == new:
            return
        operation = self.append(
            torch.ops.aten.copy_.default,
            (Ref(old, False), Ref(new, False)),
            {},
            self.user_line()[0],
            writes=(old,),
        )
        operation.results = Ref(old, False)

    def finish(self) -> None:
        """What the tape must own before training goes on."""
        self.active = False
        tape = self.tape
        try:
            # through its memory: an optimizer writes a complex parameter by a view of real numbers
            written = {tape.slots[slot].storage for op in tape.operations for slot in op.writes} - {-1}
            tape.stepped = [slot.index for slot in tape.parameters if slot.storage in written]
            self.note_gradients(self.parameters)
            for memory in tape.memories:
                if not memory.kept:
                    memory.flat, memory.kept = self.keep(memory.flat, storage_key(memory.flat)), True
            tape.fingerprints = numbers_on_host(list(tape.fingerprints))
        except Exception as error:
            tape.broken = tape.broken or f"the tape could not be closed: {error!r}"
        self.pins.clear()
        if self.ahead is not None:
            self.ahead.close()

    def user_line(self) -> tuple[Line | None, bool]:
        """The user's line that is running; of a backward, only what runs inside the engine."""
        return user_line(self.engine_code if self.backward else None)


def _zeros_for(flat: torch.Tensor) -> torch.Tensor:
    """In place of what nobody has read and an operation overwrites: its values do not matter."""
    return torch.zeros(flat.shape, dtype=flat.dtype, device="cpu")
