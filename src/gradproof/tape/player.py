"""One pass over recorded operations with an environment of slot values; replay.py says what can be asked of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from gradproof.tape.execute import CannotReplay, converted, execute
from gradproof.tape.operations import BackwardCall, FunctionCall, Operation, Ref, Tape
from gradproof.tape.operators import WRITTEN_RESULTS, is_collective
from gradproof.tape.tensors import alias, fingerprint, load

Leaves = Mapping[str, torch.Tensor] | Mapping[int, torch.Tensor]


@dataclass
class Replay:
    """What a replay brought back."""

    losses: list[torch.Tensor] = field(
        default_factory=list
    )  # the roots of each backward that filled gradients
    values: dict[int, torch.Tensor] = field(default_factory=dict)  # the slots asked for
    gradients: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # parameter slot -> summed over backwards
    per_call: dict[int, dict[int, torch.Tensor]] = field(
        default_factory=dict
    )  # backward call -> parameter -> gradient
    slot_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)  # operation -> how it was replaced
    departs_at: int | None = None  # the first operation that made something else than recorded

    @property
    def loss(self) -> torch.Tensor:
        return self.losses[0]


class Saving:
    """What autograd saves during a replay is copied where a later operation overwrites it.

    The graph holds on to its hooks: were they the player's own, graph and player would keep each other alive.
    """

    def __init__(self) -> None:
        self.clone = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if self.clone else tensor.detach()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)


class Player:
    """One pass over operations with an environment of slot values."""

    def __init__(
        self,
        tape: Tape,
        dtype: torch.dtype | None,
        leaves: Leaves | None,
        keep: Iterable[int] = (),
        fresh: float = 0.0,
        autograd: bool = False,
        gradients_at: Iterable[int] = (),
        only: Iterable[int] = (),
        follow_cuts: bool = False,
        replace: Mapping[int, Callable] | None = None,
        open_functions: bool = True,
        compare: bool = False,
    ) -> None:
        tape.put_in_place()
        self.tape, self.dtype, self.fresh, self.autograd = tape, dtype, fresh, autograd
        self.comparing = compare
        self.last_write = tape.last_write  # of what is played: memory -> the last operation that changes it
        self.follow_cuts = follow_cuts
        self.env: dict[int, torch.Tensor] = {}
        self.keep, self.gradients_at = set(keep), set(gradients_at)
        self.only = set(only)  # leaves whose gradients are wanted; empty: of all
        self.edges: dict[int, Any] = {}  # into the graph, of the slots whose gradients are asked for
        self.replace = replace or {}
        self.replay = Replay()
        self.saving = Saving()
        self.live_until = 0
        self.flats: dict[int, torch.Tensor] = {}
        names = tape.leaf_named
        self.overrides = {names[k] if isinstance(k, str) else k: v for k, v in (leaves or {}).items()}
        calls_live = open_functions and (autograd or dtype is not None or bool(self.overrides))
        self.opaque = [call for call in tape.functions if call.opaque] if calls_live else []

    # -- values

    def value(self, slot: int) -> torch.Tensor:
        """The current value of a slot; a leaf is loaded when it is first needed."""
        if slot not in self.env:
            self.env[slot] = self.load_leaf(slot)
        return self.env[slot]

    def load_leaf(self, slot: int) -> torch.Tensor:
        if slot in self.overrides:
            return converted(self.overrides[slot].detach(), self.dtype).clone()
        if slot in self.tape.loose:
            return converted(self.tape.loose[slot], self.dtype).clone()
        memory = self.tape.memory_of.get(slot)
        if memory is None:
            raise CannotReplay(f"{self.tape.slots[slot]} is not available")
        if id(memory) not in self.flats:
            flat = converted(memory.flat, self.dtype)
            changes = self.tape.slots[slot].storage in self.last_write
            self.flats[id(memory)] = (
                flat.detach().clone() if flat is memory.flat and changes else flat.detach()
            )
        return self.flats[id(memory)].as_strided(*memory.views[slot]).detach()

    def argument(self, operation: Operation) -> Callable[[Ref], torch.Tensor]:
        def value(ref: Ref) -> torch.Tensor:
            tensor = self.value(ref.slot)
            if not self.autograd:
                return tensor
            if ref.tracked and not tensor.requires_grad and tensor.is_floating_point() | tensor.is_complex():
                tensor = self.env[ref.slot] = tensor.detach().requires_grad_()
                self.hook(ref.slot, tensor)
            elif (
                tensor.requires_grad and not ref.tracked and operation.grad_enabled and operation.call is None
            ):
                return tensor if self.follow_cuts else tensor.detach()
            return tensor

        return value

    def hook(self, slot: int, tensor: torch.Tensor) -> None:
        if slot in self.gradients_at and tensor.requires_grad:
            found = self.replay.slot_gradients
            tensor.register_hook(lambda gradient: found.__setitem__(slot, gradient.detach()))
            self.edges[slot] = torch.autograd.graph.get_gradient_edge(tensor)

    # -- playing

    def play(
        self,
        operations: list[Operation],
        at: Mapping[int, list[Callable]] | None = None,
        before: Callable | None = None,
        after: Callable | None = None,
        keep_for: Operation | None = None,
    ) -> None:
        """Plays the operations in order, dropping what no later one (nor `keep_for`) needs."""
        at = at or {}
        dies = self._last_uses(operations, keep_for)
        self.last_write = self._last_writes(operations, keep_for)
        calls = {call.first: call for call in self.tape.top_backwards}
        pending = sorted(calls)
        plain = self.dtype is None and not self.overrides and not self.replace
        # compiled: what was recorded are the results of other code
        compare = self.comparing and plain and not self.autograd and not self.tape.compiled
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the step has said them once
            for device in {slot.device.type for slot in self.tape.slots} & {"cpu", "cuda", "xpu", "mps"}:
                stack.enter_context(torch.autocast(device, enabled=False))
            for operation in operations:
                while pending and pending[0] <= operation.index:
                    self.root(calls[pending.pop(0)])
                for look in at.get(operation.index, ()):
                    look(self)
                while self.opaque and self.opaque[0].first <= operation.index:
                    self.call_live(self.opaque.pop(0), operation.index)
                if self.live_until > operation.index:
                    continue
                if before is not None:
                    before(self, operation)
                self.step(operation)
                if compare:
                    self.compare(operation)
                if after is not None:
                    after(self, operation)
                for slot in dies.get(operation.index, ()):
                    self.env.pop(slot, None)
            end = operations[-1].index + 1 if operations else 0
            for first in pending if keep_for is None else ():
                if first <= end or self.autograd:
                    self.root(calls[first])
            for look in at.get(len(self.tape.operations), ()):
                look(self)
        for slot in self.keep - set(self.replay.values):
            if slot in self.env or self.tape.slots[slot].made_by is None:
                self.replay.values[slot] = self.value(slot).detach()

    def _last_uses(self, operations: list[Operation], keep_for: Operation | None) -> dict[int, list[int]]:
        last: dict[int, int] = {}
        for operation in operations:
            for slot in (*operation.reads, *operation.makes):
                last[slot] = operation.index
        for at, slot in _looked_at(self.tape):
            last[slot] = max(last.get(slot, at), at)
        stay: set[int] = {*self.keep, *(keep_for.reads if keep_for is not None else ())}
        for call in self.tape.backwards:
            stay.update(call.roots, (s for s in call.root_gradients if s is not None), call.inputs or ())
            stay.update(call.stored.values())
        if self.autograd:  # leaves whose gradients are asked for
            stay.update(slot.index for slot in self.tape.slots if slot.made_by is None)
        dies: dict[int, list[int]] = {}
        for slot, index in last.items():
            if slot not in stay:
                dies.setdefault(index, []).append(slot)
        return dies

    def _last_writes(self, operations: list[Operation], keep_for: Operation | None) -> dict[int, int]:
        """What stays as it is until the end of the play need not be copied: an update comes after it."""
        played = operations if keep_for is None else [*operations, keep_for]
        return {self.tape.slots[slot].storage: op.index for op in played for slot in op.writes}

    def step(self, operation: Operation) -> None:
        """One operation; one that cannot be run leaves its slots empty and a note."""
        if not operation.results and not operation.writes:
            return
        touched = {self.tape.slots[slot].storage for slot in (*operation.reads, *operation.makes)}
        self.saving.clone = any(self.last_write.get(storage, -1) > operation.index for storage in touched)
        followed = operation.grad_enabled or (
            # inside a custom function, or the copy that its apply makes of an input returned as it is
            self.autograd and (operation.call is not None or self._followed(operation))
        )
        try:
            with torch.set_grad_enabled(followed):
                result, note = self._run(operation)
        except torch.OutOfMemoryError:
            raise  # says nothing about the operation
        except (CannotReplay, RuntimeError, TypeError, NotImplementedError, IndexError, ValueError) as error:
            self.replay.notes[operation.index] = f"{operation.name} could not be replayed: {_first(error)}"
            for slot in (*operation.makes, *operation.writes):
                self.env.pop(slot, None)
            return
        if note:
            self.replay.notes[operation.index] = note
        if operation.index in self.replace:
            result = self.replace[operation.index](result)
        self._store(operation.results, result, operation)

    def _followed(self, operation: Operation) -> bool:
        return any(self.tape.slots[slot].followed for slot in operation.makes if slot not in operation.writes)

    def _run(self, operation: Operation) -> tuple[Any, str]:
        if operation.func is load:
            assert operation.frozen is not None
            slot = operation.args[0].slot
            frozen = converted(operation.frozen[0], self.dtype)
            if self.autograd and self.value(slot).requires_grad:
                self.env[slot] = frozen.clone()
            else:
                self.value(slot).copy_(frozen)
            return None, ""
        if is_collective(operation.func) and operation.frozen is None:
            return self._without_others(operation), ""
        if operation.func is alias:
            return alias(self.argument(operation)(operation.args[0]), *operation.args[1:]), ""
        return execute(operation, self.argument(operation), self.tape.slots, self.dtype, self.fresh)

    def _without_others(self, operation: Operation) -> Any:
        """A collective is never run again: what it brought is read from the tape where it is used."""
        if not isinstance(operation.results, Ref):
            return None
        made = self.tape.slots[operation.results.slot]
        for slot in operation.reads:
            if self.tape.slots[slot].storage == made.storage and self.tape.slots[slot].shape == made.shape:
                return self.value(slot)
        return converted(torch.zeros(made.shape, dtype=made.dtype, device=made.device), self.dtype)

    def _store(self, results: Any, values: Any, operation: Operation) -> None:
        if isinstance(results, Ref):
            if results.slot in self.overrides and isinstance(values, torch.Tensor):
                values = converted(self.overrides[results.slot].detach(), self.dtype).clone()
            if isinstance(values, torch.Tensor) and not (
                results.slot in operation.writes and results.slot in self.env
            ):
                self.env[results.slot] = values
                self.hook(results.slot, values)
            if results.slot in self.keep and isinstance(values, torch.Tensor):
                self.replay.values[results.slot] = values.detach().clone()
        elif isinstance(results, (tuple, list)) and isinstance(values, (tuple, list)):
            for part, value in zip(results, values, strict=False):
                self._store(part, value, operation)

    def call_live(self, call: FunctionCall, index: int) -> None:
        """A function whose inside the tape cannot see is called again, with its own backward."""
        if call.last <= index and call.last != call.first:
            return  # not part of what is played

        def arg(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            tensor = self.value(value.slot)
            if self.autograd and value.tracked and not tensor.requires_grad:
                tensor = self.env[value.slot] = tensor.detach().requires_grad_()
            return tensor.to(call.dtypes[value.slot])

        try:
            with torch.set_grad_enabled(self.autograd):
                result = call.cls.apply(*(arg(value) for value in call.args))
        except Exception as error:
            self.replay.notes[call.first] = f"{call.cls.__name__} could not be called again: {_first(error)}"
            return
        self.replay.notes[call.first] = f"{call.cls.__name__} was called as it is: {call.opaque}"
        self.live_until = call.last
        for slot, value in zip(
            call.outputs, result if isinstance(result, (tuple, list)) else [result], strict=False
        ):
            if slot is not None and isinstance(value, torch.Tensor):
                self.env[slot] = converted(value, self.dtype)

    def compare(self, operation: Operation) -> None:
        """Notes the first operation whose result is not the recorded one."""
        if self.replay.departs_at is not None or operation.fingerprint is None:
            return
        made = (operation.makes or list(operation.writes))[: WRITTEN_RESULTS.get(operation.name)]
        now = fingerprint([self.env[slot] for slot in made if slot in self.env])
        if now is None:
            return
        then = float(self.tape.fingerprints[operation.fingerprint])
        if float(now) == then or (now != now and then != then):
            return
        if self._differs(made, float(now), then):
            self.replay.departs_at = operation.index

    def _differs(self, made: list[int], now: float, then: float) -> bool:
        """On a GPU, and elsewhere, sums run in another order: a difference counts when it is large."""
        sizes = [
            float(self.env[s].abs().sum()) for s in made if s in self.env and self.env[s].is_floating_point()
        ]
        return not abs(now - then) <= 0.01 * sum(sizes)

    # -- backward

    def root(self, call: BackwardCall) -> None:
        """A backward call: keep its loss and, when differentiating, run it by PyTorch's own derivative."""
        try:
            roots = [self.value(slot) for slot in call.roots]
            if call.accumulates:
                self.replay.losses += [root.detach().clone() for root in roots]
            if self.autograd:
                self._differentiate(call, roots)
        except torch.OutOfMemoryError:
            raise
        except (CannotReplay, RuntimeError) as error:
            self.replay.notes[call.first] = f"backward call could not be replayed: {_first(error)}"

    def _differentiate(self, call: BackwardCall, roots: list[torch.Tensor]) -> None:
        weights = [None if slot is None else self.value(slot).detach() for slot in call.root_gradients]
        pairs = [(root, weight) for root, weight in zip(roots, weights, strict=True) if root.requires_grad]
        if not pairs:
            return
        if call.inputs is not None:
            targets = list(zip(call.inputs, (self.value(slot) for slot in call.inputs), strict=True))
        else:
            targets = [
                (slot, tensor) for slot, tensor in self.env.items() if tensor.requires_grad and tensor.is_leaf
            ]
        wanted = [(slot, tensor) for slot, tensor in targets if tensor.requires_grad]
        if self.only and call.inputs is None:
            wanted = [(slot, tensor) for slot, tensor in wanted if slot in self.only]
        alone = self.gradients_at and self.tape.top_backwards == [call] and call.inputs is None
        if alone:  # nothing below those slots has to be differentiated; their hooks take what arrives
            wanted = list(self.edges.items())
        if not wanted:
            return
        gradients = torch.autograd.grad(
            [root for root, _ in pairs],
            [tensor for _, tensor in wanted],
            [weight for _, weight in pairs],
            retain_graph=True,
            create_graph=call.create_graph,
            allow_unused=True,
        )
        if alone:
            return
        dense = [g.to_dense() if g is not None and g.layout != torch.strided else g for g in gradients]
        found = {slot: g for (slot, _), g in zip(wanted, dense, strict=True) if g is not None}
        if call.inputs is not None:
            for slot, result in zip(call.inputs, call.results, strict=False):
                if result is not None and slot in found:
                    self.env[result] = found[slot]
            return
        self.replay.per_call[call.index] = {slot: gradient.detach() for slot, gradient in found.items()}
        for slot, gradient in self.replay.per_call[call.index].items():
            total = self.replay.gradients.get(slot)
            self.replay.gradients[slot] = gradient if total is None else total + gradient
            self._store_gradient(call, slot, gradient)

    def _store_gradient(self, call: BackwardCall, slot: int, gradient: torch.Tensor) -> None:
        stored = call.stored.get(slot)
        if stored is None:
            return
        before = any(c.index < call.index and c.stored.get(slot) == stored for c in self.tape.backwards)
        if before or self.tape.slots[stored].kind == "gradient":
            self.env[stored] = self.value(stored).detach() + gradient
        else:
            self.env[stored] = gradient.clone()


def _looked_at(tape: Tape) -> Iterator[tuple[int, int]]:
    """(operation, slot): gradients that somebody may look at before that operation."""
    for call in tape.backwards:
        for at, _, gradient in (*call.contributions, *call.received):
            yield at, gradient
        yield from ((call.last, slot) for slot in call.results if slot is not None)
    yield from tape.final_gradients.values()
    for function in tape.functions:
        for at, gradients_in, gradients_out, _ in function.backwards:
            yield from ((at, slot) for slot in (*gradients_in, *gradients_out) if slot is not None)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:160]
