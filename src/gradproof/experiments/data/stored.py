"""Do stored data stay as they were? Rows that are all one array; data, or parts of them, changed where they lie."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, place_of
from gradproof.instruments.source import forward_line, lines_behind, read
from gradproof.tape.operations import Line, Operation


def are_data_kept_as_they_were(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, rows_that_are_one, parts_that_are_changed, what_is_given_is_changed))


# rows -------------------------------------------------------------------------------------------------------

FEWEST = 8  # rows of a batch
ENOUGH = 4  # batches
LONG = 5  # rows in a run, at least, where not all rows are the same
COLUMNS = 4096  # of a row, spread over it: rows that agree in them are one
REPEATS = ("repeat", "tile", "expand", "full", "ones", "zeros", "broadcast")


@dataclass(frozen=True)
class Rows:
    """What is remembered of one step's batch."""

    count: int
    runs: int  # of rows that equal the one before
    shortest: int  # of the runs
    distinct: int
    first: tuple[float, ...]
    answers_differ: bool  # other data of these rows differ inside of the runs


def rows_that_are_one(evidence: Evidence) -> Iterator[Verdict]:
    """A list of references to one array that an environment goes on changing: all entries show what it held last."""
    seen: list[Rows] = evidence.memory.setdefault("rows", [])
    slot = largest_input(evidence)
    if slot is None or len(seen) >= 4 * ENOUGH:
        return
    if len(seen) >= ENOUGH and not any(is_repeated(rows) for rows in seen):
        return  # such a list would have shown from the first batch on
    seen.append(look_at_rows(evidence, slot))
    recent = seen[-ENOUGH:]
    if len(recent) < ENOUGH or not all(is_repeated(rows) and rows.answers_differ for rows in recent):
        return
    if len({rows.first for rows in recent}) < ENOUGH or is_repeated_on_purpose(evidence, slot):
        return
    last = recent[-1]
    same = (
        f"all {last.count} rows are one and the same"
        if last.runs == 1
        else f"{last.count} rows are {last.runs} different ones, each at least {last.shortest} times in a row"
    )
    line = forward_line(evidence)
    yield confirmed(
        "aliasing-or-inplace/one-row",
        f"in each of {len(recent)} taped batches {same}; it is another one in every batch, and the targets differ",
        where=place_of("", appending_line(line) or line),
        confidence="proven" if last.runs == 1 else "likely",
    )


def largest_input(evidence: Evidence) -> int | None:
    shapes = {s: evidence.slot(s).shape for s in evidence.flow.inputs}
    whole = {s: shape for s, shape in shapes.items() if len(shape) >= 2 and shape[0] >= FEWEST}
    return max(whole, key=lambda s: math.prod(whole[s])) if whole else None


def look_at_rows(evidence: Evidence, slot: int) -> Rows:
    """The inputs side by side: a sample that differs in any of them is another one."""
    flow, count = evidence.flow, evidence.slot(slot).shape[0]
    beside = [s for s in flow.inputs if evidence.slot(s).shape[0] == count][:4]
    found = flow.values(beside)
    rows = torch.cat([as_rows(found[s], count) for s in beside if s in found], 1)
    changes = (rows[1:] != rows[:-1]).any(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), changes.cpu().nonzero().flatten() + 1])
    shortest = int(torch.diff(starts, append=torch.tensor([count])).min())
    suspicious = shortest >= LONG
    distinct = len(torch.unique(rows[starts.to(rows.device)], dim=0)) if suspicious else len(starts)
    differ = suspicious and do_answers_differ(evidence, beside, count, changes.cpu())
    return Rows(count, len(starts), shortest, distinct, tuple(rows[0, :64].tolist()), differ)


def as_rows(value: Tensor, count: int) -> Tensor:
    flat = value.detach().reshape(count, -1)
    return torch.nan_to_num(flat[:, :: max(1, flat.shape[1] // COLUMNS)].double())


def do_answers_differ(evidence: Evidence, inputs: list[int], count: int, changes: Tensor) -> bool:
    """Whether anything else that the loss is given, one entry a row, changes where the inputs do not."""
    behind = {s for slot in inputs for s in evidence.flow.ancestors(slot)}
    for leaf in evidence.tape.inputs:
        known = leaf.index in evidence.tape.memory_of and leaf.index in evidence.flow.towards_loss
        if not known or leaf.index in behind or leaf.shape[:1] != (count,):
            continue
        rows = as_rows(evidence.tape.leaf_value(leaf.index), count)
        if bool(((rows[1:] != rows[:-1]).any(1).cpu() & ~changes).any()):
            return True
    return False


def is_repeated(rows: Rows) -> bool:
    if rows.runs == 1:
        return True
    return rows.shortest >= LONG and rows.runs >= 3 and rows.distinct == rows.runs


def is_repeated_on_purpose(evidence: Evidence, slot: int) -> bool:
    """One row repeated by an operation of the step, or by a call that the source names."""
    behind = evidence.flow.ancestors(slot)
    if any(op.name in REPEATS and not behind.isdisjoint(op.makes) for op in evidence.flow.forward):
        return True
    line = forward_line(evidence)
    if line is None:
        return False
    lines = read(line.file).tree
    named = {*lines_behind(line), line.number}
    calls = [n for n in ast.walk(lines) if isinstance(n, ast.Call) and n.lineno in named]
    return any(word in ast.unparse(call.func) for call in calls for word in REPEATS)


def appending_line(line: Line | None) -> Line | None:
    """The first `rows.append(row)` of a list that the lines behind a batch put together."""
    if line is None:
        return None
    tree, behind = read(line.file).tree, {*lines_behind(line), line.number}
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno in behind]
    names = {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            kept = node.args[0] if node.args else None
            listed = isinstance(node.func.value, ast.Name) and node.func.value.id in names
            if listed and isinstance(kept, (ast.Name, ast.Tuple, ast.Attribute)):
                return Line(line.file, node.lineno, line.function)
    return None


# parts ------------------------------------------------------------------------------------------------------

# what goes by the old value; a buffer that is overwritten may be meant so
ALTERS = (
    "add_",
    "sub_",
    "mul_",
    "div_",
    "masked_fill_",
    "clamp_",
    "clamp_min_",
    "index_add_",
    "scatter_add_",
)
CUTS = ALIASES | {"narrow", "unbind", "split"}
TIMES = 3  # steps that have written where an earlier one had
LOOK_AT = 4096  # entries of the data, to know them again
SAME = 0.3  # of these unchanged from one taped step to the next: the same data


@dataclass
class Data:
    """What is known of one tensor that batches are cut from."""

    entries: Tensor
    written: Tensor  # whether each entry was, at some taped step
    again: int = 0  # steps that have written to what was written before


def parts_that_are_changed(evidence: Evidence) -> Iterator[Verdict]:
    """`x = data[i:j]; x += noise`: a batch that is a view of the data, changed in place, and again when it is back."""
    known: dict[tuple, Data] = evidence.memory.setdefault("drift", {})
    done: set[int] = set()
    for op, leaf, part in writes_into_data(evidence):
        if leaf in done:
            continue
        done.add(leaf)
        shape = evidence.slot(leaf).shape
        entries = evidence.tape.leaf_value(leaf).flatten()
        entries = entries[:: max(1, len(entries) // LOOK_AT)].clone()
        data = known.get(shape)
        if data is None or float((data.entries == entries).double().mean()) < SAME:
            data = known[shape] = Data(entries, torch.zeros(math.prod(shape), dtype=torch.bool))
        data.entries = entries
        data.again += bool(data.written[part].any())
        data.written[part] = True
        if data.again >= TIMES:
            yield confirmed(
                "aliasing-or-inplace/stored-data-changed",
                f"{op.name} changes a part of the {list(shape)} that batches are cut from, on its way into the model; "
                f"{data.again} of the taped steps changed what an earlier one had changed: the data drift away",
                where=place_of(op.module, op.line),
                confidence="proven",  # written into the memory of the data
            )
            return


def writes_into_data(evidence: Evidence) -> Iterator[tuple[Operation, int, Tensor]]:
    """(operation, the data, which of their entries) where a part of a leaf is changed and then given to the model."""
    flow, tape = evidence.flow, evidence.tape
    storages = {
        leaf.storage: leaf.index for leaf in tape.inputs if leaf.shape and leaf.index in tape.memory_of
    }
    writers = [op for op in evidence.forward if op.name in ALTERS and not op.module and op.writes]
    writers = [op for op in writers if evidence.slot(op.writes[0]).storage in storages]
    if not writers:
        return
    given = {evidence.slot(s).storage for slot in flow.inputs for s in flow.ancestors(slot)}
    for op in writers:
        slot = evidence.slot(op.writes[0])
        leaf = flow.behind(slot.index, CUTS)
        whole = evidence.slot(leaf).shape
        if (
            leaf != storages[slot.storage]
            or slot.storage not in given
            or not whole[0] > slot_rows(slot.shape, whole)
        ):
            continue
        if not is_written_by_the_network(evidence, slot.storage):
            yield op, leaf, entries_of(evidence, slot.index, leaf)


# the whole --------------------------------------------------------------------------------------------------

CARRIED = 3  # taped steps in a row that began with what the one before had left
LIKE = 0.8  # correlation of what a step left and what the next one was given; batches that were drawn anew have less


@dataclass
class Given:
    """What one tensor held before and after a step, and at how many steps it began with what was left in it."""

    before: Tensor
    after: Tensor
    carried: int = 0


def what_is_given_is_changed(evidence: Evidence) -> Iterator[Verdict]:
    """`out = x; out.index_add_(...)` in a forward: the script's own data are what the last step made of them."""
    known: dict[tuple[int, ...], Given] = evidence.memory.setdefault("given", {})
    tape, flow = evidence.tape, evidence.flow
    batch = largest_input(evidence)  # a table of counts, or of weights, may be kept on purpose
    slot = evidence.slot(batch) if batch in tape.memory_of else None  # a leaf: the script holds it
    if batch is None or slot is None or is_written_by_the_network(evidence, slot.storage):
        return
    writers = (op for op in evidence.forward if op.name in ALTERS and op.writes)
    written = (op for op in writers if evidence.slot(op.writes[0]).storage == slot.storage)
    op = next((op for op in written if evidence.slot(op.writes[0]).shape == slot.shape), None)
    if op is None:
        return
    before, after = tape.leaf_value(batch), flow.play(evidence.forward).value(batch).detach()
    last = known.get(slot.shape)
    now = known[slot.shape] = Given(before.double().flatten().cpu(), after.double().flatten().cpu())
    if last is None or torch.equal(now.before, last.before):
        return
    now.carried = last.carried + 1 if like(now.before, last.after) else 0
    if now.carried >= CARRIED:
        sizes = [float(each.before.abs().mean()) for each in (last, now)]
        yield confirmed(
            "aliasing-or-inplace/stored-data-changed",
            f"{op.name} changes the {list(slot.shape)} that the model is given where they lie, and the next step "
            f"begins with what it left: their mean size went from {sizes[0]:.3g} to {sizes[1]:.3g}",
            where=place_of(op.module, op.line),
            confidence="proven",  # written into the memory of the data, and read again
        )


def like(one: Tensor, other: Tensor) -> bool:
    """Whether two follow each other, whatever their sizes; what is not finite is what became of something."""
    pair = torch.stack([one, other])
    size = pair.abs().amax(1, keepdim=True)
    if not bool(torch.isfinite(pair).all()) or not bool((size > 0).all()):
        return False
    return float(torch.corrcoef(pair / size)[0, 1]) >= LIKE


def is_written_by_the_network(evidence: Evidence, storage: int) -> bool:
    """What a network computed and keeps: a memory, a state, prototypes that follow it."""
    flow = evidence.flow
    for op in evidence.forward:
        if any(evidence.slot(s).storage == storage for s in op.writes):
            others = [s for s in op.reads if evidence.slot(s).storage != storage]
            if any(not flow.weights.isdisjoint(flow.ancestors(other)) for other in others):
                return True
    return False


def slot_rows(shape: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """How many rows of the whole a part has; one that lost an axis is a single row."""
    return shape[0] if len(shape) == len(whole) else 1


def entries_of(evidence: Evidence, slot: int, leaf: int) -> Tensor:
    """Which entries of the whole a part holds: the cuts between them, made in their numbers."""
    cuts: list[tuple[Operation, int]] = []
    while slot != leaf:
        maker = evidence.maker(slot)
        assert maker is not None
        cuts.append((maker, maker.makes.index(slot)))
        slot = maker.reads[0]
    shape = evidence.slot(leaf).shape
    numbers: Tensor = torch.arange(math.prod(shape)).view(shape)
    for op, place in reversed(cuts):
        cut = op.func(numbers, *op.args[1:], **op.kwargs)
        numbers = cut if isinstance(cut, Tensor) else cut[place]
    return numbers.flatten()
