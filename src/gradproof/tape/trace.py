"""Follows non-finite values through an exact replay: which operation made them, and what they reached.

−inf that was put there on purpose (a mask, a constant) is not a fault until it makes a NaN; fresh memory is
not one until somebody reads what was never written. Whether a value counts is decided by what it reaches: the
loss, a gradient, a parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import BackwardCall, Operation, Ref, Tape
from gradproof.tape.operators import FRESH, is_collective
from gradproof.tape.player import Player
from gradproof.tape.replay import real_contributions, replay_exactly
from gradproof.tape.tensors import load

SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"}


@dataclass(slots=True)
class Bad:
    """A non-finite result: born here, passed on, put there on purpose, or in fresh memory."""

    operation: int  # −1 − slot for a leaf
    slot: int
    kind: str  # born, passed, meant, fresh
    parents: tuple[Bad, ...] = ()
    nan: bool = False
    high: bool = False  # +inf is among them


@dataclass
class Trace:
    """All non-finite values of a step, by the slot and time at which they appeared."""

    tape: Tape
    by_slot: dict[int, Bad] = field(default_factory=dict)
    by_storage: dict[int, Bad] = field(default_factory=dict)
    loss: list[Bad] = field(default_factory=list)
    outputs: list[tuple[str, Bad]] = field(default_factory=list)  # of a tape without a backward
    gradients: list[tuple[str, Bad]] = field(default_factory=list)
    parameters: list[tuple[str, Bad]] = field(default_factory=list)
    before_write: dict[int, tuple[bool, Bad | None]] = field(default_factory=dict)
    sent: dict[int, tuple[Bad, ...]] = field(
        default_factory=dict
    )  # memory -> what a collective was given for it

    def look_before(self, player: Player, operation: Operation) -> None:
        self.before_write = {}
        for slot in operation.writes:
            try:
                if slot in player.env or self.tape.slots[slot].made_by is None:
                    self.before_write[slot] = (_is_bad(player.value(slot)), self.find(slot, player))
            except CannotReplay:
                continue
        if is_collective(operation.func):
            given = self.parents(player, operation, -1)
            given += tuple(b for s in operation.reads for b in self.sent.get(self.tape.slots[s].storage, ()))
            for slot in (*operation.makes, *operation.writes):
                self.sent[self.tape.slots[slot].storage] = given

    def look_after(self, player: Player, operation: Operation) -> None:
        made = list(dict.fromkeys((*operation.makes, *operation.writes)))
        for slot in made:
            value = player.env.get(slot)
            if value is None or not _is_bad(value):
                self.by_slot.pop(slot, None)
                continue
            self.note(player, operation, slot, value)

    def note(self, player: Player, operation: Operation, slot: int, value: torch.Tensor) -> None:
        nan, high = bool(torch.isnan(value).any()), _has_high(value)
        parents = self.parents(player, operation, slot)
        wrong = tuple(p for p in parents if p.kind != "meant")
        if operation.name in FRESH:
            kind, parents = "fresh", ()
        elif wrong and not (nan and operation.name in SOFTMAXES and not any(p.nan or p.high for p in wrong)):
            kind, parents = "passed", wrong
        elif nan or not (parents or _has_infinite_constant((operation.args, operation.kwargs))):
            kind, parents = "born", ()
        else:
            kind = "meant"
        bad = Bad(operation.index, slot, kind, parents, nan, high)
        self.by_slot[slot] = bad
        self.by_storage[self.tape.slots[slot].storage] = bad

    def parents(self, player: Player, operation: Operation, slot: int) -> tuple[Bad, ...]:
        """Where the non-finite arguments came from; of a list operator, only the same place in the list."""
        found = []
        for read in _reads_for(operation, slot):
            if read in self.before_write:
                bad, origin = self.before_write[read]
                if bad and origin is not None:
                    found.append(origin)
                continue
            try:
                value = player.value(read)
            except CannotReplay:
                continue
            if _is_bad(value):
                origin = self.find(read, player)
                if origin is not None:
                    found.append(origin)
        if operation.func is load:
            found += self.sent.get(self.tape.slots[slot].storage, ())
        return tuple(found)

    def find(self, slot: int, player: Player) -> Bad | None:
        """What made a slot non-finite; a leaf may have been so before the step."""
        if slot in self.by_slot:
            return self.by_slot[slot]
        storage = self.tape.slots[slot].storage
        if storage in self.by_storage:
            return self.by_storage[storage]
        if self.tape.slots[slot].made_by is None:
            value = player.value(slot)
            if _is_bad(value):
                meant = not bool(torch.isnan(value).any()) and float(value.max()) < math.inf
                bad = Bad(-1 - slot, slot, "meant" if meant else "born", (), not meant, _has_high(value))
                self.by_slot[slot] = bad
                return bad
        return None

    def target(self, player: Player, slot: int) -> Bad | None:
        try:
            bad = _is_bad(player.value(slot))
        except CannotReplay:
            return None
        found = self.find(slot, player) if bad else None
        if found is not None and found.kind == "meant":  # a mask that reaches the loss was not meant to
            return Bad(found.operation, found.slot, "born", (), found.nan, found.high)
        return found


def follow(tape: Tape, fresh: float) -> Trace:
    """One exact replay that watches every result for NaN and infinity."""
    trace = Trace(tape)
    looks: dict[int, list] = {}

    def loss_look(slot: int):
        return lambda player: trace.loss.extend(filter(None, [trace.target(player, slot)]))

    def named_look(into: list, name: str, slot: int):
        return lambda player: into.extend((name, bad) for bad in filter(None, [trace.target(player, slot)]))

    for call in tape.top_backwards:
        for slot in call.roots if call.accumulates else ():
            looks.setdefault(call.first, []).append(loss_look(slot))
        for at, parameter, gradient in (*real_contributions(tape, call), *_asked_for(call)):
            if tape.slots[parameter].kind == "parameter":
                looks.setdefault(at, []).append(
                    named_look(trace.gradients, tape.slots[parameter].name, gradient)
                )
    for parameter, (at, gradient) in tape.final_gradients.items():  # what a clip may have made of it
        looks.setdefault(at, []).append(named_look(trace.gradients, tape.slots[parameter].name, gradient))
    end = len(tape.operations)
    for slot in final_outputs(tape) if not tape.top_backwards else ():
        looks.setdefault(end, []).append(named_look(trace.outputs, "the model's output", slot))
    for slot in tape.stepped:
        looks.setdefault(end, []).append(named_look(trace.parameters, tape.slots[slot].name, slot))
    keep = {*(slot.index for slot in tape.parameters), *final_outputs(tape)}
    replay_exactly(
        tape,
        fresh=fresh,
        at=looks,
        before=trace.look_before,
        after=trace.look_after,
        keep=keep,
        compare=False,
    )
    return trace


def came_from_others(tape: Tape, index: int) -> bool:
    """Whether an operation reads what a collective has brought from another process."""
    if tape.operations[index].func is not load:
        return False
    storages = {tape.slots[slot].storage for slot in tape.operations[index].writes}
    return any(
        is_collective(op.func)
        and not storages.isdisjoint(tape.slots[s].storage for s in (*op.makes, *op.writes))
        for op in tape.operations[:index]
    )


def _asked_for(call: BackwardCall) -> list[tuple[int, int, int]]:
    """(at operation, slot, gradient) of what torch.autograd.grad returned."""
    pairs = zip(call.inputs or (), call.results, strict=False)
    return [(call.last, slot, result) for slot, result in pairs if result is not None]


def final_outputs(tape: Tape) -> list[int]:
    """What the outermost module that was called last returned."""
    last = max(tape.modules, key=lambda call: (call.last, -call.first), default=None)
    return last.outputs if last is not None else []


def origins(targets: list[Bad]) -> dict[int, tuple[Bad, list[Bad]]]:
    """The births behind some bad values, by operation, each with its chain from birth to target."""
    found: dict[int, tuple[Bad, list[Bad]]] = {}
    seen: set[int] = set()
    waiting = [(target, [target]) for target in targets]
    while waiting:
        bad, chain = waiting.pop()
        if id(bad) in seen:
            continue
        seen.add(id(bad))
        if not bad.parents:
            found.setdefault(bad.operation, (bad, chain[::-1]))
        for parent in bad.parents:
            waiting.append((parent, [*chain, parent]))
    return found


def _is_bad(value: torch.Tensor) -> bool:
    if (
        not (value.is_floating_point() or value.is_complex())
        or value.numel() == 0
        or value.layout != torch.strided
    ):
        return False
    if value.element_size() == 1:
        value = value.float()
    total = value.sum(dtype=torch.float64 if value.is_floating_point() else None)
    return not bool(torch.isfinite(total)) and not bool(torch.isfinite(value).all())


def _has_high(value: torch.Tensor) -> bool:
    return not value.is_complex() and bool((value == math.inf).any())


def _has_infinite_constant(tree: Any) -> bool:
    if isinstance(tree, float):
        return not math.isfinite(tree)
    if isinstance(tree, Ref):
        return False
    if isinstance(tree, dict):
        tree = list(tree.values())
    return any(_has_infinite_constant(part) for part in tree) if isinstance(tree, (tuple, list)) else False


def _reads_for(operation: Operation, slot: int) -> list[int]:
    if not operation.name.startswith(("_foreach", "_fused", "_amp_foreach")):
        return operation.reads
    made = [ref.slot for ref in operation.results or () if isinstance(ref, Ref)] if operation.results else []
    place = next((group.index(slot) for group in (made, list(operation.writes)) if slot in group), None)
    reads: list[int] = []
    for arg in (*operation.args, *operation.kwargs.values()):
        if isinstance(arg, Ref):
            reads.append(arg.slot)
        elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Ref):
            size = len(operation.writes) or len(made)
            place_in = place % len(arg) if place is not None and size % len(arg) == 0 else None
            reads += [ref.slot for i, ref in enumerate(arg) if place_in is None or i == place_in]
    return reads
