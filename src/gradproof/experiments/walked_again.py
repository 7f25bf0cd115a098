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
from gradproof.tape.operations import BackwardCall, Operation, references

ID = "grad-accumulation-error/walked-again"
ADDS = {"add", "sub"}
JOINS = {"stack", "cat"}
SCALES = {"mul", "div", "neg", "alias", "clone", "_to_copy", "view", "squeeze", "unsqueeze", "mean", "sum"}


def is_a_loss_walked_again(evidence: Evidence) -> Iterator[Verdict]:
    """A later backward of the step that reaches all that an earlier one began at, while its gradients still stand."""
    calls = [call for call in evidence.tape.top_backwards if is_of_a_loss(evidence, call)]
    if len(calls) < 2:
        return
    begun = [terms_of(evidence.flow, call.roots[0]) for call in calls]
    times = [1] * len(calls)
    again: list[tuple[BackwardCall, BackwardCall]] = []
    oldest = 0  # of the backwards whose gradients still stand
    for later, call in enumerate(calls):
        reached = {slot for _, slot, _ in call.received}
        if later and not still_stands(evidence, calls[later - 1], call):
            oldest = later
        for earlier in range(oldest, later):
            # all of its terms: one that several losses share, such as a penalty, may be meant for each
            if begun[earlier] <= reached:
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
    return is_single(evidence.flow, call.roots[0])


def terms_of(flow: Flow, root: int) -> set[int]:
    """The single numbers that a loss adds up, before they are divided or scaled."""
    found: set[int] = set()
    waiting, seen = [root], {root}
    while waiting:
        slot = waiting.pop()
        parts = added_up(flow, slot)
        found.update(() if parts else (slot,))
        waiting += [part for part in parts if part not in seen]
        seen.update(parts)
    return found


def added_up(flow: Flow, slot: int) -> list[int]:
    """What a number is the sum or a multiple of; nothing where that is more than single numbers, or lists of them."""
    maker = flow.maker(slot)
    parts = tracked_by(maker)
    if maker is None or (maker.name in SCALES and len(parts) > 1) or maker.name not in SCALES | ADDS | JOINS:
        return []
    single = all(is_single(flow, part) or joins_single_numbers(flow, flow.maker(part)) for part in parts)
    return parts if single and (is_single(flow, slot) or maker.name in JOINS) else []


def joins_single_numbers(flow: Flow, maker: Operation | None) -> bool:
    return maker is not None and maker.name in JOINS and all(is_single(flow, s) for s in tracked_by(maker))


def tracked_by(maker: Operation | None) -> list[int]:
    return [] if maker is None else [ref.slot for ref in references(maker.args) if ref.tracked]


def is_single(flow: Flow, slot: int) -> bool:
    return math.prod(flow.tape.slots[slot].shape) == 1


def still_stands(evidence: Evidence, first: BackwardCall, second: BackwardCall) -> bool:
    """Whether the gradients of one backward are still there, to be added to, when another begins."""
    tape = evidence.tape
    if any(first.last <= at <= second.first for at in (*tape.cleared_at, *tape.stepped_at)):
        return False
    between = tape.operations[first.last : second.first]
    if any(first.roots[0] in op.writes and op.name not in ("add_", "sub_") for op in between):
        return False  # a loss that starts again in the same memory
    kept = {tape.slots[grad].storage for p, grad in first.stored.items() if second.stored.get(p) == grad}
    changed = {tape.slots[slot].storage for op in between if op.in_backward is None for slot in op.writes}
    return bool(kept - changed)
