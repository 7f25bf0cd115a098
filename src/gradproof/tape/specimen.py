"""A taped step as a file: everything that can be asked of the step, without the script, its objects or its process.

    save(specimen, "runs/a/specimens")          # runs/a/specimens/step-00000010/{tape.json, tensors.safetensors}
    specimen = load("runs/a/specimens/step-00000010", device="cuda")

No pickle: JSON and safetensors, memory-mapped when read. What cannot be imported elsewhere (a hand-written Function, an
operator from outside PyTorch) is there by name, with its recorded results.
"""

from __future__ import annotations

import gc
import json
import linecache
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.errors import UserError
from gradproof.tape.codec import DTYPES, Decoder, Encoder, Foreign
from gradproof.tape.label import (
    LABEL_FILE,
    TAPE_FILE,
    TENSORS_FILE,
    VERSION,
    Damaged,
    read_header,
    read_tape,
    signature,
)
from gradproof.tape.operations import Tape, references
from gradproof.tape.replica import ModuleRecord, OptimizerRecord, Skeletons, TensorRecord
from gradproof.tape.tensors import alias
from gradproof.tape.tensors import load as load_memory

MOST_ENTRIES = 1 << 40  # of a tensor; what claims more was never in a training


@dataclass(frozen=True)
class Facts:
    """What the probes have seen beside the step, as plain data; nothing of it is live."""

    lines: dict[str, list[str]] = field(default_factory=dict)  # what is done -> where
    eval_line: str = ""
    loads: list[dict[str, Any]] = field(default_factory=list)
    optimizer_states: dict[str, Any] = field(default_factory=dict)
    initialised: dict[str, str] = field(
        default_factory=dict
    )  # parameter -> the line that gave its first values
    frozen_by_default: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluated: dict[str, list[Tensor]] = field(default_factory=dict)  # line -> samples given in eval mode
    fetched: list[dict[str, Any]] = field(default_factory=list)  # what each loader handed out last
    opened: dict[str, int] = field(default_factory=dict)  # the last files that were read -> the step before
    came_back: list[Any] = field(default_factory=list)  # (then, now) of samples that were read twice
    samplers: list[dict[str, Any]] = field(default_factory=list)
    orders: list[dict[str, Any]] = field(default_factory=list)
    ordered_targets: list[dict[str, Any]] = field(
        default_factory=list
    )  # values as long as an order, and their line
    tables: list[dict[str, Any]] = field(default_factory=list)
    stepped_tables: list[dict[str, Any]] = field(default_factory=list)
    holders: list[dict[str, Any]] = field(
        default_factory=list
    )  # lists and dicts of modules that no model lists
    strangers: list[dict[str, Any]] = field(default_factory=list)  # models with gradients that nobody knows
    waiting: list[str] = field(default_factory=list)  # parameters of optimizers that have yet to step
    converted: list[dict[str, Any]] = field(default_factory=list)  # plain tensors made of an nn.Parameter
    arrays_changed: bool = False  # an array that an earlier step put together holds something else now
    own_updates: dict[str, Any] = field(
        default_factory=dict
    )  # by hand: the way of some entries, update by update
    sharded: str = (
        ""  # a rank's step of a sharded model, with parameters "gathered" or in "parts"; see shards.py
    )


@dataclass
class Specimen:
    """One step, complete. `models` and `optimizers` are skeletons, with weights as they were before the step."""

    step: int
    tape: Tape
    tensors: list[TensorRecord] = field(default_factory=list)
    modules: list[ModuleRecord] = field(default_factory=list)
    roots: dict[str, int] = field(default_factory=dict)  # variable name -> module; "" for the only one
    optimizer_records: list[OptimizerRecord] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of all steps so far
    facts: Facts = field(default_factory=Facts)
    sources: dict[str, str] = field(default_factory=dict)  # file -> text, of the script's own files
    landmark: bool = True  # worth every question; else only those that look at each step
    before_update: bool = False  # the tape ends where the optimizer begins
    again: dict[str, str] | None = None  # of calls made again: what was not finite, eager and compiled
    environment: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def skeletons(self) -> Skeletons:
        return Skeletons(self.tensors, self.modules, self._value)

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        return {name: self.skeletons.module(number) for name, number in self.roots.items()}

    @cached_property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.skeletons.optimizer(record) for record in self.optimizer_records]

    def _value(self, slot: int) -> Tensor | None:
        known = self.tape.slots[slot].made_by is None and (
            slot in self.tape.loose or slot in self.tape.memory_of
        )
        return self.tape.leaf_value(slot) if known else None

    def label(self) -> dict[str, Any]:
        devices = {slot.device.type for slot in self.tape.slots if slot.made_by is None} - {"cpu"}
        return {
            "step": self.step,
            "landmark": self.landmark,
            "operations": len(self.tape.operations),
            "bytes": self.tape.bytes(),
            "device": next(iter(devices), "cpu"),
        }


PARTS = tuple(part.name for part in fields(Specimen) if part.name != "facts")


def save(specimen: Specimen, directory: str | os.PathLike) -> Path:
    """Write a specimen below a directory, whole or not at all; its path."""
    encoder = Encoder()
    facts = {part.name: encoder.encode(getattr(specimen.facts, part.name)) for part in fields(Facts)}
    parts = [f'"{name}": {encoder.text(getattr(specimen, name))}' for name in PARTS]
    text = f'{{{", ".join(parts)}, "facts": {json.dumps(facts, allow_nan=False)}}}'.encode()
    target = Path(directory) / f"step-{specimen.step:08d}"
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.mkdir(parents=True, exist_ok=True)
    try:
        write_tensors(draft / TENSORS_FILE, encoder.tensors)
        (draft / TAPE_FILE).write_bytes(text)
        seal(draft, specimen.label())
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def seal(path: Path, label: dict[str, Any]) -> None:
    """Write the label of what lies in a directory: it tells whether the files are whole and belong together."""
    stored = os.stat(path / TENSORS_FILE).st_size
    signed = signature((path / TAPE_FILE).read_bytes(), read_header(path / TENSORS_FILE))
    label = {"gradproof": VERSION, **label, "stored": stored, "signature": signed}
    (path / LABEL_FILE).write_text(json.dumps(label), encoding="utf-8")


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """The safetensors format, written tensor by tensor: no copy of the whole, and other threads go on meanwhile."""
    header: dict[str, Any] = {}
    place = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        shape, dtype = list(tensor.shape), DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                stream.write(flat.view(torch.uint8).numpy().data)


def load(path: str | os.PathLike, device: str | torch.device | None = None) -> Specimen:
    """Read a specimen; `device` takes the place of the accelerator that it was recorded on (default: as recorded)."""
    path = Path(path)
    place = usable_device(device)
    try:
        with without_collector():
            return _load(path, place)
    except Damaged as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except torch.OutOfMemoryError as error:
        raise UserError(f"{path} does not fit into the memory of {place}: {_first(error)}") from None
    except Exception as error:
        raise UserError(f"{path} cannot be read: {type(error).__name__}, {_first(error)}") from None


@contextmanager
def without_collector() -> Iterator[None]:
    """100,000 new objects that stay, in no cycle: searching them for some takes longer than reading them."""
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()


def usable_device(device: str | torch.device | None) -> torch.device | None:
    if device is not None:
        return torch.device(device)
    return None if torch.cuda.is_available() else torch.device("cpu")


def _load(path: Path, device: torch.device | None) -> Specimen:
    from safetensors import safe_open

    data = json.loads(read_tape(path))
    missing = sorted({*PARTS, "facts"} - set(data)) if isinstance(data, dict) else PARTS
    if missing:
        raise Damaged(f"its {TAPE_FILE} has no {missing[0]!r}")
    with safe_open(path / TENSORS_FILE, framework="pt") as stored:
        names = set(stored.keys())

        def tensor(name: str) -> Tensor:
            if name not in names:
                raise Damaged(f"tensor {name} is missing")
            return stored.get_tensor(name)

        decoder = Decoder(tensor, device)
        known = [part.name for part in fields(Facts) if part.name in data["facts"]]
        facts = Facts(**{name: decoder.decode(data["facts"][name]) for name in known})
        specimen = Specimen(**{name: decoder.decode(data[name]) for name in PARTS}, facts=facts)
    check(specimen)
    for file, text in specimen.sources.items():
        remember_source(file, text)
    return specimen


def check(specimen: Specimen) -> None:
    """Every number that points somewhere points into the tape: a damaged file is refused, not followed."""
    tape = specimen.tape
    slots, operations = len(tape.slots), len(tape.operations)

    def known(what: str, limit: int, *numbers: int | None) -> None:
        for number in numbers:
            if number is not None and (not isinstance(number, int) or not 0 <= number < limit):
                raise Damaged(f"{what} {str(number)[:20]} does not exist")

    for place, slot in enumerate(tape.slots):
        if slot.index != place:
            raise Damaged(f"slot {place} calls itself {str(slot.index)[:20]}")
        known("operation", operations, slot.made_by)
        check_shape(slot.shape)
    for place, op in enumerate(tape.operations):
        if op.index != place:
            raise Damaged(f"operation {place} calls itself {str(op.index)[:20]}")
        if not isinstance(op.func, (torch._ops.OpOverload, Foreign)) and op.func not in (alias, load_memory):
            raise Damaged(f"operation {place} is no operation")
        known("slot", slots, *(r.slot for r in references((op.args, op.kwargs, op.results))), *op.writes)
        known("operation", operations, op.made_from)
        known("function", len(tape.functions), op.call)
        known("backward call", len(tape.backwards), op.in_backward)
        known("fingerprint", len(tape.fingerprints), op.fingerprint)
    for memory in tape.memories:
        known("slot", slots, *memory.views)
        for size, stride, offset in memory.views.values():
            check_shape(size)
            reach = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
            if min((*stride, offset), default=0) < 0 or (0 not in size and reach > memory.flat.numel()):
                raise Damaged("a view reaches beyond its memory")
    known("slot", slots, *tape.loose, *tape.stepped, *tape.final_gradients)
    ends = [*tape.cleared_at, *tape.stepped_at]
    calls: list[Any] = [*tape.modules, *tape.functions, *tape.backwards]
    for call in calls:
        ends += [call.first, call.last]
    for at, gradient in tape.final_gradients.values():
        ends.append(at)
        known("slot", slots, gradient)
    known("operation", operations + 1, *ends)
    for module in tape.modules:
        known("slot", slots, *module.inputs, *module.outputs)
    for function in tape.functions:
        known("slot", slots, *function.inputs, *function.outputs)
    for backward in tape.backwards:
        known("slot", slots, *backward.roots, *backward.root_gradients, *(backward.inputs or ()))
    check_records(specimen, known)


def check_records(specimen: Specimen, known: Callable[..., None]) -> None:
    tensors, modules = len(specimen.tensors), len(specimen.modules)
    for tensor in specimen.tensors:
        known("slot", len(specimen.tape.slots), tensor.slot)
        check_shape(tensor.shape)
    known("module", modules, *specimen.roots.values())
    for module in specimen.modules:
        known("tensor", tensors, *module.parameters.values(), *module.buffers.values())
        known("module", modules, *module.children.values())
    for optimizer in specimen.optimizer_records:
        known(
            "tensor", tensors, *optimizer.state, *(n for group in optimizer.groups for n in group["params"])
        )


def check_shape(shape: tuple[int, ...]) -> None:
    if any(not isinstance(size, int) or size < 0 for size in shape) or math.prod(shape) > MOST_ENTRIES:
        raise Damaged(f"a tensor claims to be {str(tuple(shape))[:60]}")


def remember_source(file: str, text: str) -> None:
    """The lines that places and experiments read are those that ran, wherever this is."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200] or type(error).__name__
