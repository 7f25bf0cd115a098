"""Do stored data stay as they were? Rows that are all one array; data, or parts of them, changed where they lie."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, Flow, place_of
from gradproof.instruments.ledger import Batch, remember_batch
from gradproof.instruments.source import forward_line, lines_behind, read
from gradproof.tape.operations import Line, Operation

FEWEST = 8  # rows of a batch
ENOUGH = 4  # batches
LONG = 5  # rows in a run, at least, where not all rows are the same
REPEATS = ("repeat", "tile", "expand", "full", "ones", "zeros", "broadcast")


def are_data_kept_as_they_were(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, rows_that_are_one, parts_that_are_changed, what_is_given_is_changed))


# rows -------------------------------------------------------------------------------------------------------


def rows_that_are_one(evidence: Evidence) -> Iterator[Verdict]:
    """A list of references to one array that an environment goes on changing: all entries show what it held last."""
    known: list[Batch] = evidence.memory.get("batches", [])
    if len(known) >= ENOUGH and not any(is_repeated(batch) for batch in known):
        return  # such a list would have shown from the first batch on
    slot = largest_input(evidence)
    recent = (remember_batch(evidence) or [])[-ENOUGH:] if slot is not None else []
    if (
        slot is None
        or len(recent) < ENOUGH
        or not all(is_repeated(b) and do_answers_differ(b) for b in recent)
    ):
        return
    if len({batch.prints[0] for batch in recent}) < ENOUGH or is_repeated_on_purpose(evidence, slot):
        return
    lengths, line = runs_of(recent[-1]), forward_line(evidence)
    same = f"all {lengths.sum()} rows are one and the same"
    if len(lengths) > 1:
        same = f"{lengths.sum()} rows are {len(lengths)} different ones, each at least {lengths.min()} times in a row"
    yield confirmed(
        "aliasing-or-inplace/one-row",
        f"in each of {len(recent)} taped batches {same}; it is another one in every batch, and the targets differ",
        where=place_of("", appending_line(line) or line),
        confidence="proven" if len(lengths) == 1 else "likely",
    )


def largest_input(evidence: Evidence) -> int | None:
    shapes = {s: evidence.slot(s).shape for s in evidence.flow.inputs}
    whole = {s: shape for s, shape in shapes.items() if len(shape) >= 2 and shape[0] >= FEWEST}
    return max(whole, key=lambda s: math.prod(whole[s])) if whole else None


def runs_of(batch: Batch) -> np.ndarray:
    """How many rows in a row are the same, for each run of them."""
    starts = np.flatnonzero(np.diff(batch.prints, prepend=np.nan) != 0)
    return np.diff(starts, append=len(batch.prints))


def is_repeated(batch: Batch) -> bool:
    lengths = runs_of(batch)
    distinct = len(np.unique(batch.prints)) == len(lengths) >= 3
    return len(batch.prints) >= FEWEST and (len(lengths) == 1 or (distinct and lengths.min() >= LONG))


def do_answers_differ(batch: Batch) -> bool:
    """Whether anything else that the loss is given, one entry a row, changes where the inputs do not."""
    stays = np.diff(batch.prints) == 0
    return any(bool(((np.diff(other) != 0) & stays).any()) for other in batch.beside)


def is_repeated_on_purpose(evidence: Evidence, slot: int) -> bool:
    """One row repeated by an operation of the step, or by a call that the source names."""
    behind = evidence.flow.ancestors(slot)
    if any(op.name in REPEATS and not behind.isdisjoint(op.makes) for op in evidence.flow.forward):
        return True
    line = forward_line(evidence)
    named = {*lines_behind(line), line.number} if line is not None else set()
    nodes = ast.walk(read(line.file).tree) if line is not None else ()
    calls = [ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call) and n.lineno in named]
    return any(word in call for call in calls for word in REPEATS)


def appending_line(line: Line | None) -> Line | None:
    """The first `rows.append(row)` of a list that the lines behind a batch put together."""
    if line is None:
        return None
    tree, behind = read(line.file).tree, {*lines_behind(line), line.number}
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno in behind]
    names = {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="append", value=ast.Name(id=listed)),
                args=[ast.Name() | ast.Tuple() | ast.Attribute(), *_],
            ) if listed in names:
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
    # of the writes into one tensor, the first
    found = {leaf: (op, part) for op, leaf, part in reversed([*writes_into_data(evidence)])}
    for leaf, (op, part) in reversed(found.items()):
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
    leaves = {s.storage: s.index for s in tape.inputs if s.shape and s.index in tape.memory_of}
    writers = [
        op for op in alterations(evidence) if not op.module and tape.slots[op.writes[0]].storage in leaves
    ]
    given = (
        {tape.slots[s].storage for slot in flow.inputs for s in flow.ancestors(slot)} if writers else set()
    )
    for op in writers:
        slot = tape.slots[op.writes[0]]
        leaf = flow.behind(slot.index, CUTS)
        whole = tape.slots[leaf].shape
        # one that lost an axis is a single row
        rows = slot.shape[0] if len(slot.shape) == len(whole) else 1
        part = leaf == leaves[slot.storage] and rows < whole[0] and slot.storage in given
        if part and not is_written_by_the_network(evidence, slot.storage):
            yield op, leaf, entries_of(flow, slot.index, leaf)


def alterations(evidence: Evidence) -> list[Operation]:
    return [op for op in evidence.flow.forward if op.name in ALTERS and op.writes]


def is_written_by_the_network(evidence: Evidence, storage: int) -> bool:
    """What a network computed and keeps: a memory, a state, prototypes that follow it."""
    writers = [
        op for op in evidence.flow.forward if any(evidence.slot(s).storage == storage for s in op.writes)
    ]
    read = {slot for op in writers for slot in op.reads if evidence.slot(slot).storage != storage}
    return any(evidence.flow.is_learned(slot) for slot in read)


def entries_of(flow: Flow, slot: int, leaf: int) -> Tensor:
    """Which entries of the whole a part holds: the cuts between them, made in their numbers."""
    cuts: list[tuple[Operation, int]] = []
    for op in flow.chain(slot):
        if slot == leaf:
            break
        cuts.append((op, op.makes.index(slot)))
        slot = op.reads[0]
    shape = flow.tape.slots[leaf].shape
    numbers: Tensor = torch.arange(math.prod(shape)).view(shape)
    for op, place in reversed(cuts):
        cut = op.func(numbers, *op.args[1:], **op.kwargs)
        numbers = cut if isinstance(cut, Tensor) else cut[place]
    return numbers.flatten()


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
    written = ((op, evidence.slot(op.writes[0])) for op in alterations(evidence))
    op = next((op for op, w in written if w.storage == slot.storage and w.shape == slot.shape), None)
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
