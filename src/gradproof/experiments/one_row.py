"""Is every row the same row? Batches whose rows are all one array, kept by reference and changed later."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.provenance import forward_line, lines_behind, read
from gradproof.tape.operations import Line

ID = "aliasing-or-inplace/one-row"
FEWEST = 8  # rows of a batch
ENOUGH = 4  # batches
LONG = 5  # rows in a run, at least, where not all rows are the same
COLUMNS = 4096
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


def is_every_row_the_same(evidence: Evidence) -> Iterator[Verdict]:
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
        ID,
        f"in each of {len(recent)} taped batches {same}; it is another one in every batch, and the targets differ",
        where=place_of("", appending_line(line) or line),
        fix="keep a copy of what changes later: append(state.copy()), or .clone() of a tensor",
        confidence="proven" if last.runs == 1 else "likely",
        lasting=True,
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
