"""Do two things share memory? Stacks of one buffer or array, targets changed with inputs, two views that are one."""

from __future__ import annotations

import linecache
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, RESHAPES, VIEWS, Flow, place_of
from gradproof.instruments.hearing import CHANGED
from gradproof.instruments.source import forward_line
from gradproof.tape.operations import Line, ModuleCall, Operation, references

FEWEST = 6  # members of a stack that are one and the same memory
NEARLY_ALL = 0.9  # of the members: the first or the last of a loop may be made apart
JOINS = ("cat", "stack")
WHOLE = RESHAPES | {"detach"}  # all of a tensor, in the same memory
COMPARES = ("sub", "rsub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
CHANGES = (
    "mul_", "add_", "sub_", "div_", "index_put_", "masked_fill_", "copy_", "clamp_", "scatter_", "bernoulli_",
)  # fmt: skip


def do_two_things_share_memory(evidence: Evidence) -> Iterator[Verdict]:
    """A stack of one buffer is proof; so are two views that are one tensor; a target changed in place, a warning."""
    looks = (one_buffer, stacks_of_one_array, two_views_that_are_one, compared_with_itself)
    yield from causes_of(each(evidence, *looks))


def one_buffer(evidence: Evidence) -> Verdict | None:
    return stack_of_one_buffer(evidence) or target_changed_with_input(evidence)


def stack_of_one_buffer(evidence: Evidence) -> Verdict | None:
    """torch.stack of many entries that are the same memory: all show what was written last."""
    flow, tape = evidence.flow, evidence.tape
    for stack in (op for op in evidence.forward if op.name in JOINS):
        members = [ref.slot for ref in references(stack.args[0])]
        if len(members) < FEWEST:
            continue
        views = {s: (id(memory), view) for memory in tape.memories for s, view in memory.views.items()}
        same = Counter(place_in_memory(flow, views, slot) for slot in members).most_common(1)[0][1]
        first = flow.behind(members[0], WHOLE)
        writes = [op for op in flow.forward if op.index < stack.index and is_written(evidence, op, first)]
        # views that this step itself makes of one batch, to have it several times
        makers = [maker for slot in members if (maker := evidence.maker(slot)) is not None]
        given = tape.slots[first].made_by is None and tape.slots[first].kind in ("input", "outside")
        given = given and all(maker.name == "alias" for maker in makers)
        if same < NEARLY_ALL * len(members) or not (len(writes) >= 2 or given):
            continue
        # one sample may be meant many times
        one_sample = len(set(members)) == 1 and len(writes) < 2
        written = writes[-1].line if writes else stack.line
        return confirmed(
            "aliasing-or-inplace/one-buffer",
            f"{same} of the {len(members)} tensors that {stack.name} puts together are one memory: "
            "all hold what was written last",
            f"put together at {stack.line}" + (f", last written at {written}" if writes else ""),
            where=place_of(stack.module, handed_out(evidence, first, stack) or written),
            if_troubled=one_sample,
            confidence="likely" if one_sample else "proven",  # one memory
        )
    return None


def handed_out(evidence: Evidence, first: int, stack: Operation) -> Line | None:
    """The last line that makes a view of the buffer to be kept: there a clone() is missing."""
    storage, line = evidence.slot(first).storage, None
    for op in evidence.forward:
        kept = (
            op.name in WHOLE
            and not op.module
            and op.index < stack.index
            and op.line not in (None, stack.line)
        )
        if kept and storage >= 0 and any(evidence.slot(made).storage == storage for made in op.makes):
            line = op.line
    return line


def place_in_memory(flow: Flow, views: dict[int, tuple], slot: int) -> tuple:
    """Which memory, and which part of it: rows of one buffer are not the same place."""
    for maker in flow.chain(slot):
        if (
            maker.name == "alias" and len(maker.args) == 4
        ):  # recorded where a view had been made before the step
            first = flow.behind(slot, WHOLE)
            return (*views.get(first, (first,))[:1], maker.args[1:])
        if maker.name not in WHOLE or not maker.reads:
            return (slot,)
        slot = maker.reads[0]
    return views.get(slot, (slot,))


def is_written(evidence: Evidence, operation: Operation, slot: int) -> bool:
    storage = evidence.slot(slot).storage
    return storage >= 0 and any(evidence.slot(w).storage == storage for w in operation.writes)


def target_changed_with_input(evidence: Evidence) -> Verdict | None:
    """An operation in place whose result goes into the model, on memory that the loss compares with afterwards."""
    targets = [evidence.flow.behind(slot, WHOLE) for slot in compared_with(evidence)]
    for op in evidence.flow.forward:
        changed = op.name in CHANGES and not op.module and any(is_written(evidence, op, t) for t in targets)
        if changed and goes_into_model(evidence, op):
            return confirmed(
                "aliasing-or-inplace/target-changed",
                f"{op.name} changes in place what the loss compares with, and the model gets the result too",
                where=place_of(op.module, op.line),
                fix=f"use the operation without the underscore ({op.name.rstrip('_')}), or clone() first",
                level="warning",
                confidence="likely",
            )
    return None


def compared_with(evidence: Evidence) -> Iterator[int]:
    """What the loss compares predictions with: the operand without gradient, outside of all modules."""
    for operation in evidence.flow.forward:
        refs = list(references(operation.args)) if operation.name in COMPARES and not operation.module else []
        if len(refs) == 2 and refs[0].tracked != refs[1].tracked:
            yield refs[refs[0].tracked].slot


def goes_into_model(evidence: Evidence, change: Operation) -> bool:
    """Whether the changed memory is read on a way into a module, too."""
    reach = set(change.writes)
    for op in (op for op in evidence.flow.forward if op.index > change.index):
        if reach.isdisjoint(op.reads) and not any(is_written(evidence, change, slot) for slot in op.reads):
            continue
        if op.module:
            return True
        if not any(ref.tracked for ref in references((op.args, op.kwargs))):
            reach.update(op.makes)
    return False


# one array --------------------------------------------------------------------------------------------------

SHARES = re.compile(r"\b(from_numpy|as_tensor|from_dlpack|frombuffer)\s*\(")


def stacks_of_one_array(evidence: Evidence) -> Iterator[Verdict]:
    """stack of tensors that are one NumPy array: proof where the array was seen to change, else only a suspicion."""
    # a mask that stays may stand beside observations that do not
    for index, found in sorted(evidence.tape.one_arrays.items(), key=lambda item: -item[1].changed):
        operation = evidence.tape.operations[index]
        proven = True
        if found.changed:
            since = f"{found.changed} of them held something else when they were first read in this step"
        elif evidence.facts.arrays_changed:
            since = "the array has changed since it was first put together"
        else:
            since, proven = "the array was not seen to change", False
        yield confirmed(
            "aliasing-or-inplace/one-array",
            f"{found.count} of the {found.of} tensors that {operation.name} puts together are one NumPy array: "
            "all hold what was written last",
            f"put together at {operation.line}; {since}",
            where=where_made(evidence, operation)
            or line_that_shares(operation.line)
            or place_of(operation.module, operation.line),
            level="problem" if proven else "note",
            confidence="proven" if proven else "possible",
            lasting=proven,
        )
        return


def where_made(evidence: Evidence, stack: Operation) -> str | None:
    """The line that made a tensor of the array, if this step did."""
    storages = {evidence.slot(slot).storage for slot in stack.reads}
    for op in evidence.tape.operations[: stack.index]:
        if op.name == "lift_fresh" and evidence.slot(op.reads[0]).storage in storages:
            return place_of("", op.line)
    return None


def line_that_shares(line: Line | None) -> str | None:
    """Where the file makes tensors of arrays without a copy: the nearest above, or the only one."""
    if line is None:
        return None
    source = enumerate(linecache.getlines(line.file), 1)
    numbers = [n for n, text in source if SHARES.search(text.partition("#")[0])]
    above = [n for n in numbers if n <= line.number]
    number = above[-1] if above else numbers[0] if len(numbers) == 1 else None
    return f"{line.file.rsplit('/', 1)[-1]}:{number}" if number is not None else None


# two views --------------------------------------------------------------------------------------------------

PRODUCTS = ("mm", "bmm", "matmul", "baddbmm", "addmm", "_cdist_forward", "_euclidean_dist")
APART = ("sub", "mul", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "dot")
MOST = 12  # calls of modules from outside: a loop over time is no pair of views


@dataclass
class Pair:
    """Two views that one network is given, and its outputs: of the first (1), the second (2), or both ({1, 2})."""

    views: tuple[int, int]
    outputs: dict[int, set[int]]


def two_views_that_are_one(evidence: Evidence) -> Iterator[Verdict]:
    """One network, two passes, inputs and outputs the same, and a loss that compares the outputs with each other.

    One input given twice may be meant (dropout makes the difference); it is not where a line has written twice into
    its memory before, as an augmentation does, or where a loader brought two tensors.
    """
    for pair in pairs(evidence):
        one, two = (evidence.flow.behind(view, ALIASES) for view in pair.views)
        shared = one == two
        line = line_that_writes_twice(evidence, one) if shared else None
        outside = not shared and evidence.slot(one).made_by is None is evidence.slot(two).made_by
        if not (line or outside) or not is_compared(evidence, pair) or not gives_the_same(evidence, pair):
            continue
        if outside and not are_equal(evidence, *pair.views):
            continue
        said = "two tensors that the step is given are equal in every entry"
        if line is not None:
            said = f"line {line.number} writes twice into one tensor, and both views are that tensor"
        yield confirmed(
            "aliasing-or-inplace/one-view",
            f"the two views {list(evidence.slot(pair.views[0]).shape)} that the loss compares are one: {said}",
            "the network puts out the same for both: telling them apart from others can be learned without learning "
            "what the augmentation is to teach",
            where=place_of("", line or forward_line(evidence)),
            confidence="proven" if shared else "likely",
        )
        return


def pairs(evidence: Evidence) -> Iterator[Pair]:
    """Two calls of one module, or one call with two views in one batch."""
    slots = evidence.tape.slots
    calls = [c for c in outermost(evidence) if c.inputs and c.outputs]
    calls = calls if len(calls) <= MOST else []
    for one, two in combinations(calls, 2):
        views = one.inputs[0], two.inputs[0]
        alike = one.path == two.path and len(one.inputs) == len(two.inputs)
        if alike and slots[views[0]].shape == slots[views[1]].shape:
            yield Pair(views, {one.outputs[0]: {1}, two.outputs[0]: {2}})
    for call in calls:
        maker = evidence.maker(evidence.flow.behind(call.inputs[0], ALIASES))
        parts = maker.reads if maker is not None and maker.name in JOINS else []
        if len(parts) == 2 and slots[parts[0]].shape == slots[parts[1]].shape:
            yield Pair((parts[0], parts[1]), {call.outputs[0]: {1, 2}})


def outermost(evidence: Evidence) -> list[ModuleCall]:
    """Calls with gradient that are not inside another one."""
    found: list[ModuleCall] = []
    for call in evidence.tape.modules:
        inside = bool(found) and call.last <= found[-1].last
        ops = evidence.tape.operations[call.first : call.last]
        if not inside and ops and all(op.grad_enabled or op.call is not None for op in ops):
            found.append(call)
    return found


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
    views_of = dict(pair.outputs)  # what each slot is made of
    for op in evidence.flow.operations:
        reads = (slot for slot in evidence.flow.reads(op) if slot in views_of)
        seen = [views_of[slot] for slot in reads if is_large(evidence, slot)]
        together: set[int] = set().union(*seen)
        beside = op.name in PRODUCTS or (op.name in APART and seen[:1] != seen[1:2])
        if len(seen) > 1 and together == {1, 2} and beside:
            return True
        for place, slot in enumerate(op.makes if seen else ()):
            views_of.setdefault(slot, together & half_of(op, place) if together == {1, 2} else together)
    return False


def half_of(op: Operation, place: int) -> set[int]:
    """The views that a result has, of an operation that may take a batch of two apart again."""
    if op.name in ("split", "chunk", "split_with_sizes", "unbind") and len(op.makes) == 2:
        return {1 + place}
    if op.name == "slice" and len(op.args) >= 4 and op.args[1] == 0:
        begins, ends = op.args[2] or 0, op.args[3]
        return {2} if begins > 0 else {1} if isinstance(ends, int) and ends < 2**62 else {1, 2}
    return {1, 2}


def is_large(evidence: Evidence, slot: int) -> bool:
    return math.prod(evidence.slot(slot).shape) > 1


def gives_the_same(evidence: Evidence, pair: Pair) -> bool:
    """Whether the network's outputs for both views agree (to rounding) and differ among samples."""
    found = evidence.flow.values(pair.outputs)
    both = (
        torch.cat([found[slot] for slot in pair.outputs])
        if found.keys() >= set(pair.outputs)
        else torch.zeros(1)
    )
    if not both.dim() or not both.is_floating_point() or len(both) < 4:
        return False
    one, two = both[: len(both) // 2], both[len(both) // 2 :][: len(both) // 2]
    size = float(one.abs().max())
    differ = bool((one != one[:1]).any())
    return differ and size > 0 and float((one - two).abs().max()) <= CHANGED * size


def are_equal(evidence: Evidence, one: int, two: int) -> bool:
    found = evidence.flow.values([one, two])
    if one not in found or two not in found or not found[one].is_floating_point():
        return False
    return torch.equal(found[one], found[two]) and bool((found[one] != found[one].reshape(-1)[0]).any())


# one network for two ----------------------------------------------------------------------------------------

SOME = 4  # entries that are compared


def compared_with_itself(evidence: Evidence) -> Verdict | None:
    """A reference, teacher or target network that is the trained one: passed through twice, what both give is the same.

    exp(new - old) is what a policy's gradient is made of, and is 1 on purpose; so is x - x.detach() of one pass.
    """
    flow = evidence.flow
    parameters = {slot.index for slot in evidence.tape.parameters}
    ratios = {slot for op in flow.operations if op.name == "exp" for slot in flow.reads(op)}
    for op in flow.operations:
        pair = flow.reads(op)[:2] if op.name in COMPARES else []
        if len(pair) != 2 or flow.tail.isdisjoint(pair) or not ratios.isdisjoint(flow.makes(op)):
            continue
        learned, held = sorted(pair, key=lambda slot: slot not in flow.tracked)
        shape = evidence.slot(held).shape
        if learned not in flow.tracked or held in flow.tracked or math.prod(shape) < SOME:
            continue
        if flow.behind(learned, VIEWS) == flow.behind(held, VIEWS) or evidence.slot(learned).shape != shape:
            continue
        used = [flow.ancestors(slot) & parameters for slot in (learned, held)]
        found = flow.values([learned, held]) if used[0] and used[0] == used[1] else {}
        if len(found) == 2 and torch.equal(found[learned], found[held]) and bool(found[held].any()):
            return confirmed(
                "aliasing-or-inplace/compared-with-itself",
                f"{op.name} puts what the network gives beside what the very same {len(used[0])} parameters give "
                f"without gradient: all {math.prod(shape)} entries are equal, as they will be at every step",
                where=place_of(op.module, op.line),
                confidence="proven",  # the same tensors
            )
    return None
