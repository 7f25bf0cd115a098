"""Models and optimizers as records, and skeletons built from them elsewhere: everything but the code that runs.

A skeleton of torch's own module is of torch's own class, one of the script's class has its name: `isinstance`,
`named_parameters`, `training` and the settings tell what they told in the training. Weights are as they were before
the step.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_BUFFER = 1 << 20  # bytes: what no operation of the step reads is kept up to this size
PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass
class TensorRecord:
    """A parameter, buffer or state: its slot on the tape, or, where the step never touches it, what it is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    slot: int | None
    value: Tensor | None = None


@dataclass
class ModuleRecord:
    path: str
    kind: str
    base: str  # the nearest class of torch.nn
    file: str  # where its class is written, and the line where that begins
    line: int
    training: bool
    settings: dict[str, Any]
    parameters: dict[str, int | None]  # name -> number of a TensorRecord
    buffers: dict[str, int | None]
    children: dict[str, int]  # name -> number of a ModuleRecord
    transient: list[str] = field(default_factory=list)  # buffers that no state_dict holds


@dataclass
class OptimizerRecord:
    kind: str
    line: str  # where it was made
    clears: bool  # whether its zero_grad was ever called
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]  # "params" holds numbers of TensorRecords
    state: dict[int, dict[str, Any]]  # number -> {"exp_avg": {"tensor": number of a TensorRecord}, …}
    foreign: bool = False  # of a class that derives from none of PyTorch's optimizers, whatever its name


class Recording:
    """Takes the records of a live training; one tensor, one number, whoever holds it."""

    def __init__(self, slot_of: Callable[[Tensor], int | None]) -> None:
        self.tensors: list[TensorRecord] = []
        self.modules: list[ModuleRecord] = []
        self._slot_of = slot_of
        self._numbers: dict[int, int] = {}
        self._module_numbers: dict[int, int] = {}
        self._alive: list[Any] = []

    def tensor(self, value: Tensor | None, keep: bool = False) -> int | None:
        if value is None:
            return None
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.tensors)
            self._alive.append(value)
            slot = self._slot_of(value)
            small = value.numel() * value.element_size() <= LARGEST_BUFFER and value.layout == torch.strided
            kept = value.detach().cpu().clone() if slot is None and keep and small else None
            self.tensors.append(
                TensorRecord(tuple(value.shape), value.dtype, value.requires_grad, slot, kept)
            )
        return number

    def module(self, module: nn.Module, path: str = "") -> int:
        known = self._module_numbers.get(id(module))
        if known is not None:
            return known
        number = self._module_numbers[id(module)] = len(self.modules)
        self._alive.append(module)
        file, line = place_of_class(type(module))
        inside = module.__dict__
        record = ModuleRecord(
            path, type(module).__name__, nearest_base(type(module)), file, line, bool(module.training),
            {k: v for k, v in inside.items() if not k.startswith("_") and k != "training" and is_plain(v)},
            {name: self.tensor(p) for name, p in inside.get("_parameters", {}).items()},
            {name: self.tensor(b, keep=True) for name, b in inside.get("_buffers", {}).items()},
            {}, sorted(inside.get("_non_persistent_buffers_set", ())),
        )  # fmt: skip
        self.modules.append(record)
        for name, child in inside.get("_modules", {}).items():
            if child is not None:
                record.children[name] = self.module(child, f"{path}.{name}" if path else name)
        return number

    def optimizer(
        self, optimizer: torch.optim.Optimizer, line: str, clears: bool, stepped: Collection[int] = ()
    ) -> OptimizerRecord:
        """After its step: tensors are kept as they were before it, and a count that is a number is taken back."""
        groups = []
        for group in optimizer.param_groups:
            settings = {k: _number(v) for k, v in group.items() if k != "params"}
            groups.append({**settings, "params": [self.tensor(p) for p in group["params"]]})
        state: dict[int, dict[str, Any]] = {}
        for parameter, entries in optimizer.state.items():
            if isinstance(parameter, Tensor) and isinstance(entries, dict):
                number = self.tensor(parameter)
                assert number is not None
                state[number] = {
                    key: {"tensor": self.tensor(value)}
                    if isinstance(value, Tensor) and (value.dim() or self._slot_of(value) is not None)
                    else value - 1
                    if key == "step" and type(value) is int and self._slot_of(parameter) in stepped
                    else _number(value)
                    for key, value in entries.items()
                    if isinstance(key, str)
                }
        defaults = {key: _number(value) for key, value in getattr(optimizer, "defaults", {}).items()}
        kind = type(optimizer)
        foreign = not derives_from_pytorchs(kind)
        return OptimizerRecord(kind.__name__, line, clears, defaults, groups, state, foreign)


def derives_from_pytorchs(kind: type) -> bool:
    """Whether a class of optimizers is one of PyTorch's, or made from one: it keeps the same state.

    >>> mine = type("Mine", (torch.optim.AdamW,), {}), type("AdamW", (torch.optim.Optimizer,), {})
    >>> [derives_from_pytorchs(kind) for kind in mine]
    [True, False]
    """
    bases = [base for base in kind.__mro__ if base is not torch.optim.Optimizer]
    return any(base.__module__.startswith("torch.optim") for base in bases)


class Skeletons:
    """Modules and optimizers made anew from records; `value` gives what a slot held before the step."""

    def __init__(
        self, tensors: list[TensorRecord], modules: list[ModuleRecord], value: Callable[[int], Tensor | None]
    ) -> None:
        self._records, self._value = tensors, value
        self._modules = modules
        self._made: dict[int, nn.Parameter | Tensor] = {}
        self._made_modules: dict[int, nn.Module] = {}

    def parameter(self, number: int | None) -> nn.Parameter | None:
        if number is None:
            return None
        if number not in self._made:
            record = self._records[number]
            wants = record.requires_grad and (record.dtype.is_floating_point or record.dtype.is_complex)
            self._made[number] = nn.Parameter(self._content(record), requires_grad=wants)
        return self._made[number]  # type: ignore[return-value]

    def buffer(self, number: int | None) -> Tensor | None:
        if number is None:
            return None
        if number not in self._made:
            self._made[number] = self._content(self._records[number])
        return self._made[number]

    def by_slot(self) -> dict[int, Tensor]:
        slots = {number: self._records[number].slot for number in self._made}
        return {slot: self._made[number] for number, slot in slots.items() if slot is not None}

    def _content(self, record: TensorRecord) -> Tensor:
        value = self._value(record.slot) if record.slot is not None else record.value
        if value is not None and tuple(value.shape) == record.shape:
            return value.detach()
        return torch.empty(record.shape, dtype=record.dtype, device="meta")

    def module(self, number: int) -> nn.Module:
        if number in self._made_modules:
            return self._made_modules[number]
        record = self._modules[number]
        cls = class_of(record)
        made = self._made_modules[number] = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update(record.settings, gradproof_skeleton=True)
        made.training = record.training
        for name, parameter in record.parameters.items():
            made._parameters[name] = self.parameter(parameter)
        for name, buffer in record.buffers.items():
            made._buffers[name] = self.buffer(buffer)
        made._non_persistent_buffers_set.update(record.transient)
        for name, child in record.children.items():
            made._modules[name] = self.module(child)
        return made

    def optimizer(self, record: OptimizerRecord) -> torch.optim.Optimizer:
        cls: Any = getattr(torch.optim, record.kind, None)
        if record.foreign or not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
            cls = type(record.kind, (torch.optim.Optimizer,), {})
        made = cls.__new__(cls)
        made.defaults = dict(record.defaults)
        made.param_groups = [
            {**group, "params": [self.parameter(number) for number in group["params"]]}
            for group in record.groups
        ]
        made.state = defaultdict(dict)
        for number, entries in record.state.items():
            state = {key: self._state(value) for key, value in entries.items()}
            made.state[self.parameter(number)] = {k: v for k, v in state.items() if v is not None}
        made.line, made.clears = record.line, record.clears
        return made

    def _state(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        record = self._records[value["tensor"]]
        return self._value(record.slot) if record.slot is not None else None


def class_of(record: ModuleRecord) -> type[nn.Module]:
    base = find_class(record.base) or nn.Module
    if record.kind == base.__name__ and not record.file:
        return base
    return type(record.kind, (base,), {"gradproof_source": (record.file, record.line)})


def find_class(name: str) -> type[nn.Module] | None:
    """A class of torch.nn by its full name."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("torch.nn."):
        return None
    found = getattr(sys.modules.get(module), kind, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def nearest_base(cls: type) -> str:
    for base in cls.__mro__:
        if base.__module__.startswith("torch.nn.modules."):
            return f"{base.__module__}.{base.__name__}"
    return ""


def is_torch(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "torch"


_PLACES: dict[type, tuple[str, int]] = {}


def place_of_class(cls: type) -> tuple[str, int]:
    """(file, line) where a class of the script or a library begins; nothing for PyTorch's own."""
    if is_torch(cls):
        return "", 0
    if cls not in _PLACES:
        try:
            file = inspect.getsourcefile(cls) or ""
            line = getattr(cls, "__firstlineno__", None) or inspect.findsource(cls)[1] + 1
            _PLACES[cls] = (file, line)
        except (OSError, TypeError, IndexError, SyntaxError):
            _PLACES[cls] = ("", 0)
    return _PLACES[cls]


def source_of_class(cls: type) -> tuple[str, int, list[str]]:
    """(file, first line, lines) of a class, or of the one that a skeleton's class stands for."""
    file, first = getattr(cls, "gradproof_source", None) or place_of_class(cls)
    lines = linecache.getlines(file)[first - 1 :] if file else []
    try:
        return file, first, inspect.getblock(lines) if lines else []
    except (SyntaxError, IndexError):
        return file, first, lines


def line_that_sets(cls: type, name: str) -> str:
    """The line of a class that gives `self.name` its value."""
    file, first, lines = source_of_class(cls)
    sets = re.compile(rf"self\.{name}\b[^=]*=")
    number = next((i for i, text in enumerate(lines, first) if sets.search(text)), None)
    return f"{os.path.basename(file)}:{number}" if number is not None else ""


def is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) <= 64 and all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, PLAIN)


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    return value if is_plain(value) else str(type(value).__name__)


def files_of(modules: Iterable[ModuleRecord]) -> set[str]:
    return {record.file for record in modules if record.file}
