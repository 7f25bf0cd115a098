"""Is the whole table drawn from? Steps of a schedule, drawn at random up to the batch's size in place of the table's.

A schedule of noise levels, or an embedding of steps, has a row for each; a range that is the size of a batch, and
shorter than the table, leaves the others untrained.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradproof.experiments.verdict import Verdict, confirmed, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, place_of
from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import Operation, references
from gradproof.tape.operators import argument

ID = "data-order-or-sampling/part-of-the-range"
SHORT = 0.7  # of the table
LOOKUPS = ("index", "gather", "index_select", "embedding", "take")


def is_all_of_the_range_drawn(evidence: Evidence) -> Iterator[Verdict]:
    """randint(0, n, (n,)) that picks rows of a schedule with far more than n of them."""
    for draw, low, high, lookup, table in drawn_rows(evidence):
        rows, count = evidence.slot(table).shape[0], evidence.slot(draw.makes[0]).shape[0]
        if high - low >= rows:
            place = place_of(lookup.module, lookup.line)
            yield excluded(ID, f"all {rows} rows of the table at {place} are drawn")
            continue
        if low != 0 or high > SHORT * rows or count != high or not is_a_schedule(evidence, lookup, table):
            continue
        yield confirmed(
            ID,
            f"rows 0 to {high - 1} are drawn, of a table that has {rows}: the other {rows - high} are never used; "
            f"{high} is the number of draws, the size of the batch",
            f"the table is looked up at {place_of(lookup.module, lookup.line)}",
            where=place_of(draw.module, draw.line),
            fix=f"draw from all rows: torch.randint(0, {rows}, ({count},))",
            confidence="likely",  # a table that looks like a schedule
        )
        return


def drawn_rows(evidence: Evidence) -> Iterator[tuple[Operation, int, int, Operation, int]]:
    """(draw, lowest, one above the highest, lookup, table) for random whole numbers that pick rows of a table."""
    flow = evidence.flow
    draws = {
        op.makes[0]: op for op in evidence.forward if op.name in ("randint", "randint_like") and op.makes
    }
    if not draws:
        return
    for op in evidence.forward:
        if op.name not in LOOKUPS or len(op.reads) < 2:
            continue
        table, rows = op.reads[0], flow.behind(op.reads[-1], VIEWS)
        shape = evidence.slot(table).shape
        if rows not in draws or not shape or len(evidence.slot(rows).shape) != 1 or not picks_rows(op, shape):
            continue
        draw = draws[rows]
        low, high = (argument(draw.func, draw.args, draw.kwargs, name, 0) for name in ("low", "high"))
        if isinstance(low, int) and isinstance(high, int):
            yield draw, low, high, op, table


def picks_rows(op: Operation, shape: tuple[int, ...]) -> bool:
    """Whether a lookup goes along the first axis."""
    if op.name == "index":
        chosen = op.args[1]
        return isinstance(chosen, (list, tuple)) and len(chosen) == 1
    if op.name in ("embedding", "take"):
        return True
    return op.args[1] == 0 or (op.args[1] == -1 and len(shape) == 1)


def is_a_schedule(evidence: Evidence, lookup: Operation, table: int) -> bool:
    """Rows that go steadily up or down; or trained ones, beside another input: not samples, and not the only input."""
    flow = evidence.flow
    if any(ref.slot == table and ref.tracked for ref in references(lookup.args)):
        return any(evidence.slot(slot).dtype.is_floating_point for slot in flow.inputs)
    try:
        value = flow.values([table]).get(table)
    except CannotReplay:
        return False  # a whole data set, of which the tape has what was picked
    if value is None or not value.is_floating_point() or len(value) < 3:
        return False
    steps = torch.diff(value.reshape(len(value), -1).double(), dim=0)
    return bool((steps >= 0).all(0).logical_or((steps <= 0).all(0)).all()) and bool(steps.any())
