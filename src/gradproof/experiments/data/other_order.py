"""Are the targets in another order than the inputs? The script itself often holds the order that puts them right.

Features in the order in which ids first appear, labels in the order of the ids: as they stand they have nothing to do
with one another; in the order of the script's own index, neighbours agree far beyond chance. Nothing else does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradproof.experiments.data.targets import STRANGERS
from gradproof.experiments.verdict import Verdict, confirmed, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison
from gradproof.instruments.neighbours import COLUMNS, agreement_with, nearest_others
from gradproof.instruments.rows import SHORT_NUMBERS, data_behind, inputs_of, send_numbers

ID = "data-target-misaligned/other-order"
ROWS = 1500  # compared with one another
FRIENDS = 8.0  # deviations from chance of what nearest neighbours share: no order has it by luck
LONGEST = 5_000  # operations of a forward pass
BACK = 6  # operations from a comparison back to what it was taken from


def are_targets_in_another_order(evidence: Evidence) -> Iterator[Verdict]:
    """Nearest neighbours among the inputs, and their targets, as they stand and in each order that the script keeps."""
    orders, flow = evidence.facts.orders, evidence.flow
    if not orders or evidence.memory.get("other order"):
        return
    if len(flow.forward) > LONGEST:
        said = f"a forward pass of {len(flow.forward)} operations is too long to follow rows through"
        yield undecided("data-target-misaligned", said)
        return
    lengths = {len(order["places"]) for order in orders}
    for comparison in (c for c in flow.comparisons if not flow.is_learned(c.target)):
        for first, second in whole_tables(evidence, comparison, lengths):
            evidence.memory["other order"] = True
            x, y = (evidence.tape.leaf_value(leaf) for leaf in (first, second))
            found = judge(x, y, unused(evidence, orders), comparison.kind != "value")
            if found is None:
                continue
            name, said = found
            yield confirmed(
                ID,
                f"nearest neighbours among the {len(x)} inputs have the same target in {said}",
                where=line_that_makes(evidence, y)
                or flow.origin(comparison.target, comparison.operation.line),
                fix=f"make the targets row by row from the ids of the inputs, in the order of {name}: "
                "[label[id] for id in ids], and not in the order of another table",
                confidence="likely",  # nearest neighbours
            )
            return


def judge(x: Tensor, y: Tensor, orders: list[dict[str, Any]], classes: bool) -> tuple[str, str] | None:
    """(name of the order, how often neighbours agree), where only one of the orders makes sense of the pairs."""
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
                said = (
                    f"{100 * now:.0f} % (by chance {100 * chance:.0f} %); with the targets in the order of "
                )
                return order["name"], f"{said}{order['name']}, in {100 * right:.0f} %"
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
    flow, slots = evidence.flow, evidence.tape.slots
    for slot in inputs_of(flow, comparison):
        if not slots[slot].dtype.is_floating_point or len(slots[slot].shape) < 2:
            continue
        for first in data_behind(flow, slot):
            rows = slots[first].shape[0]
            for second in data_behind(flow, comparison.target) if rows in lengths else ():
                if slots[second].shape not in ((rows,), (rows, 1)) or first == second:
                    continue
                sent = send_numbers(flow, (first, second), (slot, comparison.target), SHORT_NUMBERS)
                if sent is not None and torch.equal(*sent):
                    yield first, second
        rows = slots[slot].shape[0]
        if rows in lengths and slots[slot].made_by is None:
            # predictions for all rows are compared with it, or both at the same index
            leaf, at = taken_from(evidence, comparison.target, rows)
            made, also = taken_from(evidence, comparison.prediction, rows)
            whole = leaf in evidence.tape.memory_of and slots[leaf].shape in ((rows,), (rows, 1))
            if leaf is not None and made is not None and at == also and whole and slots[leaf].made_by is None:
                yield slot, leaf


def taken_from(evidence: Evidence, slot: int, rows: int) -> tuple[int | None, tuple[int, ...]]:
    """The first thing of so many rows that a slot was taken from, and the slots that said which of them."""
    at: tuple[int, ...] = ()
    for maker in (None, *islice(evidence.flow.chain(slot), BACK - 1)):
        if maker is not None and not maker.reads:
            break
        at = (*at, *maker.reads[1:]) if maker is not None and maker.name in ("index", "index_select") else at
        slot = maker.reads[0] if maker is not None else slot
        if evidence.slot(slot).shape[:1] == (rows,):
            return slot, at
    return None, at
