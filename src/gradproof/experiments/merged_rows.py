"""Have neighbours become one? A table of features of the hour, made of an arange in bfloat16, has runs of equal rows.

bfloat16 knows every whole number up to 256, float16 up to 2048; beyond, 2, 4, 8 ... of them are one, and whatever is
made of them, in whatever precision it is kept, has equal rows just there. Nothing else makes this pattern; it does
harm where the features change much from one of the numbers to the next.
"""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.owners import line_that_sets
from gradproof.experiments.tables import line_that_shortens
from gradproof.tape.operations import Slot
from gradproof.tape.replay import replay_forward

ID = "low-precision-error/merged-rows"
EXACT_UP_TO = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}  # all whole numbers
ONE_IN_HALF = (512, 4096)  # the same as the next number in bfloat16, and in float16
LARGEST = 8_000_000  # entries of a table
ALIKE, UNLIKE = 0.98, 0.8  # of the neighbours that the format makes one, and of the others
MERGED = 0.5  # of the rows that a step uses
JUMPS = 0.3  # of a column's variance, from one run of rows to the next
MANY = 0.15  # of the columns
TAKES = VIEWS | {"index", "index_select", "embedding", "gather", "select", "split", "unbind"}
SHORT = re.compile(r"half\b|float16|[\"']f2[\"']")
COUNTS = re.compile(r"arange|linspace|cumsum|range\(")


@dataclass(frozen=True)
class Runs:
    """A table whose rows are one where a format makes neighbouring whole numbers one."""

    format: torch.dtype
    merged: Tensor  # of each row, whether a neighbour is the same
    distinct: int
    jumping: float  # share of the columns that change much from one run to the next


def have_neighbours_become_one(evidence: Evidence) -> Iterator[Verdict]:
    """Tables that the step reads, and those that the script keeps: rows along positions, times or ids."""
    looked = evidence.memory.setdefault("merged rows", set())
    for slot, dim in long_tables(evidence):
        key = (slot.name or slot.index, slot.shape, dim)
        if key in looked:
            continue
        runs = find_runs(evidence.tape.leaf_value(slot.index).movedim(dim, 0))
        if runs is None or runs.jumping < MANY:
            looked.add(key)
            continue
        used = rows_used(evidence, slot, dim)
        share = float(runs.merged[used].double().mean()) if len(used) else 0.0
        if share >= MERGED:
            yield verdict_of(slot.name or "a table of the batch", runs, share, place_of_table(evidence, slot))
            return
    for table in evidence.memory.get("facts", {}).pop("_stepped_tables", ()):
        runs = find_runs(table["values"])
        share = float(runs.merged.double().mean()) if runs is not None else 0.0
        if runs is not None and runs.jumping >= MANY and share >= MERGED:
            yield verdict_of(table["name"], runs, share, line_that_counts(table["file"]))
            return


def verdict_of(name: str, runs: Runs, share: float, where: str | None) -> Verdict:
    format = str(runs.format).removeprefix("torch.")
    return confirmed(
        ID,
        f"{name} has {len(runs.merged)} rows, and {runs.distinct} different ones: neighbours are the same just where "
        f"{format} makes whole numbers one, which it knows only up to {EXACT_UP_TO[runs.format]}",
        f"{100 * share:.0f} % of the rows that are used have lost themselves so; {100 * runs.jumping:.0f} % of the "
        f"columns change by more than {JUMPS} of their variance to the next row that differs",
        where=where,
        fix="count positions, times and ids in float32 or int64 (torch.arange(n, dtype=torch.float32)), compute their "
        "phases in float32 too, and cast the result",
        lasting=True,
    )


def long_tables(evidence: Evidence) -> Iterator[tuple[Slot, int]]:
    """(leaf, dimension): what the forward pass reads and nobody trains, longer than a format can count."""
    trained = set(evidence.tape.stepped)
    read = {slot for op in evidence.flow.operations for slot in evidence.flow.reads(op)}
    for slot in evidence.tape.leaves():
        if slot.index not in read or slot.index in trained or not slot.dtype.is_floating_point:
            continue
        if math.prod(slot.shape) <= LARGEST:
            fewest = min(EXACT_UP_TO.values())
            yield from ((slot, dim) for dim, length in enumerate(slot.shape) if length > 2 * fewest)


def find_runs(table: Tensor) -> Runs | None:
    """What a table (rows first) tells of the format that its rows were counted in."""
    if not any(bool((table[n] == table[n + 1]).all()) for n in ONE_IN_HALF if n + 1 < len(table)):
        return None  # quickly
    rows = table.detach().reshape(len(table), -1).cpu()
    same = (rows[1:] == rows[:-1]).all(1)
    if not bool(same.any()) or bool(same.all()):
        return None
    for dtype, limit in EXACT_UP_TO.items():
        if len(rows) > 2 * limit and any(agree(same, merges) for merges in neighbours(len(rows), dtype)):
            none = same.new_zeros(1)
            merged = torch.cat([same, none]) | torch.cat([none, same])
            return Runs(dtype, merged, 1 + int((~same).sum()), share_of_jumps(rows, same, limit))
    return None


@cache
def neighbours(count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Where a format makes whole numbers one: rounded, and as arange counts them, which is rougher on a CPU."""
    counted = (torch.arange(count).to(dtype), torch.arange(count, dtype=dtype))
    return tuple(numbers[1:] == numbers[:-1] for numbers in counted)


def agree(same: Tensor, merges: Tensor) -> bool:
    alike, unlike = same[merges].double().mean(), (~same[~merges]).double().mean()
    return float(alike) >= ALIKE and float(unlike) >= UNLIKE


def share_of_jumps(rows: Tensor, same: Tensor, limit: int) -> float:
    """Of the columns that vary, those that have little in common from one run of equal rows to the next."""
    columns = rows.double()
    variance = columns.var(0)
    steps = columns.diff(dim=0)[limit:][~same[limit:]]
    varies = variance > 0
    jumps = steps.square().mean(0)[varies] / (2 * variance[varies])
    return float((jumps > JUMPS).double().mean()) if len(jumps) else 0.0


def rows_used(evidence: Evidence, slot: Slot, dim: int) -> Tensor:
    """The numbers of the rows that a step takes from a table: its entries are replaced by them, and read again."""
    reach = {slot.index}
    ends = set()
    for op in evidence.flow.operations:
        mine = reach.intersection(op.reads)
        if mine and op.name in TAKES and op.makes:
            reach.update(op.makes)
        ends |= mine if op.name not in TAKES else set()
    count = slot.shape[dim]
    shape = [count if d == dim else 1 for d in range(len(slot.shape))]
    numbers = torch.arange(count, dtype=torch.float64, device=slot.device).reshape(shape).expand(slot.shape)
    if slot.index in ends:
        return torch.arange(count)
    found = replay_forward(evidence.tape, torch.float64, {slot.index: numbers}, keep=list(ends)).values
    taken = [value.reshape(-1).cpu() for value in found.values()]
    return torch.cat(taken).round().long().unique().clamp(0, count - 1) if taken else torch.arange(0)


def place_of_table(evidence: Evidence, slot: Slot) -> str | None:
    """The module that keeps a buffer, and the line of its class that counts in the short format."""
    path, _, name = slot.name.rpartition(".")
    owner = module_at(evidence, path)
    if owner is None:
        first = next((op for op in evidence.flow.operations if slot.index in op.reads), None)
        return line_that_counts(first.line.file) if first is not None and first.line is not None else None
    line = line_that_counts_in(type(owner)) or line_that_sets(type(owner), name)
    return f"{path or type(owner).__name__} ({line})" if line else path


def module_at(evidence: Evidence, path: str) -> nn.Module | None:
    for prefix, root in evidence.models.items():
        if prefix and path.partition(".")[0] != prefix:
            continue
        inner = path.partition(".")[2] if prefix else path
        module = dict(root.named_modules()).get(inner)
        if module is not None and module._buffers:
            return module
    return None


def line_that_counts_in(owner: type) -> str | None:
    """The line of a class that counts in a short format; else one that names such a format, or counts."""
    try:
        lines, first = inspect.getsourcelines(owner)
        file = inspect.getsourcefile(owner) or ""
    except (OSError, TypeError):
        return None
    short, counts = (lines_with(pattern, lines, first) for pattern in (SHORT, COUNTS))
    number = next(iter([*(n for n in short if n in counts), *short, *counts]), None)
    return f"{file.rsplit('/', 1)[-1]}:{number}" if number is not None else None


def line_that_counts(file: str) -> str | None:
    """The same of a file, whose other lines may do anything: only one that does both, or casts."""
    lines = linecache.getlines(file)
    short, counts = (lines_with(pattern, lines, 1) for pattern in (SHORT, COUNTS))
    number = next((n for n in short if n in counts), None)
    return f"{file.rsplit('/', 1)[-1]}:{number}" if number is not None else line_that_shortens(file)


def lines_with(pattern: re.Pattern[str], lines: list[str], first: int) -> list[int]:
    return [n for n, text in enumerate(lines, first) if pattern.search(text.partition("#")[0])]
