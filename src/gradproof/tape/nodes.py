"""Node by node: did each built-in operation's backward return the derivative of what its forward read?

The gradient that reaches a tensor is the sum of what the operations that read it send back. Each is computed again
from the operands and the incoming gradient that the step really had, in the step's own precision and in float64, and
what arrived has to be one of the two within the room that rounding needs (bounds.py). Nothing adds up along the way, so
a deep step in bfloat16 is judged as sharply as a shallow one; where every node is right, by the chain rule the gradient
is.

Everything is looked at during one exact replay; of the operands only as much is held as fits (`HELD`), and a step with
more of them is replayed once for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gradproof.tape.bounds import BLIND, room_for_rounding, unit_of
from gradproof.tape.execute import CannotReplay, converted, execute
from gradproof.tape.operations import BackwardCall, Operation, Ref, Tape, references
from gradproof.tape.operators import written_arguments
from gradproof.tape.pattern import describe_difference, relative_error
from gradproof.tape.player import Player
from gradproof.tape.replay import differentiate, replay_exactly
from gradproof.tape.tensors import alias
from gradproof.tape.witness import DERIVATIVE, DIFFERENCE, second_witness

HELD = 2 << 30  # bytes of operands held at once; on a GPU, a quarter of what is free if that is more
OFTEN = 1e-3  # of a tensor's entries: more of them outside their room is no accident
FAR = 8.0  # rooms: one entry so far outside is none either
CONFIRMED = 4  # wrong places for which a second witness is called
PASSED_ON = {"_to_copy", "t", "view", "transpose", "permute", "expand", "unsqueeze", "reshape", "slice"}

Key = tuple[int, int, int]  # backward call, slot, how often it was changed in place before


@dataclass(frozen=True)
class WrongNode:
    """A tensor that received another gradient than its readers' derivatives say."""

    slot: int
    gradient: int  # slot of what arrived
    error: float
    pattern: str
    witnesses: tuple[str, ...]


@dataclass
class NodeReport:
    """What the nodes of a step said, one by one."""

    judged: int = 0
    unjudged: list[str] = field(
        default_factory=list
    )  # why not, once for each tensor that could not be judged
    wrong: list[WrongNode] = field(default_factory=list)
    sizes: dict[int, float] = field(
        default_factory=dict
    )  # parameter -> size of what was summed into its gradient

    @property
    def right(self) -> bool:
        """Every gradient was judged, and none is wrong."""
        return self.judged > 0 and not self.unjudged and not self.wrong

    def __str__(self) -> str:
        left = f", {len(self.unjudged)} not judged ({self.unjudged[0]})" if self.unjudged else ""
        return f"{self.judged - len(self.wrong)} of {self.judged} gradients are right{left}"


@dataclass
class Visit:
    """One node of a backward: the forward operation behind it, and the gradients that came to its results."""

    call: int
    operation: Operation
    at: int
    gradients: dict[int, int]  # result -> slot of its gradient
    reads: dict[int, Key]  # operand that is followed -> whose gradient it adds to
    order: float = 0.0  # among the nodes that the engine reached before the same operation


@dataclass
class Target:
    """A gradient that arrived: at a result of an operation, or at a parameter."""

    key: Key
    at: int
    gradient: int
    order: tuple[int, int, float]
    readers: list[Visit] = field(default_factory=list)
    functions: list[tuple[int, int]] = field(
        default_factory=list
    )  # (operation, gradient) that a Function returned
    why_not: str = ""


def check_nodes(tape: Tape) -> NodeReport:
    """Every gradient of a step against the derivative of the operations that sent it, from the loss backwards."""
    targets = Plan(tape).targets()
    report = NodeReport(unjudged=[t.why_not for t in targets if t.why_not])
    judged = [target for target in targets if not target.why_not]
    suspects: list[Target] = []
    sizes: dict[Key, float] = {}
    for window in _windows(tape, judged):
        found = Pass(tape, window).run()
        suspects += found.wrong
        report.judged += found.judged
        report.unjudged += found.unjudged
        sizes.update(found.sizes)
    by_key = {target.key: target for target in judged}
    for target in judged:
        slot = target.key[1]
        if tape.slots[slot].kind == "parameter":
            report.sizes[slot] = report.sizes.get(slot, 0.0) + _size_of(target, by_key, sizes)
    for target in sorted(suspects, key=lambda t: t.order)[:CONFIRMED]:
        again = Pass(tape, [target], confirm=True).run()
        report.wrong += [wrong for wrong in again.confirmed if not _is_contradicted(tape, target, again)]
    return report


def _is_contradicted(tape: Tape, target: Target, found: Pass) -> bool:
    """The derivative of the whole step sides with what arrived: then a reader is missing from the plan, not a term."""
    _, slot, version = target.key
    if version or tape.slots[slot].kind == "parameter":
        return False
    whole = differentiate(tape, torch.float64, gradients_at=[slot]).slot_gradients.get(slot)
    if whole is None or whole.shape != found.got.shape:
        return False
    nearer = torch.linalg.vector_norm(whole - found.got), torch.linalg.vector_norm(whole - found.precise)
    return bool(nearer[0] < 0.7 * nearer[1])


def _size_of(target: Target, by_key: dict[Key, Target], sizes: dict[Key, float]) -> float:
    """What was summed into a gradient; behind a cast or a transpose, what was summed before it."""
    found = sizes.get(target.key, 0.0)
    for visit in target.readers:
        for slot in visit.operation.makes if visit.operation.name in PASSED_ON else ():
            behind = by_key.get((visit.call, slot, 0))
            found = found if behind is None else max(found, _size_of(behind, by_key, sizes))
    return found


# -- who sends gradients to whom


class Plan:
    """The graph of a step as the engine walked it."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.followed = [op for op in tape.operations if _is_followed(tape, op)]
        self.writers: dict[int, list[int]] = {}
        for operation in self.followed:
            for slot in operation.writes:
                self.writers.setdefault(slot, []).append(operation.index)
        self.messy = self._messy()

    def targets(self) -> list[Target]:
        calls = [call for call in self.tape.top_backwards if call.accumulates]
        if any(call.create_graph for call in self.tape.backwards):
            return [self._left_out(call, "derivatives of derivatives") for call in calls]
        on_gpu = any(slot.device.type == "cuda" for slot in self.tape.slots)
        if on_gpu and any(op.in_backward is not None and op.grad_enabled for op in self.tape.operations):
            # the thread that backward runs in numbers its nodes from the beginning: they cannot be told apart
            return [self._left_out(call, "a forward is run again inside backward") for call in calls]
        return [target for call in calls for target in self._of_call(call)]

    def _left_out(self, call: BackwardCall, why: str) -> Target:
        return Target((call.index, -1, 0), call.last, -1, (call.last, 0, 0), why_not=why)

    def _of_call(self, call: BackwardCall) -> list[Target]:
        arrived, visits = self._arrivals(call)
        by_key = {target.key: target for target in arrived}
        for visit in visits:
            for key in set(visit.reads.values()):
                if key in by_key:
                    by_key[key].readers.append(visit)
        self._add_functions(call, by_key)
        self._leave_out(call, by_key, visits)
        roots = set(call.roots)
        return [t for t in arrived if t.key[1] not in roots]

    def _arrivals(self, call: BackwardCall) -> tuple[list[Target], list[Visit]]:
        """What arrived where, and the nodes that went on from there."""
        counts: dict[int, int] = {}
        for _, slot, _ in call.received:
            counts[slot] = counts.get(slot, 0) + 1
        seen: dict[int, int] = {}
        targets: dict[Key, Target] = {}
        visits: dict[tuple[int, int], Visit] = {}
        for order, (at, slot, gradient) in enumerate(call.received):
            makers = [self.tape.slots[slot].made_by, *self.writers.get(slot, ())]
            seen[slot] = seen.get(slot, 0) + 1
            version = len(makers) - seen[slot]  # backward reaches the last change first
            target = Target((call.index, slot, max(version, 0)), at, gradient, (at, 1, order))
            if counts[slot] != len(makers):
                target.why_not = "changed in place in a way that cannot be followed"
            targets[target.key] = target
            maker = makers[max(version, 0)]
            if maker is None or target.why_not or not _is_followed(self.tape, self.tape.operations[maker]):
                continue
            operation = self.tape.operations[maker]
            visit = visits.setdefault(
                (maker, at), Visit(call.index, operation, at, {}, self._reads(call, operation))
            )
            visit.gradients[slot] = gradient
            visit.order = order + 0.5  # behind what came to it, before what it sends on arrives
        nested = {
            slot
            for other in self.tape.backwards
            if other.nested and call.first <= other.first < call.last
            for _, slot, _ in other.contributions
        }
        for order, (at, slot, gradient) in enumerate(call.contributions):
            key = (call.index, slot, 0)
            targets[key] = Target(key, at, gradient, (at, 2, order))
            if slot in nested:
                targets[key].why_not = "part of it comes from inside a checkpoint"
        return list(targets.values()), list(visits.values())

    def _reads(self, call: BackwardCall, operation: Operation) -> dict[int, Key]:
        refs = references((operation.args, operation.kwargs))
        return {
            r.slot: (call.index, r.slot, self._version(r.slot, operation.index)) for r in refs if r.tracked
        }

    def _version(self, slot: int, at: int) -> int:
        return sum(index < at for index in self.writers.get(slot, ()))

    def _add_functions(self, call: BackwardCall, by_key: dict[Key, Target]) -> None:
        for function in self.tape.functions:
            refs = [arg for arg in function.args if isinstance(arg, Ref)]
            for at, _, gradients_out, first in function.backwards:
                if first != call.first:
                    continue
                for ref, gradient in zip(refs, gradients_out, strict=False):
                    key = (call.index, ref.slot, self._version(ref.slot, function.first))
                    if gradient is not None and key in by_key:
                        by_key[key].functions.append((at, gradient))

    def _leave_out(self, call: BackwardCall, by_key: dict[Key, Target], visits: list[Visit]) -> None:
        """Tensors whose readers are not all known."""
        known = {visit.operation.index for visit in visits}
        inside = {
            op.made_from for op in self.tape.operations[call.first : call.last] if op.made_from is not None
        }
        # what is saved and brought back by a hook takes the name of its node along: somebody received, and who is open
        lost = [slot for _, slot, _ in call.received if self._made_in_backward(slot)]
        shapes = {self.tape.slots[slot].shape for slot in lost}
        silent = [
            op
            for op in self.followed
            if op.index not in known
            and (op.index in inside or any(self.tape.slots[slot].shape in shapes for slot in op.makes))
        ]
        for operation in silent:
            for key in self._reads(call, operation).values():
                if key in by_key:
                    by_key[key].why_not = f"what came to {operation.name} is not known"
        early = begins_before(self.tape, call)
        for target in by_key.values():
            slot = self.tape.slots[target.key[1]]
            if early and slot.made_by is None:
                target.why_not = "part of its graph is older than the tape"
            if slot.storage in self.messy:
                target.why_not = "views of it are changed in place"
            elif slot.dtype.is_complex:
                target.why_not = "complex numbers"
            elif (
                not target.why_not
                and not target.readers
                and not target.functions
                and slot.index not in call.roots
            ):
                target.why_not = "nobody on the tape reads it"
            for visit in target.readers:
                if any(key in visit.operation.kwargs for _, key in written_arguments(visit.operation.func)):
                    target.why_not = "written by out="

    def _made_in_backward(self, slot: int) -> bool:
        made_by = self.tape.slots[slot].made_by
        return made_by is not None and self.tape.operations[made_by].in_backward is not None

    def _messy(self) -> set[int]:
        """Memory that is changed in place through views, or that a tensor looks into without an operation."""
        slots = self.tape.slots
        seen: dict[int, set[int]] = {}
        for operation in self.followed:
            for ref in (*references((operation.args, operation.kwargs)), *references(operation.results)):
                if ref.tracked or slots[ref.slot].followed:
                    seen.setdefault(slots[ref.slot].storage, set()).add(ref.slot)
        written = {slots[slot].storage for slot in self.writers}
        forward = [op for op in self.tape.operations if op.in_backward is None]
        aliased = {
            slots[op.args[0].slot].storage for op in forward if op.func is alias and op.args[0].tracked
        }
        written |= {
            slots[s].storage for op in forward if op.call is not None for s in op.writes if slots[s].followed
        }
        return aliased | {storage for storage in written if len(seen.get(storage, ())) > 1}


def begins_before(tape: Tape, call: BackwardCall) -> bool:
    """Whether a backward walks through nodes that were made before the tape began: a GAN's generator, a loss kept."""
    return call.index in tape.older


def _is_followed(tape: Tape, operation: Operation) -> bool:
    """An operation that autograd made a node for."""
    if operation.call is not None or operation.phase != "forward" or operation.in_backward is not None:
        return False
    if operation.func is alias or not any(r.tracked for r in references((operation.args, operation.kwargs))):
        return False
    # a module with backward hooks passes what it gets and gives on as it is, in a Function of PyTorch's own
    passed_on = operation.name in ("view", "view_as", "alias") and any(
        tape.slots[slot].followed for slot in operation.makes
    )
    return operation.grad_enabled or passed_on


def _windows(tape: Tape, targets: list[Target]) -> Iterator[list[Target]]:
    """Targets in the order of backward, in parts whose operands fit into memory together."""
    limit = HELD
    devices = {slot.device for slot in tape.slots if slot.device.type == "cuda"}
    if devices:
        limit = max(limit, min(torch.cuda.mem_get_info(device)[0] for device in devices) // 4)
    window: list[Target] = []
    held: set[int] = set()
    size = 0
    for target in sorted(targets, key=lambda t: t.order):
        new = {s for visit in target.readers for s in _values_of(visit.operation)} - held
        more = sum(_bytes(tape, slot) for slot in new)
        if window and size + more > limit:
            yield window
            window, held, size = [], set(), 0
            new = {s for visit in target.readers for s in _values_of(visit.operation)}
            more = sum(_bytes(tape, slot) for slot in new)
        window.append(target)
        held |= new
        size += more
    if window:
        yield window


def _values_of(operation: Operation) -> set[int]:
    """The operands whose values the derivative depends on."""
    return set() if operation.name in BLIND else set(operation.reads)


def _bytes(tape: Tape, slot: int) -> int:
    entry = tape.slots[slot]
    count = 1
    for size in entry.shape:
        count *= size
    return count * entry.dtype.itemsize if entry.kind != "parameter" else 0


# -- one replay that looks


@dataclass
class Sum:
    """What the readers of a tensor send to it, by float64, by the step's own precision, and the room for rounding."""

    precise: Tensor | None = None
    own: Tensor | None = None
    room: Tensor | float = 0.0
    size: Tensor | float = 0.0
    failed: str = ""

    def add(self, precise: Tensor, own: Tensor | None, room: Tensor | float, size: Tensor) -> None:
        if self.precise is None:
            self.precise, self.own = precise, own
        else:
            self.precise = self.precise + precise
            self.own = None if own is None or self.own is None else self.own + own
        self.room, self.size = self.room + room, self.size + size


class Pass:
    """One exact replay during which some targets are judged."""

    def __init__(self, tape: Tape, targets: list[Target], confirm: bool = False) -> None:
        self.tape, self.targets, self.confirm = tape, targets, confirm
        self.wanted = {target.key for target in targets}
        self.sums: dict[Key, Sum] = {}
        self.operands: dict[int, dict[int, Tensor]] = {}  # id of a visit -> slot -> value
        self.incoming: dict[int, dict[int, Tensor]] = {}
        self.judged = 0
        self.unjudged: list[str] = []
        self.sizes: dict[Key, float] = {}
        self.wrong: list[Target] = []
        self.confirmed: list[WrongNode] = []
        self.got = self.precise = torch.empty(0)
        self.changes: dict[int, list[int]] = {}
        for operation in tape.operations:
            for slot in operation.writes:
                self.changes.setdefault(tape.slots[slot].storage, []).append(operation.index)

    def run(self) -> Pass:
        looks: dict[int, list[tuple[tuple, Callable]]] = {}
        visits = {id(v): v for target in self.targets for v in target.readers}
        for visit in visits.values():
            capture, send = partial(self._capture, visit=visit), partial(self._send, visit=visit)
            looks.setdefault(visit.operation.index, []).append(((0, 0, 0), capture))
            looks.setdefault(visit.at, []).append(((visit.at, 1, visit.order), send))
        for target in self.targets:
            for at, gradient in target.functions:
                take = partial(self._take, target=target, gradient=gradient)
                looks.setdefault(at, []).append(((at, 0, 0), take))
            looks.setdefault(target.at, []).append((target.order, partial(self._judge, target=target)))
        ordered = {at: [look for _, look in sorted(some, key=lambda s: s[0])] for at, some in looks.items()}
        last = max((target.at for target in self.targets), default=0)
        replay_exactly(self.tape, at=ordered, until=last + 1, compare=False)
        return self

    def _capture(self, player: Player, visit: Visit) -> None:
        needed = _values_of(visit.operation)
        held = {}
        for slot in dict.fromkeys(visit.operation.reads):
            floats = self.tape.slots[slot].dtype.is_floating_point
            if slot not in needed and floats:
                continue
            try:
                value = player.value(slot).detach()
            except CannotReplay:
                continue
            written = self.changes.get(self.tape.slots[slot].storage, ())
            changed = any(visit.operation.index <= index < visit.at for index in written)
            held[slot] = value.clone() if changed else value
        self.operands[id(visit)] = held

    def _values(self, visit: Visit) -> dict[int, Tensor]:
        held = self.operands[id(visit)] if self.confirm else self.operands.pop(id(visit))
        for slot in visit.operation.reads:
            if slot not in held:
                entry = self.tape.slots[slot]
                held[slot] = torch.zeros(entry.shape, dtype=entry.dtype, device=entry.device)
        return held

    def _send(self, player: Player, visit: Visit) -> None:
        """What one node sends to each of its operands."""
        wanted = {slot: key for slot, key in visit.reads.items() if key in self.wanted}
        try:
            operands = self._values(visit)
            gradients = {slot: _dense(player.value(g)) for slot, g in visit.gradients.items()}
            if self.confirm:
                self.incoming[id(visit)] = gradients
            self._derive(visit, wanted, operands, gradients)
        except Exception as error:  # an operator that cannot be run alone has nothing to say
            why = f"{visit.operation.name}: {(str(error).splitlines() or [repr(error)])[0][:120]}"
            for key in wanted.values():
                self.sums.setdefault(key, Sum()).failed = why

    def _derive(self, visit: Visit, wanted: dict, operands: dict, gradients: dict) -> None:
        operation, tape = visit.operation, self.tape
        narrow = derivative_of(tape, operation, operands, gradients, None)
        wide = {s: converted(v, torch.float64) for s, v in operands.items()}
        steep = {s: g.double() for s, g in gradients.items()}
        precise = derivative_of(tape, operation, wide, steep, torch.float64)
        unit = unit_of(tape, operation, gradients)

        def derive(values: dict[int, Tensor], incoming: dict[int, Tensor]) -> dict[int, Tensor]:
            return derivative_of(tape, operation, {**wide, **values}, incoming, torch.float64)

        rooms, sizes = room_for_rounding(tape, operation, wide, steep, precise, derive, unit)
        for slot, key in wanted.items():
            if slot in precise:
                own = narrow[slot].double() if slot in narrow else None
                self.sums.setdefault(key, Sum()).add(precise[slot], own, rooms[slot], sizes[slot])

    def _take(self, player: Player, target: Target, gradient: int) -> None:
        """What a hand-written Function returned is judged elsewhere, and taken here as it is."""
        value = _dense(player.value(gradient)).double()
        self.sums.setdefault(target.key, Sum()).add(value, value, 0.0, value.abs())

    def _judge(self, player: Player, target: Target) -> None:
        try:
            self._compare(player, target, self.sums.pop(target.key, Sum()))
        except (CannotReplay, torch.OutOfMemoryError) as error:
            self.unjudged.append(str(error).splitlines()[0][:120])

    def _compare(self, player: Player, target: Target, total: Sum) -> None:
        got = _dense(player.value(target.gradient))
        if total.failed or total.precise is None or total.precise.shape != got.shape:
            self.unjudged.append(total.failed or "nothing on the tape sends to it")
            return
        self.judged += 1
        self.sizes[target.key] = float(torch.linalg.vector_norm(total.size))
        if not bool(torch.isfinite(got).all() & torch.isfinite(total.precise).all()):
            return  # where the first bad number comes from is another question
        if is_outside(got, total):
            self.wrong.append(target)
            if self.confirm:
                self._confirm(player, target, got, total.precise)

    def _confirm(self, player: Player, target: Target, got: Tensor, precise: Tensor) -> None:
        slot = target.key[1]
        taken = sum(
            (_dense(player.value(g)).double() for _, g in target.functions), torch.zeros_like(precise)
        )
        readers = [v for v in target.readers if target.key in v.reads.values()]
        at = next((self.operands[id(v)][slot] for v in readers if slot in self.operands[id(v)]), None)
        agrees = None
        if at is not None:
            weights = [g for v in readers for g in self.incoming[id(v)].values()]
            outputs = lambda x: [o for v in readers for o in self._outputs(v, slot, x)]  # noqa: E731
            agrees = second_witness(outputs, weights, at, got.double() - taken, precise - taken)
        if agrees is False:
            return  # the two witnesses contradict each other
        self.got, self.precise = got.double(), precise
        error = relative_error(got, precise)
        pattern = describe_difference(got, precise, 1e-2)
        witnesses = (DERIVATIVE, DIFFERENCE) if agrees else (DERIVATIVE,)
        self.confirmed.append(WrongNode(slot, target.gradient, error, pattern, witnesses))

    def _outputs(self, visit: Visit, slot: int, x: Tensor) -> list[Tensor]:
        values = {s: converted(v, torch.float64) for s, v in self.operands[id(visit)].items()}
        found = outputs_of(self.tape, visit.operation, {**values, slot: x}, torch.float64, strictly=True)
        return [found[s] for s in self.incoming[id(visit)]]


def is_outside(got: Tensor, total: Sum) -> bool:
    """Neither near the derivative in float64 nor near PyTorch's own in the step's precision."""
    assert total.precise is not None
    sums = 2 * torch.finfo(got.dtype).eps * total.size  # adding up what several readers send
    room = (total.room + sums) * torch.ones_like(total.precise)
    off = (got.double() - total.precise).abs()
    if total.own is not None:
        off = torch.minimum(off, (got.double() - total.own).abs())
    over = off > room
    return bool(over.double().mean() > OFTEN) or bool((off > FAR * room).any())


def derivative_of(
    tape: Tape,
    operation: Operation,
    operands: dict[int, Tensor],
    gradients: dict[int, Tensor],
    dtype: torch.dtype | None,
) -> dict[int, Tensor]:
    """The vector-Jacobian product of one operation, by slot of its followed operands."""
    leaves: dict[int, Tensor] = {}
    for ref in references((operation.args, operation.kwargs)):
        if ref.tracked and operands[ref.slot].is_floating_point():
            leaves[ref.slot] = operands[ref.slot].detach().requires_grad_()
    with torch.enable_grad():
        found = outputs_of(tape, operation, {**operands, **leaves}, dtype)
        pairs = [(found[s], g) for s, g in gradients.items() if s in found and found[s].requires_grad]
        if not pairs:
            return {}
        sent = torch.autograd.grad(
            [out for out, _ in pairs],
            list(leaves.values()),
            [g.to(out.dtype).reshape(out.shape) for out, g in pairs],
            allow_unused=True,
        )
    return {slot: _dense(g) for slot, g in zip(leaves, sent, strict=True) if g is not None}


def outputs_of(
    tape: Tape,
    operation: Operation,
    operands: dict[int, Tensor],
    dtype: torch.dtype | None,
    strictly: bool = False,
) -> dict[int, Tensor]:
    """One operation again, by slot of its results; what it writes is written to a copy.

    `strictly` in this precision: a kernel that falls back to its own is a staircase to a difference quotient.
    """
    copies = {slot: operands[slot].clone() for slot in operation.writes if slot in operands}
    value = lambda ref: copies.get(ref.slot, operands[ref.slot])  # noqa: E731
    result, note = execute(operation, value, tape.slots, dtype, 0.0)
    if note and strictly:
        raise CannotReplay(note)
    return dict(_pairs(operation.results, result))


def _pairs(results: object, values: object) -> Iterator[tuple[int, Tensor]]:
    if isinstance(results, Ref) and isinstance(values, Tensor):
        yield results.slot, values
    elif isinstance(results, (tuple, list)) and isinstance(values, (tuple, list)):
        for part, value in zip(results, values, strict=False):
            yield from _pairs(part, value)


def _dense(value: Tensor) -> Tensor:
    return value.detach().to_dense() if value.layout != torch.strided else value.detach()
