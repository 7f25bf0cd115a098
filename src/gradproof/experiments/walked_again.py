"""Is a loss walked back more than once in a step? A running sum that is backpropagated at every micro-batch is.

The k-th backward of such a sum brings the gradients of the k-1 losses before it once more: the first of n micro-batches
counts n times, the last once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import Flow
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import BackwardCall, references

ID = "grad-accumulation-error/walked-again"
SCALES = {"mul", "div", "neg", "alias", "clone", "_to_copy", "view", "squeeze", "mean", "sum"}


def is_a_loss_walked_again(evidence: Evidence) -> Iterator[Verdict]:
    """A later backward of the step that reaches what an earlier one began at, while its gradients still stand."""
    calls = [call for call in evidence.tape.top_backwards if is_of_a_loss(evidence, call)]
    if len(calls) < 2:
        return
    begun = [set(single_numbers_behind(evidence.flow, call.roots[0])) for call in calls]
    times = [1] * len(calls)
    again: list[tuple[BackwardCall, BackwardCall]] = []
    for later, call in enumerate(calls):
        reached = {slot for _, slot, _ in call.received}
        for earlier in range(later):
            if not reached.isdisjoint(begun[earlier]) and still_stands(evidence, calls[earlier], call):
                times[earlier] += 1
                again.append((calls[earlier], call))
    if not again:
        return
    in_a_loop = all(first.line == second.line for first, second in again)
    yield confirmed(
        ID,
        f"{len(again)} times in this step a backward walks again through a loss that was walked before, and its "
        f"gradients were not cleared",
        f"of the {len(calls)} losses of the step the first counts {times[0]} times, the last {times[-1]}: on average "
        f"{sum(times) / len(times):.3g} times",
        where=place_of("", again[0][1].line),
        fix="call backward on the loss of each micro-batch alone, without retain_graph; keep the running sum with "
        "loss.item() or loss.detach()",
        level="problem" if in_a_loop else "warning",
        confidence="proven" if in_a_loop else "likely",
        lasting=True,
    )


def is_of_a_loss(evidence: Evidence, call: BackwardCall) -> bool:
    """From a single number; a backward that is itself differentiated goes through its forward again."""
    if not call.accumulates or call.create_graph or len(call.roots) != 1:
        return False
    return math.prod(evidence.slot(call.roots[0]).shape) == 1


def single_numbers_behind(flow: Flow, slot: int) -> Iterator[int]:
    """A loss, and what it was before it was divided or scaled."""
    while True:
        yield slot
        maker = flow.maker(slot)
        if maker is None or maker.name not in SCALES:
            return
        tracked = [ref.slot for ref in references(maker.args) if ref.tracked]
        if len(tracked) != 1 or math.prod(flow.tape.slots[tracked[0]].shape) != 1:
            return
        slot = tracked[0]


def still_stands(evidence: Evidence, first: BackwardCall, second: BackwardCall) -> bool:
    """Whether the gradients of one backward are still there, to be added to, when another begins."""
    tape = evidence.tape
    if any(first.last <= at <= second.first for at in (*tape.cleared_at, *tape.stepped_at)):
        return False
    kept = {tape.slots[grad].storage for p, grad in first.stored.items() if second.stored.get(p) == grad}
    between = tape.operations[first.last : second.first]
    changed = {tape.slots[slot].storage for op in between if op.in_backward is None for slot in op.writes}
    return bool(kept - changed)
