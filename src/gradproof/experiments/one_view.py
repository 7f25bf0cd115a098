"""Are two views one tensor? An augmentation that works in place returns what it was given, twice the same memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import ALIASES
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.provenance import forward_line
from gradproof.tape.operations import Line, ModuleCall, Operation, references

COMPARES = ("mm", "bmm", "matmul", "baddbmm", "addmm", "_cdist_forward", "_euclidean_dist")
APART = ("sub", "mul", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "dot")
JOINS = ("cat", "stack")
MOST = 12  # calls of modules from outside: a loop over time is no pair of views
TIMES = 2  # steps in which two batches from a loader are one and the same


@dataclass
class Pair:
    """Two halves of what a network puts out that come from two views: slots of the first, the second, and of both."""

    first: set[int]
    second: set[int]
    joint: set[int]
    views: tuple[int, int]  # the tensors that were given to the network
    outputs: tuple[int, ...]  # two, or one that holds both


def are_two_views_one(evidence: Evidence) -> Iterator[Verdict]:
    """One network, two passes, inputs and outputs the same, and a loss that compares the outputs with each other.

    One input given twice may be meant (dropout makes the difference); it is not where a line has written twice into
    its memory before, as an augmentation does, or where a loader brought two tensors.
    """
    for pair in pairs(evidence):
        one, two = pair.views
        shared = is_same_memory(evidence, one, two)
        line = line_that_writes_twice(evidence, one) if shared else None
        if shared and line is None:
            continue
        if not is_compared(evidence, pair) or not gives_the_same(evidence, pair):
            continue
        if shared:
            said = (
                f"line {line.number} writes twice into one tensor, and both views are that tensor"
                if line
                else ""
            )
        elif is_from_outside(evidence, one) and is_from_outside(evidence, two):
            if not are_equal(evidence, one, two) or not seen_often(evidence):
                continue
            said = "two tensors that the step is given are equal in every entry"
        else:
            continue
        place = line or forward_line(evidence)
        shape = list(evidence.slot(one).shape)
        yield confirmed(
            "aliasing-or-inplace/one-view",
            f"the two views {shape} that the loss compares are one: {said}",
            "the network puts out the same for both: telling them apart from others can be learned without learning "
            "what the augmentation is to teach",
            where=place_of("", place),
            fix="let the augmentation make a new tensor: x = x + noise in place of x += noise, or x = x.clone() first",
            confidence="proven" if shared else "likely",
            lasting=True,
        )
        return


def pairs(evidence: Evidence) -> Iterator[Pair]:
    """Two calls of one module, or one call with two views in one batch."""
    calls = [c for c in outermost(evidence) if len(c.inputs) >= 1 and c.outputs]
    for place, one in enumerate(calls if len(calls) <= MOST else ()):
        for two in calls[place + 1 :]:
            if one.path != two.path or len(one.inputs) != len(two.inputs):
                continue
            views = one.inputs[0], two.inputs[0]
            if evidence.slot(views[0]).shape == evidence.slot(views[1]).shape:
                ends = one.outputs[0], two.outputs[0]
                yield Pair({ends[0]}, {ends[1]}, set(), views, ends)
        maker = evidence.maker(evidence.flow.behind(one.inputs[0], ALIASES))
        refs = list(references(maker.args)) if maker is not None and maker.name in JOINS else []
        if len(refs) == 2 and evidence.slot(refs[0].slot).shape == evidence.slot(refs[1].slot).shape:
            yield Pair(set(), set(), {one.outputs[0]}, (refs[0].slot, refs[1].slot), (one.outputs[0],))


def outermost(evidence: Evidence) -> list[ModuleCall]:
    """Calls with gradient that are not inside another one."""
    found: list[ModuleCall] = []
    for call in evidence.tape.modules:
        inside = bool(found) and call.last <= found[-1].last
        ops = evidence.tape.operations[call.first : call.last]
        if not inside and ops and all(op.grad_enabled or op.call is not None for op in ops):
            found.append(call)
    return found


def is_same_memory(evidence: Evidence, one: int, two: int) -> bool:
    behind = evidence.flow.behind
    return one == two or behind(one, ALIASES) == behind(two, ALIASES)


def line_that_writes_twice(evidence: Evidence, view: int) -> Line | None:
    """The first line that writes into a tensor's memory two times, each time into the same part of it."""
    storage = evidence.slot(view).storage
    seen: dict[tuple, Operation] = {}
    for op in evidence.forward:
        for slot in op.writes:
            if op.line is None or evidence.slot(slot).storage != storage:
                continue
            key = (op.line.file, op.line.number, op.name, evidence.slot(slot).shape)
            if key in seen and op.index != seen[key].index:
                return op.line
            seen[key] = op
    return None


def is_compared(evidence: Evidence, pair: Pair) -> bool:
    """Whether the loss puts one half beside the other, entry by entry or row by row."""
    first, second, joint = set(pair.first), set(pair.second), set(pair.joint)
    start = min(evidence.slot(slot).made_by or 0 for slot in pair.outputs)
    for op in evidence.flow.operations:
        if op.index < start:
            continue
        refs = [ref.slot for ref in references((op.args, op.kwargs)) if is_large(evidence, ref.slot)]
        ones, twos = [s for s in refs if s in first], [s for s in refs if s in second]
        both = [s for s in refs if s in joint]
        if ones and twos and op.name in (*COMPARES, *APART):
            return True
        if len(both) >= 2 and op.name in COMPARES:
            return True
        made = [slot for slot in op.makes if slot not in first | second | joint]
        if both or (ones and twos):
            halves = half_of(op) if both else None
            if halves is None:
                joint.update(made)
            elif halves == "both":
                first.update(made[:1])
                second.update(made[1:])
            else:
                (first if halves == "first" else second).update(made)
        elif ones:
            first.update(made)
        elif twos:
            second.update(made)
    return False


def half_of(op: Operation) -> str | None:
    """Whether an operation takes a batch of two views apart again."""
    if op.name in ("split", "chunk", "split_with_sizes", "unbind") and len(op.makes) == 2:
        return "both"
    if op.name == "slice" and len(op.args) >= 4 and op.args[1] == 0:
        begins, ends = op.args[2] or 0, op.args[3]
        if begins == 0 and isinstance(ends, int) and ends < 2**62:
            return "first"
        if isinstance(begins, int) and begins > 0:
            return "second"
    return None


def is_large(evidence: Evidence, slot: int) -> bool:
    return math.prod(evidence.slot(slot).shape) > 1


def gives_the_same(evidence: Evidence, pair: Pair) -> bool:
    """Whether the network's outputs for both views agree (to rounding) and differ among samples."""
    found = evidence.flow.values(pair.outputs)
    if any(slot not in found for slot in pair.outputs):
        return False
    values = [found[slot] for slot in pair.outputs]
    one, two = values if len(values) == 2 else halves(values[0])
    if one.shape != two.shape or not one.is_floating_point() or one.shape[:1] in ((), (1,)):
        return False
    size = float(one.abs().max())
    differ = bool((one != one[:1]).any())
    return differ and size > 0 and float((one - two).abs().max()) <= 1e-5 * size


def halves(value: Tensor) -> tuple[Tensor, Tensor]:
    count = value.shape[0] // 2 if value.dim() else 0
    return (value[:count], value[count : 2 * count]) if count else (value, value.new_zeros(0))


def is_from_outside(evidence: Evidence, slot: int) -> bool:
    """A tensor that the step was given, not one that it made."""
    return evidence.slot(evidence.flow.behind(slot, ALIASES)).made_by is None


def are_equal(evidence: Evidence, one: int, two: int) -> bool:
    found = evidence.flow.values([one, two])
    if one not in found or two not in found or not found[one].is_floating_point():
        return False
    return torch.equal(found[one], found[two]) and bool((found[one] != found[one].reshape(-1)[0]).any())


def seen_often(evidence: Evidence) -> bool:
    count = evidence.memory.setdefault("one view", [0])
    count[0] += 1
    return count[0] >= TIMES
