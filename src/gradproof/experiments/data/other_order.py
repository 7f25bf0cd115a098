"""Are the targets in another order than the inputs? The script itself often holds the order that puts them right.

Features in the order in which ids first appear, labels in the order of the ids: as they stand they have nothing to do
with one another; in the order of the script's own index, neighbours agree far beyond chance. Nothing else does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradproof.experiments.data.targets import (
    STRANGERS,
    agreement_with,
    inputs_of,
    is_computed,
    nearest_others,
)
from gradproof.experiments.verdict import Verdict, confirmed, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison
from gradproof.instruments.rows import SHORT_NUMBERS, data_behind, send_numbers

ID = "data-target-misaligned/other-order"
ROWS = 1500  # compared with one another
COLUMNS = 256  # of a sample: neighbours in so many are neighbours in all
FRIENDS = 8.0  # deviations from chance of what nearest neighbours share: no order has it by luck
LONGEST = 5_000  # operations of a forward pass
BACK = 6  # operations from a comparison back to what it was taken from


@dataclass(frozen=True)
class Found:
    """The order in which targets go with inputs, and how often nearest neighbours agree."""

    name: str
    right: float
    now: float
    chance: float


def are_targets_in_another_order(evidence: Evidence) -> Iterator[Verdict]:
    """Nearest neighbours among the inputs, and their targets, as they stand and in each order that the script keeps."""
    orders = evidence.facts.orders
    if not orders or evidence.memory.get("other order"):
        return
    if len(evidence.flow.forward) > LONGEST:
        said = f"a forward pass of {len(evidence.flow.forward)} operations is too long to follow rows through"
        yield undecided("data-target-misaligned", said)
        return
    for comparison in evidence.flow.comparisons:
        if is_computed(evidence, comparison.target):
            continue
        for first, second in whole_tables(evidence, comparison, {len(order["places"]) for order in orders}):
            evidence.memory["other order"] = True
            x, y = (evidence.tape.leaf_value(leaf) for leaf in (first, second))
            found = judge(x, y, unused(evidence, orders), comparison.kind != "value")
            if found is not None:
                line = evidence.flow.origin(comparison.target, comparison.operation.line)
                yield verdict_of(found, len(x), line_that_makes(evidence, y) or line)
                return


def verdict_of(found: Found, rows: int, where: str | None) -> Verdict:
    return confirmed(
        ID,
        f"nearest neighbours among the {rows} inputs have the same target in {100 * found.now:.0f} % (by chance "
        f"{100 * found.chance:.0f} %); with the targets in the order of {found.name}, in {100 * found.right:.0f} %",
        where=where,
        fix=f"make the targets row by row from the ids of the inputs, in the order of {found.name}: "
        "[label[id] for id in ids], and not in the order of another table",
        confidence="likely",  # nearest neighbours
    )


def judge(x: Tensor, y: Tensor, orders: list[dict[str, Any]], classes: bool) -> Found | None:
    """Where only one of the orders makes sense of the pairs."""
    fitting = [order for order in orders if len(order["places"]) == len(y)]
    if not fitting:
        return None
    near = nearest_others(x.reshape(len(x), -1)[:ROWS, :COLUMNS].double().cpu())
    answers = y.reshape(-1).double().cpu()
    now, chance, z = agreement_with(near, answers[:ROWS], classes)
    for order in fitting if z < STRANGERS else ():
        for places in (order["places"], torch.argsort(order["places"])):
            right, _, better = agreement_with(near, answers[places][:ROWS], classes)
            if better > FRIENDS:
                return Found(order["name"], right, now, chance)
    return None


def unused(evidence: Evidence, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The orders that the step does not follow itself: where a network is told who belongs to whom, it is meant."""
    tape = evidence.tape
    lengths = {len(order["places"]) for order in orders}
    leaves = [s for s in tape.leaves() if not s.dtype.is_floating_point and s.index in tape.memory_of]
    read = [tape.leaf_value(s.index).cpu() for s in leaves if len(s.shape) == 1 and s.shape[0] in lengths]

    def followed(places: Tensor) -> bool:
        return any(torch.equal(value, places) or torch.equal(value, torch.argsort(places)) for value in read)

    return [order for order in orders if not followed(order["places"])]


def line_that_makes(evidence: Evidence, y: Tensor) -> str | None:
    """Where an object of the script gives an attribute these values, or a function a variable."""
    for kept in evidence.facts.ordered_targets:
        values = kept["values"]
        if values.shape == y.shape and torch.equal(values.to(y), y):
            return kept["line"] or None
    return None


def whole_tables(evidence: Evidence, comparison: Comparison, lengths: set[int]) -> Iterator[tuple[int, int]]:
    """(inputs, targets): leaves as long as an order, of which predictions and targets are taken at the same rows."""
    flow, tape = evidence.flow, evidence.tape
    for slot in inputs_of(flow, comparison):
        if not evidence.slot(slot).dtype.is_floating_point or len(evidence.slot(slot).shape) < 2:
            continue
        for first in data_behind(flow, slot):
            rows = tape.slots[first].shape[0]
            for second in data_behind(flow, comparison.target) if rows in lengths else ():
                if tape.slots[second].shape[0] == rows and first != second:
                    sent = send_numbers(flow, (first, second), (slot, comparison.target), SHORT_NUMBERS)
                    if sent is not None and torch.equal(*sent) and one_a_row(evidence, second):
                        yield first, second
        rows = evidence.slot(slot).shape[0]
        leaf = taken_alike(evidence, comparison, rows) if rows in lengths else None
        if leaf is not None and evidence.slot(slot).made_by is None and one_a_row(evidence, leaf):
            yield slot, leaf


def one_a_row(evidence: Evidence, leaf: int) -> bool:
    slot = evidence.slot(leaf)
    return bool(slot.shape) and torch.Size(slot.shape).numel() == slot.shape[0]


def taken_alike(evidence: Evidence, comparison: Comparison, rows: int) -> int | None:
    """The leaf of all targets, where predictions for all rows are compared with it, or both at the same index."""
    leaf, at = walk_back(evidence, comparison.target, rows)
    made, also = walk_back(evidence, comparison.prediction, rows)
    if (
        leaf is None
        or made is None
        or evidence.slot(leaf).made_by is not None
        or leaf not in evidence.tape.memory_of
    ):
        return None
    return leaf if at == also else None


def walk_back(evidence: Evidence, slot: int, rows: int) -> tuple[int | None, tuple[int, ...]]:
    """The first thing of so many rows that a slot was taken from, and the slots that said which of them."""
    at: tuple[int, ...] = ()
    for _ in range(BACK):
        shape, maker = evidence.slot(slot).shape, evidence.maker(slot)
        if shape and shape[0] == rows:
            return slot, at
        if maker is None or not maker.reads:
            return None, at
        if maker.name in ("index", "index_select"):
            at = (*at, *maker.reads[1:])
        slot = maker.reads[0]
    return None, at
