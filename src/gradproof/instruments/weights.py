"""What weighs how much in a step's gradient: every entry of a prediction, every term of the loss, every backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import KINDS, Flow
from gradproof.tape.operations import BackwardCall, Operation, Ref, references
from gradproof.tape.replay import differentiate

# where losses of torch keep what they do with their entries: 0 none, 1 mean, 2 sum
REDUCTION = {"nll_loss_forward": 3, "nll_loss2d_forward": 3, "binary_cross_entropy": 3}
REDUCTION |= {"binary_cross_entropy_with_logits": 4}
JOINS = {"stack", "cat"}
SUMS = JOINS | {"add", "sub"}
SCALES = {"mul", "div", "neg", "alias", "clone", "_to_copy", "view", "squeeze", "unsqueeze", "mean", "sum"}
ROUNDED = 1e-3  # of a whole number that was inverted twice: what rounding leaves


def pull(evidence: Evidence, slot: int) -> Tensor | None:
    """The gradient of the loss at each entry of a slot: zero where an entry does not count."""
    return differentiate(evidence.tape, gradients_at=[slot]).slot_gradients.get(slot)


# terms ------------------------------------------------------------------------------------------------------


@dataclass
class Term:
    """One summand of the loss: a reduction, and the constants it was multiplied with afterwards."""

    operation: Operation
    operand: tuple[int, ...]  # shape that was reduced
    mean: bool
    factors: list[float] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """What one entry of the operand counts."""
        return abs(math.prod(self.factors)) / (math.prod(self.operand) if self.mean else 1)

    def is_averaged_over(self, batch: int) -> bool:
        """By its own mean, or divided by a multiple of the batch."""
        times = [abs(1 / (f * batch)) for f in self.factors if f != 0]
        return self.mean or any(round(n) >= 1 and abs(n - round(n)) * batch < ROUNDED for n in times)


def take_apart(flow: Flow, root: int) -> list[Term]:
    """The summands of a scalar, each down to the operation that made it a scalar."""
    found: list[Term] = []
    waiting = [(root, [1.0])]
    while waiting and len(found) < 16:
        slot, factors = waiting.pop()
        op = flow.maker(slot)
        if op is None or flow.tape.slots[slot].shape not in ((), (1,)):
            continue
        refs = [arg.slot for arg in op.args if isinstance(arg, Ref)]
        numbers = [
            float(arg) for arg in op.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)
        ]
        if op.name in ("add", "sub") and len(refs) == 2:
            sign = -1.0 if op.name == "sub" else 1.0
            waiting += [(refs[0], factors), (refs[1], [*factors, sign * float(op.kwargs.get("alpha", 1))])]
        elif op.name in ("add", "neg", "view", "squeeze", "clone", "_to_copy", "alias") and refs:
            waiting.append((refs[0], factors))
        elif op.name in ("mul", "div") and len(refs) == 1 and numbers:
            number = numbers[0] if op.name == "mul" else 1 / numbers[0] if numbers[0] else 0.0
            waiting.append((refs[0], [*factors, number]))
        elif op.name in ("sum", "mean") or op.name in KINDS:
            found.append(Term(op, flow.tape.slots[refs[0]].shape, _is_mean(op), factors))
    return found


def _is_mean(op: Operation) -> bool:
    if op.name in ("sum", "mean"):
        return op.name == "mean"
    place = REDUCTION.get(op.name, 2)
    return place >= len(op.args) or op.args[place] == 1


# backwards --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walks:
    """The losses of a step that backward was called on: how often each counts, and who walked whose again."""

    times: list[int]
    again: list[tuple[BackwardCall, BackwardCall]]  # (earlier, later)


def count_walks(evidence: Evidence) -> Walks:
    """A later backward that reaches all that an earlier one began at, while its gradients stand, counts it again."""
    calls = [call for call in evidence.tape.top_backwards if _is_of_a_loss(evidence.flow, call)]
    begun = [terms_of(evidence.flow, call.roots[0]) for call in calls]
    found = Walks([1] * len(calls), [])
    oldest = 0  # of the backwards whose gradients still stand
    for later, call in enumerate(calls):
        reached = {slot for _, slot, _ in call.received}
        if later and not still_stands(evidence, calls[later - 1], call):
            oldest = later
        for earlier in range(oldest, later):
            # all of its terms: one that several losses share, such as a penalty, may be meant for each
            if begun[earlier] <= reached:
                found.times[earlier] += 1
                found.again.append((calls[earlier], call))
    return found


def have_passes_of_their_own(evidence: Evidence, calls: list[BackwardCall]) -> bool:
    """Whether no two of some backwards go through the same activation: micro-batches do not, terms of one pass do."""
    reached = [{slot for _, slot, _ in call.received} - evidence.flow.weights for call in calls]
    return sum(map(len, reached)) == len(set().union(*reached))


def _is_of_a_loss(flow: Flow, call: BackwardCall) -> bool:
    """From a single number; a backward that is itself differentiated goes through its forward again."""
    return (
        call.accumulates and not call.create_graph and len(call.roots) == 1 and _single(flow, call.roots[0])
    )


def terms_of(flow: Flow, root: int) -> set[int]:
    """The single numbers that a loss adds up, before they are divided or scaled."""
    found: set[int] = set()
    waiting, seen = [root], {root}
    while waiting:
        slot = waiting.pop()
        parts = _added_up(flow, slot)
        found.update(() if parts else (slot,))
        waiting += [part for part in parts if part not in seen]
        seen.update(parts)
    return found


def _added_up(flow: Flow, slot: int) -> list[int]:
    """What a number is the sum or a multiple of; nothing where that is more than single numbers, or lists of them."""
    maker = flow.maker(slot)
    parts = _tracked(maker)
    if maker is None or maker.name not in SCALES | SUMS or (maker.name in SCALES and len(parts) > 1):
        return []
    single = all(_single(flow, part) or _joins_single(flow, flow.maker(part)) for part in parts)
    return parts if single and (_single(flow, slot) or maker.name in JOINS) else []


def _joins_single(flow: Flow, maker: Operation | None) -> bool:
    return maker is not None and maker.name in JOINS and all(_single(flow, s) for s in _tracked(maker))


def _tracked(maker: Operation | None) -> list[int]:
    return [] if maker is None else [ref.slot for ref in references(maker.args) if ref.tracked]


def _single(flow: Flow, slot: int) -> bool:
    return math.prod(flow.tape.slots[slot].shape) == 1


def still_stands(evidence: Evidence, first: BackwardCall, second: BackwardCall) -> bool:
    """Whether the gradients of one backward are still there, to be added to, when another begins."""
    tape = evidence.tape
    if any(first.last <= at <= second.first for at in (*tape.cleared_at, *tape.stepped_at)):
        return False
    between = tape.operations[first.last : second.first]
    if any(first.roots[0] in op.writes and op.name not in ("add_", "sub_") for op in between):
        return False  # a loss that starts again in the same memory
    kept = {tape.slots[grad].storage for p, grad in first.stored.items() if second.stored.get(p) == grad}
    changed = {tape.slots[slot].storage for op in between if op.in_backward is None for slot in op.writes}
    return bool(kept - changed)
