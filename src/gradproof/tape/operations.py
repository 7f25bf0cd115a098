"""A recorded step as plain data: slots, operations, and the calls they belong to.

A slot stands for one tensor of the step. It holds no values: those come back by replaying from the leaves.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

import torch

from gradproof.tape.operators import DROPS_INSIDE
from gradproof.tape.tensors import nbytes


class Line(NamedTuple):
    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


class Ref(NamedTuple):
    """A tensor argument: which slot, and whether autograd was following it when it was read."""

    slot: int
    tracked: bool


@dataclass(slots=True)
class Slot:
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    made_by: int | None = None  # operation; None for a leaf
    storage: int = -1  # slots with the same number share memory
    kind: str = "result"  # result, parameter, buffer, gradient, state, input; outside: not made by PyTorch
    name: str = ""
    followed: bool = False  # an autograd node made it

    @property
    def is_sparse(self) -> bool:
        """It has no memory that could be viewed; made dense, a graph may not fit."""
        return self.storage < 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name or f'slot {self.index}'} {dtype}{list(self.shape)}"


@dataclass(slots=True)
class Operation:
    index: int
    func: Callable
    args: tuple
    kwargs: dict
    results: Any  # a Ref, a tuple of them, or None
    writes: tuple[int, ...]  # slots it changes in place
    phase: str  # forward, backward, optimizer
    module: str
    line: Line | None
    grad_enabled: bool
    call: int | None  # the custom function whose forward it belongs to
    node: str  # the autograd node it ran for, in backward
    made_from: int | None  # the forward operation that node belongs to
    in_backward: int | None  # the backward call it belongs to
    # what cannot be computed again: random results, those of foreign kernels; of a fused attention with dropout, the
    # state of the generator
    frozen: tuple | None = None
    kept: tuple | None = None  # results of an operator from outside PyTorch, for where it is not installed
    fingerprint: int | None = None  # place in Tape.fingerprints

    @property
    def name(self) -> str:
        packet = getattr(self.func, "overloadpacket", self.func)
        return getattr(packet, "__name__", str(packet))

    @property
    def reads(self) -> list[int]:
        return [ref.slot for ref in references((self.args, self.kwargs))]

    @property
    def makes(self) -> list[int]:
        return [ref.slot for ref in references(self.results)]


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: operations first to last-1."""

    path: str
    kind: str
    first: int
    last: int = 0
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class OperatorFunction:
    """An operator from outside PyTorch with a backward of its own, called like an autograd.Function."""

    def __init__(self, func: Callable, kwargs: dict) -> None:
        self.__name__ = str(func).removesuffix(".default")
        self.func, self.kwargs = func, kwargs

    def apply(self, *args: Any) -> Any:
        return self.func(*args, **self.kwargs)


@dataclass(slots=True)
class FunctionCall:
    """One call of a hand-written autograd.Function: its forward operations, and what its backward saw."""

    index: int
    cls: Any  # the class, or an OperatorFunction
    args: tuple  # tensors as Ref, the rest as they were
    first: int
    module: str
    line: Line | None
    sequence: int
    last: int = 0
    outputs: list[int | None] = field(default_factory=list)
    # one entry a backward: (operation at which it ended, gradients in, gradients out, operations from)
    backwards: list[tuple[int, list[int | None], list[int | None], int]] = field(default_factory=list)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    opaque: str = ""  # why its forward cannot be replayed operation by operation

    @property
    def backward_line(self) -> Line:
        return line_of_backward(self.cls) or self.line or Line("?", 0, "backward")

    @property
    def inputs(self) -> list[int]:
        return [arg.slot for arg in self.args if isinstance(arg, Ref)]


@dataclass(slots=True)
class BackwardCall:
    """One run of the autograd engine: operations first to last-1, from the roots to the leaves."""

    index: int
    roots: list[int]
    root_gradients: list[int | None]
    inputs: list[int] | None  # of torch.autograd.grad; None when it fills .grad
    create_graph: bool
    accumulates: bool
    nested: bool  # inside another backward: a checkpoint's recomputation
    first: int
    last: int = 0
    line: Line | None = None
    results: list[int | None] = field(default_factory=list)
    contributions: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # (at operation, parameter, gradient)
    received: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # (at operation, slot, gradient that reached it)
    stored: dict[int, int] = field(default_factory=dict)  # parameter -> its .grad afterwards


@dataclass(slots=True)
class Memory:
    """What a leaf's memory held before the step: one flat tensor, and the slots that look into it."""

    flat: torch.Tensor
    kept: bool = False  # True once it is a copy of its own
    views: dict[int, tuple] = field(default_factory=dict)  # slot -> (size, stride, offset)


@dataclass(slots=True)
class OneArray:
    """Tensors that were put together and are, each for itself, made of one array outside PyTorch."""

    count: int
    of: int
    changed: int  # of them, those that held something else when an operation of the step first read them
    member: weakref.ref[torch.Tensor] | None  # None in a specimen
    content: int


@dataclass
class Tape:
    """One step: leaves, operations in order, and who called them."""

    slots: list[Slot] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    loose: dict[int, torch.Tensor] = field(default_factory=dict)  # leaves without strided memory
    modules: list[ModuleCall] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    backwards: list[BackwardCall] = field(default_factory=list)
    cleared_at: list[int] = field(default_factory=list)  # operations before which zero_grad was called
    stepped_at: list[int] = field(default_factory=list)  # operations before which an optimizer's step began
    stepped: list[int] = field(default_factory=list)  # parameters that an operation of the step changed
    # parameter -> (operation, .grad): as the optimizer saw it, or at the end
    final_gradients: dict[int, tuple[int, int]] = field(default_factory=dict)
    fingerprints: torch.Tensor | list = field(default_factory=list)
    never_written: dict[int, str] = field(default_factory=dict)  # operation -> what it read
    one_arrays: dict[int, OneArray] = field(default_factory=dict)  # operation -> what it puts together
    compiled: bool = False  # modules ran as compiled code; the tape holds their eager twins
    drawn_apart: bool = False  # and those drew random numbers that the compiled code did not
    scaled: set[int] = field(default_factory=set)  # operations in which a GradScaler scaled a loss
    older: set[int] = field(
        default_factory=set
    )  # backward calls that walk through nodes made before the tape
    broken: str = ""  # why recording stopped early
    in_place: bool = field(
        default=False, compare=False
    )  # whether its tensors are on the devices of their slots

    @cached_property
    def last_write(self) -> dict[int, int]:
        """Memory -> the last operation that changes it."""
        return {self.slots[slot].storage: op.index for op in self.operations for slot in op.writes}

    @cached_property
    def memory_of(self) -> dict[int, Memory]:
        return {slot: memory for memory in self.memories for slot in memory.views}

    @cached_property
    def leaf_named(self) -> dict[str, int]:
        return {slot.name: slot.index for slot in self.leaves() if slot.name}

    def leaves(self, kind: str | None = None) -> list[Slot]:
        return [slot for slot in self.slots if slot.made_by is None and (kind is None or slot.kind == kind)]

    @property
    def parameters(self) -> list[Slot]:
        return self.leaves("parameter")

    @property
    def inputs(self) -> list[Slot]:
        """Leaves that are neither parameters, buffers nor gradients: the batch, its targets, masks."""
        return self.leaves("input")

    @property
    def top_backwards(self) -> list[BackwardCall]:
        return [call for call in self.backwards if not call.nested]

    @property
    def loss_slots(self) -> list[int]:
        return [slot for call in self.top_backwards if call.accumulates for slot in call.roots]

    def put_in_place(self) -> None:
        """What recording has put aside in the host's memory goes to the devices that its slots name: for a replay."""
        if self.in_place:
            return
        self.in_place = True
        for memory in self.memories:
            slot = next(iter(memory.views), None)
            if slot is not None:
                memory.flat = memory.flat.to(self.slots[slot].device)
        for slot, tensor in self.loose.items():
            self.loose[slot] = tensor.to(self.slots[slot].device)
        for operation in self.operations:
            made = [*operation.makes, *operation.writes]
            device = self.slots[made[0]].device if made else torch.device("cpu")
            if operation.frozen and operation.name not in DROPS_INSIDE:  # those keep a generator's state
                operation.frozen = tuple(
                    f.to(device) if isinstance(f, torch.Tensor) else f for f in operation.frozen
                )
            if operation.kept:
                operation.kept = tuple(k.to(device) for k in operation.kept)

    def leaf_value(self, slot: int) -> torch.Tensor:
        """What a leaf held before the step."""
        self.put_in_place()
        if slot in self.loose:
            return self.loose[slot]
        memory = self.memory_of[slot]
        return memory.flat.as_strided(*memory.views[slot])

    def bytes(self) -> int:
        """Bytes the tape holds: leaves, random results."""
        tensors = [memory.flat for memory in self.memories] + list(self.loose.values())
        for operation in self.operations:
            kept = (*(operation.frozen or ()), *(operation.kept or ()))
            tensors += [value for value in kept if isinstance(value, torch.Tensor)]
        return sum(map(nbytes, tensors))

    def place(self, operation: Operation) -> str:
        """Module path and source line of an operation, or of the forward it belongs to."""
        origin = operation
        if operation.phase == "backward" and operation.made_from is not None:
            origin = self.operations[operation.made_from]
        module = f"in {origin.module}, " if origin.module else ""
        line = operation.line if operation.phase == "backward" and operation.line else origin.line
        return f"{module}{line}" if line else f"{module}no source line"


def references(tree: Any) -> Iterator[Ref]:
    """All slots named in a tree of arguments."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from references(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from references(part)


def replace_references(tree: Any, value: Callable[[Ref], Any]) -> Any:
    """The same tree with every slot replaced by its value."""
    if isinstance(tree, Ref):
        return value(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([replace_references(part, value) for part in tree])
    if isinstance(tree, dict):
        return {key: replace_references(part, value) for key, part in tree.items()}
    return tree


def line_of_backward(cls: Any) -> Line | None:
    """Where the backward of a hand-written Function is written; one of another process knows it already."""
    code = getattr(getattr(cls, "backward", None), "__code__", None)
    if code is None:
        return getattr(cls, "backward_line", None)
    return Line(code.co_filename, line_of_def(code), "backward")


def line_of_def(code: CodeType) -> int:
    """The line with a function's name; Python counts from its first decorator."""
    first = code.co_firstlineno
    named = (
        n for n in range(first, first + 8) if linecache.getline(code.co_filename, n).lstrip()[:4] == "def "
    )
    return next(named, first)
