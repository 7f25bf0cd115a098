"""Fingerprints of a rank's steps: Σx² and exact sums of what all ranks should have alike, in files of its own.

Nothing here speaks to another rank. At landmarks, which every rank knows by the number of the step, all tensors are
looked at; in between, what the pace affords.
"""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.guard import quietly
from gradproof.probes.schedule import LIGHT
from gradproof.record.last_steps import LastSteps
from gradproof.record.prints import (
    IN_TURN,
    PRINTS_FILE,
    SUM_BITS,
    TENSOR_PRINTS_FILE,
    is_landmark,
    pack_row,
    pack_tensors,
)
from gradproof.tape.modes import unseen_by_modes
from gradproof.tape.shards import is_sharded, parts_of

if TYPE_CHECKING:
    from gradproof.probes.session import Session
    from gradproof.probes.step import OpenStep

MOST_IN_TURN = 1 << 22  # entries whose exact sum is taken in one step
MASK = (1 << SUM_BITS) - 1
LARGEST_BATCH = 1 << 20  # entries of an argument that are added up
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AVERAGING_STEPS = (1, 2, 4, 8)  # at which gradients are held against those that were averaged
AVERAGED, ENTRIES = 4, 16  # parameters, and entries of each
FEW_ROWS = 4  # of a batch, for BatchNorm


class Prints:
    """Takes a step's fingerprints while it is open, and writes them when its numbers have arrived."""

    def __init__(self, session: Session, world: int) -> None:
        self._session = session
        self._world = world
        self._writer = session.writer
        self._last = LastSteps(session.writer, session.ring_failed)
        self._numbers: dict[tuple[str, str], int] = {}
        self._listed: list[list[Any]] = []
        self._began = time.time()
        self._own: float | None = None
        self._listening = ExitStack()
        self._listens = False
        self._local: dict[str, Tensor] = {}  # parts of gradients before anybody averaged them
        self._sampled: list[tuple[str, Tensor]] = []
        self._is_mean = True

    def step_opens(self, number: int) -> None:
        self._began, self._own = time.time(), None
        if self._listens:  # at a step that had no update
            self.close()
        if is_landmark(number):
            self._listen(number)

    def _listen(self, number: int) -> None:
        self._listens = True
        self._local, self._sampled, self._is_mean = {}, [], True
        if not self._session.compiled:
            self._hear_of_the_batch()
        if number in AVERAGING_STEPS:
            self._writer.write_event("random", step=number, **states_of_generators())
            if not self._session.compiled:
                self._hear_of_gradients()

    def close(self) -> None:
        self._listening.close()
        self._listens = False

    def backward_begins(self, roots: list[Any]) -> None:
        if self._own is None:
            self._own = time.time() - self._began
        if self._sampled:
            self._is_mean = self._is_mean and len(roots) == 1 and is_mean(roots[0])

    def before_update(self, step: OpenStep, number: int, optimizer: Any) -> None:
        """The gradients are those of all ranks, the weights still the old ones."""
        landmark = is_landmark(number)
        if step.depth < LIGHT and not landmark:
            return
        self.close()
        parameters = [p for p in optim.parameters_of(optimizer) if measuring.is_measurable(p)]
        if number == 0:
            self._note_sharding(parameters)
        names = {id(p): self._session.parameters.name(p) for p in optim.parameters_of(optimizer)}
        found = [("weight", names[id(p)], p) for p in parameters]
        if step.depth != LIGHT:  # else they are measured anyway
            found += [
                ("gradient", names[id(p)], g.coalesce() if g.is_sparse else g)
                for p, g in optim.gradients_of(optimizer)
            ]
        if landmark:
            found += [("state", names[id(p)], moment) for p, moment in optim.first_moments(optimizer)]
            found += [("buffer", name, buffer) for name, buffer in self._buffers()]
            self._hold_against_average(step)
        self._measure(step, found)
        self._add_up(step, number, [measuring.local(p) for p in parameters])

    def _note_sharding(self, parameters: list[Tensor]) -> None:
        """Whether each rank holds a part of every parameter, and gets data of its own all the same."""
        sharded = [p for p in parameters if is_sharded([p])]
        by_module = any(
            cls.__name__ == "FSDPModule"
            for root in self._session.names.roots.values()
            for cls in type(root).__mro__
        )
        every = bool(sharded) and all(feeds_every_rank(p, self._world) for p in sharded)
        self._session.facts["fully_sharded"] = by_module and every
        models = [p for root in self._session.names.roots.values() for p in root.parameters()]
        held = set(map(id, parameters))
        late = is_sharded(models) and not is_sharded(parameters) and held.isdisjoint(map(id, models))
        self._session.facts["sharded_late"] = late

    def _measure(self, step: OpenStep, found: list[tuple[str, str, Tensor]]) -> None:
        """All of them in one call, or in one for each device and precision."""
        groups: dict[tuple[torch.device, torch.dtype], dict[tuple[str, str], Tensor]] = {}
        for kind, name, tensor in found:
            if measuring.is_measurable(tensor):
                if (kind, name) not in self._numbers:
                    self._number(kind, name, parts_of(tensor))
                part = measuring.local(tensor)
                groups.setdefault((part.device, part.dtype), {})[kind, name] = part
        for group in groups.values():
            step.reading.add(f"print {len(step.prints)}", measuring.square_sums(list(group.values())))
            step.prints.append(list(group))

    def _number(self, kind: str, name: str, parts: int) -> None:
        self._numbers[kind, name] = len(self._listed)
        self._listed.append([kind, name, parts])
        self._writer.set_info(prints=self._listed)

    def _add_up(self, step: OpenStep, number: int, weights: list[Tensor]) -> None:
        """The exact sum of the bits of some weights: each in its turn, those of a small model all."""
        start, entries = number * IN_TURN % max(len(weights), 1), 0
        sums: list[Tensor] = []
        for weight in (weights[start:] + weights[:start])[:IN_TURN]:
            entries += weight.numel()
            if sums and entries > MOST_IN_TURN:
                break
            sums.append(bits_of(weight))
        if sums and len({s.device for s in sums}) == 1:
            step.reading.add("print sums", torch.stack(sums) & MASK)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Of models that do not have them sent from rank 0 at every call, as DDP does."""
        for root in self._session.names.roots.values():
            if not getattr(root, "broadcast_buffers", False):
                yield from root.named_buffers()

    # the batch ---------------------------------------------------------------------------------------------

    def _hear_of_the_batch(self) -> None:
        def called(module: nn.Module, args: tuple) -> None:
            with quietly(), unseen_by_modes():
                if torch.compiler.is_compiling() or not self._session.alive or not torch.is_grad_enabled():
                    return
                if self._session.names.is_outermost(module):
                    began = time.perf_counter()
                    handle.remove()
                    self._look_at_batch(module, args)
                    self._session.own_seconds += time.perf_counter() - began

        handle = nn.modules.module.register_module_forward_pre_hook(called)
        self._listening.callback(handle.remove)

    def _look_at_batch(self, module: nn.Module, args: tuple) -> None:
        given = [a for a in args if type(a) is Tensor and a.numel() and a.device.type != "meta"]
        if not given:
            return
        step = self._session.current
        step.batch["entries"] = given[0].numel()
        sums = [bits_of(a.detach().reshape(-1)[:LARGEST_BATCH]) for a in given]
        if len({s.device for s in sums}) == 1:
            step.reading.add("print batch", torch.stack(sums) & MASK)
        inner = list(module.modules())
        step.batch["training"] = sum(m.training for m in inner) / len(inner)
        norms = [m for m in inner if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        norms = [m for m in norms if not isinstance(m, nn.SyncBatchNorm)]
        rows = given[0].shape[0] if given[0].dim() else 0
        if norms and 0 < rows <= FEW_ROWS:
            self._session.facts["small_batch_norm"] = {
                "rows": rows,
                "modules": len(norms),
                "name": self._session.names.of_module(norms[0]) or type(norms[0]).__name__,
            }

    # the average -------------------------------------------------------------------------------------------

    def _hear_of_gradients(self) -> None:
        """Of a few parameters: the gradient as this rank alone has computed it."""
        those = [(n, p) for n, p in self._session.names.trainable() if p.is_leaf and not is_sharded([p])]
        those = [(n, p) for n, p in those if measuring.is_measurable(p) and p.numel()]
        picked = (
            [those[i * (len(those) - 1) // max(AVERAGED - 1, 1)] for i in range(AVERAGED)] if those else []
        )
        for name, parameter in dict(picked).items():
            handle = parameter.register_hook(self._gradient_came(name))
            self._listening.callback(handle.remove)
            self._sampled.append((name, parameter))

    def _gradient_came(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            with quietly(), unseen_by_modes(), torch.no_grad():
                some = few_entries(gradient)
                self._local[name] = self._local[name] + some if name in self._local else some

        return hook

    def _hold_against_average(self, step: OpenStep) -> None:
        kept = [(n, p.grad) for n, p in self._sampled if n in self._local and p.grad is not None]
        if not kept or not self._is_mean or step.is_scaled:
            return
        local = [self._local[n] for n, _ in kept]
        final = [few_entries(gradient) for _, gradient in kept]
        if len({t.device for t in (*local, *final)}) == 1:
            step.reading.add("print local", torch.cat(local))
            step.reading.add("print final", torch.cat(final))

    # what has arrived --------------------------------------------------------------------------------------

    def step_closes(self, step: OpenStep) -> None:
        now = time.time()
        own = now - self._began if self._own is None else self._own
        step.times = {"began": self._began, "seconds": now - self._began, "own": own}

    def write(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        """The numbers of a step are on the host."""
        row: dict[str, Any] = {"step": number, **step.times, **step.batch}
        row |= {key: step.row[key] for key in ("loss", "lr") if key in step.row}
        if "norm_before_clip" in step.row:
            row["clip"] = step.row["norm_before_clip"] ** 2
        if math.isnan(row.get("loss", 0.0)):
            row["loss"] = math.inf
        squares: dict[tuple[str, str], float] = {}
        if found:
            squares = self._squares(step, found)
            row |= self._sums(squares)
            for key, field in (("print sums", "checksum"), ("print batch", "batch")):
                if key in found:
                    row[field] = in_order(found[key].tolist())
        self._writer.append(PRINTS_FILE, pack_row(**row))
        if squares:
            numbers = [self._numbers[key] for key in squares]
            record = pack_tensors(number, numbers, np.array([*squares.values()]))
            self._last.keep(record)
            if is_landmark(number):
                self._writer.save_info()
                self._writer.append(TENSOR_PRINTS_FILE, record)
        if "print local" in found:
            clip = (
                min(1.0, step.row["clip_limit"] / (step.row["norm_before_clip"] + 1e-6))
                if clipped(step)
                else 1.0
            )
            self._writer.write_event(
                "averaging",
                step=number,
                local=found["print local"].tolist(),
                final=found["print final"].tolist(),
                clip=clip,
            )

    def _squares(self, step: OpenStep, found: dict[str, np.ndarray]) -> dict[tuple[str, str], float]:
        """Σx² by kind and name; of a light step, the gradients are those that were measured anyway."""
        squares: dict[tuple[str, str], float] = {}
        for index, keys in enumerate(step.prints):
            squares |= zip(keys, found[f"print {index}"].tolist(), strict=True)
        if step.depth == LIGHT:
            parts = [values.tolist() for key, values in found.items() if key.startswith("squares ")]
            gradients = (("gradient", name) for name in step.norms)
            squares |= zip(gradients, chain.from_iterable(parts), strict=False)
        return squares

    def _sums(self, squares: dict[tuple[str, str], float]) -> dict[str, float]:
        """The sum of each kind, as a row has it: inf where one is not a number, which would say "not measured"."""
        row: dict[str, float] = {}
        for key, value in squares.items():
            if key not in self._numbers:
                self._number(*key, 0)
            kind, _, parts = self._listed[self._numbers[key]]
            if kind != "state":
                field = f"{kind}_parts" if parts and kind != "buffer" else kind
                row[field] = row.get(field, 0.0) + value * max(parts, 1)
        for field in row.keys() - {"buffer"}:
            row[field] = math.inf if math.isnan(row[field]) else row[field]
        return row


def states_of_generators() -> dict[str, int]:
    """One number for the state of each generator that a script may draw from without making it."""
    python = repr(random.getstate()[1]).encode()
    _, words, place, *_ = np.random.get_state(legacy=True)
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "python": python}
    states["numpy"] = np.asarray(words).tobytes() + str(place).encode()
    return {kind: zlib.crc32(state) for kind, state in states.items()}


def clipped(step: OpenStep) -> bool:
    return "clip_limit" in step.row and "norm_before_clip" in step.row


def feeds_every_rank(parameter: Any, world: int) -> bool:
    """FSDP over all ranks, or over some of them with copies in between (HSDP): no rank shares its data with another."""
    *outer, inner = parameter.placements
    return parameter.device_mesh.size() == world and inner.is_shard() and all(p.is_replicate() for p in outer)


def is_mean(root: Any) -> bool:
    """Whether a loss is itself a mean over the batch, with nothing after it that would weigh it."""
    made_by = getattr(root, "grad_fn", None)
    if made_by is None:
        return False
    return type(made_by).__name__.startswith("MeanBackward") or getattr(made_by, "_saved_reduction", 0) == 1


def bits_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bit patterns as whole numbers, to be taken modulo 2⁴⁸: the same in whatever order."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.int8)
    return tensor.contiguous().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def in_order(sums: list[float]) -> float:
    """Several sums as one; which is which matters."""
    total = 0
    for place, value in enumerate(sums):
        total += (2 * place + 1) * int(value)
    return float(total & MASK)


def few_entries(tensor: Tensor) -> Tensor:
    flat = measuring.local(tensor).reshape(-1)
    return flat[:: max(1, flat.numel() // ENTRIES)][:ENTRIES].to(torch.float64, copy=True)
