"""Where the network ends and the loss begins: which values the loss compares with which targets.

The tail of a step are the operations behind the last one that used a weight; in it stand the comparisons.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradproof.tape.execute import converted
from gradproof.tape.operations import Line, ModuleCall, Operation, Ref, Tape, references
from gradproof.tape.replay import Player

# the same numbers, each once, in another shape
RESHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "alias", "transpose", "permute", "t"}
VIEWS = RESHAPES | {
    "expand", "clone", "contiguous", "_to_copy", "slice", "select", "lift_fresh", "detach", "flatten",
}  # fmt: skip
SOFTMAXES = {"_softmax", "_safe_softmax"}
ALIASES = VIEWS - {"clone", "contiguous", "_to_copy"}
KINDS = {
    "nll_loss_forward": "class", "nll_loss2d_forward": "class", "mse_loss": "value", "l1_loss": "value",
    "smooth_l1_loss": "value", "huber_loss": "value", "binary_cross_entropy": "binary",
    "binary_cross_entropy_with_logits": "binary",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """An operation of the loss that puts a prediction beside a target."""

    operation: Operation
    kind: str  # class, binary, value
    prediction: int
    target: int
    axis: int = 1  # of the prediction, along which its classes lie


class TooLong(Exception):
    """A question that would take more replaying than it is allowed."""


class Flow:
    """The forward operations that lead to the loss, and where in them the weights end."""

    def __init__(self, tape: Tape, forward: list[Operation]) -> None:
        self.tape = tape
        self.forward = forward
        self._reads: dict[int, list[int]] = {}
        self._makes: dict[int, list[int]] = {}
        self._touches: dict[int, list[int]] = {}
        self._left: float = math.inf  # operations that may still be gone through

    # the slots an operation names are looked for in its arguments: once is enough
    def reads(self, op: Operation) -> list[int]:
        if op.index not in self._reads:
            self._reads[op.index] = op.reads
        return self._reads[op.index]

    def makes(self, op: Operation) -> list[int]:
        if op.index not in self._makes:
            self._makes[op.index] = op.makes
        return self._makes[op.index]

    def touches(self, op: Operation) -> list[int]:
        """What an operation makes or changes; one with gradient that writes into a view changes all of its memory."""
        if not op.writes:
            return self.makes(op)
        if op.index not in self._touches:
            touched = [*self.makes(op), *op.writes]
            if any(ref.tracked for ref in references((op.args, op.kwargs))):
                storages = {self.tape.slots[slot].storage for slot in op.writes}
                touched += [slot for storage in storages for slot in self._sharing.get(storage, ())]
            self._touches[op.index] = touched
        return self._touches[op.index]

    @cached_property
    def _sharing(self) -> dict[int, list[int]]:
        """The slots that look into the same memory, where several do."""
        found: dict[int, list[int]] = {}
        for slot in self.tape.slots:
            found.setdefault(slot.storage, []).append(slot.index)
        return {storage: slots for storage, slots in found.items() if len(slots) > 1 and storage >= 0}

    @cached_property
    def towards_loss(self) -> set[int]:
        found = set(self.tape.loss_slots)
        for operation in reversed(self.forward):
            if not found.isdisjoint(self.touches(operation)):
                found.update(self.reads(operation))
        return found

    @cached_property
    def operations(self) -> list[Operation]:
        """Those that lead to the loss."""
        return [op for op in self.forward if not self.towards_loss.isdisjoint(self.touches(op))]

    def readers(self, slot: int) -> list[Operation]:
        """Who reads a slot on the way to the loss; whoever reads it twice, twice."""
        return self._readers.get(slot, [])

    @cached_property
    def _readers(self) -> dict[int, list[Operation]]:
        found: dict[int, list[Operation]] = {}
        for op in self.operations:
            for slot in self.reads(op):
                found.setdefault(slot, []).append(op)
        return found

    @cached_property
    def tracked(self) -> set[int]:
        """Slots that carry gradient, or that a hand-written Function makes of such: autograd sees only its ends."""
        found = {ref.slot for op in self.forward for ref in references((op.args, op.kwargs)) if ref.tracked}
        given = (references(call.args) for call in self.tape.functions)
        found |= {ref.slot for refs in given for ref in refs if ref.tracked}
        for op in self.forward:
            if op.call is not None and not found.isdisjoint(self.reads(op)):
                found.update(s for s in self.makes(op) if self.tape.slots[s].dtype.is_floating_point)
        return found | set(self.tape.loss_slots)

    @cached_property
    def weights(self) -> set[int]:
        """Parameters and what is made of nothing but parameters."""
        found = {slot.index for slot in self.tape.parameters}
        for operation in self.forward:
            reads = self.reads(operation)
            if reads and found.issuperset(reads):
                found.update(self.makes(operation))
        return found

    @cached_property
    def layers(self) -> list[Operation]:
        """Operations of the loss's path in which weights meet anything else; a single number is no weight."""
        slots = self.tape.slots
        return [
            op
            for op in self.operations
            if any(s in self.weights and _size(slots[s].shape) > 1 for s in self.reads(op))
            and not self.weights.issuperset(self.reads(op))
        ]

    @cached_property
    def body(self) -> set[int]:
        """Slots that lead to a layer."""
        layers = {op.index for op in self.layers}
        found: set[int] = set()
        for op in reversed(self.operations):
            if op.index in layers or not found.isdisjoint(self.touches(op)):
                found.update(self.reads(op))
        return found

    @cached_property
    def tail(self) -> set[int]:
        """Slots that carry gradient to the loss and meet no more weights on their way."""
        return (self.tracked & self.towards_loss) - self.body - self.weights

    @cached_property
    def inputs(self) -> list[int]:
        """The batch as the network is given it: what outermost modules are called with, or what layers read first."""
        outer: list[ModuleCall] = []
        for call in self.tape.modules:
            inside = any(other.first <= call.first and call.last <= other.last for other in outer)
            if not inside and self._leads_to_loss(call):  # a validation between two steps does not
                outer.append(call)
        given = [slot for call in outer for slot in call.inputs]
        given = (
            given if not self.body.isdisjoint(given) else [s for op in self.layers for s in self.reads(op)]
        )
        dense = {s for s in given if self.tape.slots[s].shape and not self.tape.slots[s].is_sparse}
        outside = (self.body & dense) - self.tracked - self.weights
        return [s for s in dict.fromkeys(given) if s in outside]

    def _leads_to_loss(self, call: ModuleCall) -> bool:
        places = self._places
        first = bisect_left(places, call.first)
        return first < len(places) and places[first] < call.last

    @cached_property
    def _places(self) -> list[int]:
        return [op.index for op in self.operations]

    @cached_property
    def predictions(self) -> list[int]:
        """What the loss is made of, whatever it is: where the last weights end."""
        made = [slot for op in self.layers for slot in self.makes(op)]
        return [slot for slot in dict.fromkeys(made) if slot in self.tail and self.tape.slots[slot].shape]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        return [found for op in self.operations if (found := self._comparison(op)) is not None]

    @cached_property
    def bytes_of_labels(self) -> set[int]:
        """Labels of a byte each, which the cross-entropy takes as numbers and an index would take for a mask."""
        slots = self.tape.slots
        return {
            c.target for c in self.comparisons if c.kind == "class" and slots[c.target].dtype == torch.uint8
        }

    def as_numbers(self, values: dict[int, Tensor]) -> dict[int, Tensor]:
        """Values of slots, labels among them wide enough to be counted, picked and indexed with."""
        return {slot: v.long() if slot in self.bytes_of_labels else v for slot, v in values.items()}

    @cached_property
    def picks(self) -> list[Operation]:
        """Where a loss by hand takes the entry of the right class: gather, or scores[rows, labels]."""
        ops = [op for op in self.operations if op.name in ("gather", "index") and self.makes(op)]
        return [op for op in ops if self.reads(op)[0] in self.tail and self.makes(op)[0] in self.tail]

    @cached_property
    def picked(self) -> list[Comparison]:
        """Those of them that take one class for each place, as comparisons."""
        return [found for op in self.picks if (found := self._picked(op)) is not None]

    def _picked(self, op: Operation) -> Comparison | None:
        scores = self.reads(op)[0]
        rank = len(self.tape.slots[scores].shape)
        if op.name == "gather":
            axis, labels = op.args[1] % rank, op.args[2]
        else:  # scores[rows, labels]
            indices = op.args[1]
            axis, labels = rank - 1, indices[-1] if len(indices) == rank else None
        if not isinstance(labels, Ref) or rank < 2:
            return None
        places = _size(self.tape.slots[scores].shape) // self.tape.slots[scores].shape[axis]
        one_each = _size(self.tape.slots[labels.slot].shape) == places
        return Comparison(op, "class", scores, labels.slot, axis) if one_each else None

    def _comparison(self, op: Operation) -> Comparison | None:
        pair = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
        if len(pair) != 2:
            return None
        first, second = pair
        if op.name in KINDS:
            swapped = first not in self.tracked and second in self.tracked
            return Comparison(op, KINDS[op.name], *((second, first) if swapped else (first, second)))
        if op.name not in ("sub", "rsub"):
            return None
        if second in self.tail and first not in self.tracked:
            first, second = second, first
        if first not in self.tail or second in self.tracked or second in self.weights:
            return None
        shapes = [self.tape.slots[slot].shape for slot in (first, second)]
        if _size(shapes[1]) < 2 or squeezed(shapes[0]) != squeezed(shapes[1]):
            return None  # the row maximum taken off a softmax, a mean
        return Comparison(op, "value", first, second)

    # -- walking -------------------------------------------------------------------------------------------------

    def maker(self, slot: int) -> Operation | None:
        made_by = self.tape.slots[slot].made_by
        return None if made_by is None else self.tape.operations[made_by]

    def chain(self, slot: int) -> Iterator[Operation]:
        """The operations behind a slot, the last first, each of which made the first operand of the one before."""
        while (maker := self.maker(slot)) is not None:
            yield maker
            if not self.reads(maker):
                return
            slot = self.reads(maker)[0]

    def follow(
        self, slot: int, *steps: Collection[str], through: Collection[str] = VIEWS
    ) -> Operation | None:
        """The last operation of a pattern, walked backwards: names of one operation a step, between them `through`.

        flow.follow(slot, {"exp"}, {"sub"})    # the difference whose exponential a slot is, seen through views
        """
        chain, found = self.chain(slot), None
        for names in steps:
            found = next((op for op in chain if op.name in names or op.name not in through), None)
            if found is None or found.name not in names:
                return None
        return found

    def is_learned(self, slot: int) -> bool:
        """Whether a parameter has a part in it: a teacher's answer, or an estimated return, is not data."""
        return not self.weights.isdisjoint(self.ancestors(slot))

    def value(self, slot: int) -> Tensor | None:
        """What a slot held when it was first read, if that can be replayed."""
        return self.values([slot]).get(slot)

    def last_write(self, slot: int, before: Operation) -> Operation | None:
        """The operation that a reader finds the result of: what made a value, or changed it in place since."""
        for op in reversed(self.tape.operations[: before.index]):
            if slot in self.makes(op) or slot in op.writes:
                return op
        return None

    def behind(self, slot: int, names: Iterable[str]) -> int:
        """The slot that some views and copies were made from."""
        maker = self.maker(slot)
        while maker is not None and maker.name in names and maker.args and isinstance(maker.args[0], Ref):
            slot = maker.args[0].slot
            maker = self.maker(slot)
        return slot

    def origin(self, slot: int, besides: Line | None = None) -> str | None:
        """Where a batch was cut out of its data (not at the line `besides`): `get_batch (train.py:40)`."""
        line = self.origin_line(slot, besides)
        return place_of_data(line) if line is not None else None

    def origin_line(self, slot: int, besides: Line | None = None) -> Line | None:
        for maker in self.chain(slot):
            index = self.reads(maker)[1:2] if maker.name.startswith("index") else []
            for op in (*(self.maker(chosen) for chosen in index), maker):
                if op is not None and op.line is not None and op.line != besides:
                    return op.line
        return besides

    def ancestors(self, slot: int) -> set[int]:
        """Every slot a slot was made from, itself included."""
        found = {slot}
        for op in reversed(self.forward):
            if not found.isdisjoint(self.touches(op)):
                found.update(self.reads(op))
        return found

    def written_until(self, slot: int) -> int | None:
        """The operation that last wrote into a slot's memory before anybody read it, as in filling a padded batch."""
        storage, last = self.tape.slots[slot].storage, None
        for op in self.forward:
            if any(self.tape.slots[s].storage == storage for s in op.writes):
                last = op.index
            elif slot in self.reads(op) and op.name not in ALIASES:
                break
        return last

    @contextmanager
    def at_most(self, operations: int) -> Iterator[None]:
        """For one question: what would take it over so many operations, all its replays together, is refused."""
        self._left = operations
        try:
            yield
        finally:
            self._left = math.inf

    def spend(self, operations: int) -> None:
        self._left -= operations
        if self._left < 0:
            raise TooLong

    def play(
        self,
        operations: list[Operation],
        leaves: Mapping[int, Tensor] | None = None,
        keep: Iterable[int] = (),
        after: Callable[[Player, Operation], None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Player:
        """Some operations again, with other values in some slots, put there when they would be complete."""
        self.spend(len(operations))
        leaves = leaves or {}
        late = {
            slot: max(at, self.tape.slots[slot].made_by or 0)  # a view may be taken after the last write
            for slot in leaves
            if (at := self.written_until(slot)) is not None
        }
        early = {slot: value for slot, value in leaves.items() if slot not in late}
        player = Player(self.tape, dtype, early, keep=keep)

        def before(player: Player, op: Operation) -> None:
            for slot in [slot for slot, at in late.items() if op.index > at]:
                player.env[slot] = converted(leaves[slot], dtype).clone()
                del late[slot]

        player.play(operations, before=before, after=after)
        return player

    @cached_property
    def fine(self) -> torch.dtype | None:
        """The precision of interventions: in half precision rounding would drown what they change."""
        return finer_than(self.tape, self.forward)

    def values(
        self,
        slots: Iterable[int],
        leaves: Mapping[int, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[int, Tensor]:
        """What some slots held when they were first read, replaying only the operations that they were made by."""
        wanted = list(slots)
        ends = {slot: at for slot in wanted if (at := self.written_until(slot)) is not None}
        needed = set(wanted)
        storages = {self.tape.slots[slot].storage: at for slot, at in ends.items()}
        chosen = []
        for op in reversed(self.forward):
            writes = any(op.index <= storages.get(self.tape.slots[slot].storage, -1) for slot in op.writes)
            if writes or not needed.isdisjoint(self.makes(op)):
                chosen.append(op)
                needed.update(self.reads(op))
                for slot in self.reads(op):
                    storages.setdefault(self.tape.slots[slot].storage, op.index)
        found: dict[int, Tensor] = {}

        def hold(player: Player, op: Operation) -> None:
            found.update(
                {slot: player.env[slot] for slot in self.makes(op) if slot in ends and slot in player.env}
            )

        player = self.play(chosen[::-1], leaves, keep=wanted, after=hold, dtype=dtype)
        return self.as_numbers({**player.replay.values, **found})


def finer_than(tape: Tape, operations: list[Operation]) -> torch.dtype | None:
    """float32 for a step that computes in half precision; None, its own, for any other."""
    made = (tape.slots[slot].dtype for operation in operations for slot in operation.makes)
    return torch.float32 if any(dtype in (torch.float16, torch.bfloat16) for dtype in made) else None


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its dimensions of one."""
    return tuple(length for length in shape if length != 1)


def place_of_data(line: Line) -> str:
    """Of data, the function it is made in says more than a module."""
    place = f"{line.file.rsplit('/', 1)[-1]}:{line.number}"
    return place if line.function.startswith("<") else f"{line.function} ({place})"


def with_line(name: str, line: str) -> str:
    """
    >>> with_line("fc1", "train.py:7"), with_line("fc1", "")
    ('fc1 (train.py:7)', 'fc1')
    """
    return f"{name} ({line})" if line else name


def place_of(module: str, line: Line | None) -> str | None:
    """For example `blocks.2.norm (model.py:41)`."""
    where = f"{line.file.rsplit('/', 1)[-1]}:{line.number}" if line else ""
    if module and where:
        return f"{module} ({where})"
    return module or where or None
