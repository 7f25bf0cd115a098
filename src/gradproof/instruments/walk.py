"""One walker over the graph of a step: back to what made a slot, on to who reads it, as far as a pattern goes.

A pattern is a set of names of operations that a walk goes through, or a predicate on them.

    next((op for op in back(flow, slot, VIEWS) if op.name == "_softmax"), None)   # the softmax that it is a view of
    any(op.name == "exp" for op in ahead(flow, [slot], VIEWS | {"sum"}))          # does it go into an exponential?
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator

from torch import Tensor

from gradproof.instruments.flow import RESHAPES, Flow
from gradproof.tape.operations import Operation, Ref, references

RESHAPED = {"view", "_unsafe_view", "reshape"}
CUTS = RESHAPES | {"slice", "select", "narrow"}
Pattern = Container[str] | Callable[[Operation], bool]


def goes_through(through: Pattern, op: Operation) -> bool:
    return through(op) if callable(through) else op.name in through


def anything(op: Operation) -> bool:
    """To go through every operation."""
    return True


def operands(op: Operation, count: int = 2) -> list[int]:
    """The tensors among the first arguments."""
    return [arg.slot for arg in op.args[:count] if isinstance(arg, Ref)]


def tracked(op: Operation) -> list[int]:
    """The tensors, wherever in its arguments, that carry gradient into an operation."""
    return [ref.slot for ref in references((op.args, op.kwargs)) if ref.tracked]


def back(flow: Flow, slot: int, through: Pattern) -> Iterator[Operation]:
    """What made a slot, what made the first operand of that, and so on: to the first that is not gone through."""
    for op in flow.chain(slot):
        yield op
        if not goes_through(through, op):
            return


def behind(
    flow: Flow, slots: Iterable[int], onwards: Callable[[Operation], Iterable[int]]
) -> Iterator[Operation]:
    """Everything that made some slots, each operation once, the nearest first; `onwards` says by which operands."""
    waiting, seen = deque(slots), set[int]()
    while waiting:
        op = flow.maker(waiting.popleft())
        if op is not None and op.index not in seen:
            seen.add(op.index)
            yield op
            waiting += onwards(op)


def ahead(
    flow: Flow, slots: Iterable[int], through: Pattern, within: Iterable[Operation] = ()
) -> Iterator[Operation]:
    """Who reads some slots, or what was made of them by operations that are gone through, in their order."""
    reach = set(slots)
    for op in within or flow.forward:
        if not reach.isdisjoint(flow.reads(op)):
            yield op
            if goes_through(through, op):
                reach.update((*flow.makes(op), *op.writes))


def users(flow: Flow, slots: Iterable[int], through: Pattern) -> list[Operation]:
    """Who reads some slots on the way to the loss, or what they are turned into by operations that are gone through."""
    return [op for op in ahead(flow, slots, through, flow.operations) if not goes_through(through, op)]


def carry(flow: Flow, path: Iterable[Operation], numbers: Tensor) -> Tensor:
    """What views and cuts on a path do to numbers that stand for places; other operations leave them where they are."""
    for op in path:
        if op.name in RESHAPED:
            numbers = numbers.reshape(flow.tape.slots[flow.makes(op)[0]].shape)
        elif op.name in CUTS:
            numbers = op.func(numbers, *op.args[1:], **op.kwargs)
    return numbers
