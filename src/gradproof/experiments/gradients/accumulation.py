"""Does accumulation equal the big batch? Several backwards a step, and whether each counts once, by its share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from gradproof.experiments.verdict import Verdict, confirmed, excluded, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.weights import (
    count_walks,
    have_passes_of_their_own,
    still_stands,
    take_apart,
)
from gradproof.tape.operations import BackwardCall, Tape
from gradproof.tape.replay import differentiate

FAMILY = "grad-accumulation-error"
ADAPTIVE = ("Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adafactor", "Adadelta")
OFTEN = 1.5  # times the mean of the whole batch: two micro-batches that nothing divides come to 2
UNEQUAL, VERY_UNEQUAL = 2.5, 5.0  # times as much as another target: less is common, and does little
WHOLE = 0.99  # of a mean: what is divided by nothing, up to rounding
AS_COUNTED = 1.25  # times the ratio of the counts, or one over it: targets have sizes of their own, too


def do_micro_batches_add_up(evidence: Evidence) -> Iterator[Verdict]:
    """Gradients that are lost, that come again, that nobody divides, or in which targets count for unequal shares."""
    if moves_between_backwards(evidence):
        evidence.noted["moved_between_backwards"] = True
    yield from first_of(look(evidence) for look in (overwritten, walked_again, unequal_shares, not_divided))


def moves_between_backwards(evidence: Evidence) -> bool:
    """Whether weights are changed between two backwards of a step: the first gradient has led to where the second is
    taken, as in sharpness-aware training, and is not lost if it is cleared."""
    calls = [call for call in evidence.tape.top_backwards if call.accumulates]
    trained = {evidence.slot(slot).storage for slot in evidence.tape.stepped}
    between = evidence.tape.operations[calls[0].last : calls[-1].first] if len(calls) > 1 else []
    return any(evidence.slot(slot).storage in trained for op in between for slot in op.writes)


def overwritten(evidence: Evidence) -> Verdict | None:
    """Several calls of autograd.grad from one line, of whose results only the last are ever used."""
    tape, trained = evidence.tape, set(evidence.tape.stepped)
    calls = [call for call in tape.top_backwards if call.inputs and not call.create_graph and call.line]
    calls = [call for call in calls if trained.issuperset(call.inputs or ())]
    read = {slot for operation in tape.operations for slot in operation.reads}
    used = [not read.isdisjoint(slot for slot in call.results if slot is not None) for call in calls]
    if len(calls) < 2 or len({call.line for call in calls}) != 1 or any(used[:-1]) or not used[-1]:
        return None
    return confirmed(
        f"{FAMILY}/overwritten",
        f"{len(calls)} gradients are computed for a step, and only the last of them reaches the optimizer: .grad is "
        "assigned, not added to",
        where=place_of("", calls[0].line),
        confidence="proven",  # their results are read by nobody
    )


def walked_again(evidence: Evidence) -> Verdict | None:
    """A running sum that is backpropagated at every micro-batch: the first of n counts n times, the last once."""
    walks = count_walks(evidence)
    if not walks.again:
        return None
    times = walks.times
    in_a_loop = all(first.line == second.line for first, second in walks.again)
    return confirmed(
        f"{FAMILY}/walked-again",
        f"{len(walks.again)} times in this step a backward walks again through a loss that was walked before, and its "
        f"gradients were not cleared",
        f"of the {len(times)} losses of the step the first counts {times[0]} times, the last {times[-1]}: on average "
        f"{sum(times) / len(times):.3g} times",
        where=place_of("", walks.again[0][1].line),
        level="problem" if in_a_loop else "warning",
        confidence="proven" if in_a_loop else "likely",
    )


def scaled_since(tape: Tape, end: int) -> float:
    """What .grad was multiplied with after the last backward: p.grad /= 4 divides as well as loss / 4 does."""
    gradients = {slot for _, slot in tape.final_gradients.values()}
    factors: dict[int, float] = dict.fromkeys(gradients, 1.0)
    for operation in tape.operations[end:]:
        number = operation.args[1] if len(operation.args) > 1 else None
        if operation.phase == "optimizer" or not isinstance(number, (int, float)) or not number:
            continue
        if operation.name in ("div_", "mul_", "_foreach_div_", "_foreach_mul_"):
            for slot in gradients.intersection(operation.writes):
                factors[slot] *= number if "mul" in operation.name else 1 / number
    return max(factors.values(), default=1.0)


def parts_of_a_batch(evidence: Evidence) -> list[BackwardCall]:
    """The backwards of a step that belong together: from one line, each of a pass of its own, added up."""
    calls = [call for call in evidence.tape.top_backwards if call.accumulates and len(call.roots) == 1]
    lines = {(call.line.file, call.line.number) for call in calls if call.line is not None}
    if len(calls) < 2 or len(lines) != 1 or any(type(o).__name__ == "LBFGS" for o in evidence.optimizers):
        return []  # a closure that is called again starts again
    if not all(still_stands(evidence, before, call) for before, call in pairwise(calls)):
        return []  # cleared in between: they do not add up
    # or several losses of one batch, or windows of one sequence
    return calls if have_passes_of_their_own(evidence, calls) else []


def unequal_shares(evidence: Evidence) -> Verdict | None:
    """Micro-batches that are averaged each by itself, with many targets in one and few in another."""
    calls = parts_of_a_batch(evidence)
    compared = [c for c in evidence.flow.comparisons if c.kind == "class"]
    if not calls or len(compared) != len(calls):
        return None
    pulls = differentiate(evidence.tape, gradients_at=[c.prediction for c in compared]).slot_gradients
    each = [pulls[c.prediction].abs().amax(c.axis).double() for c in compared if c.prediction in pulls]
    counted = [pull[pull > 0] for pull in each if bool((pull > 0).any())]
    if len(counted) < len(compared):
        return None
    weights, counts = [float(pull.mean()) for pull in counted], [len(pull) for pull in counted]
    ratio, expected = max(weights) / min(weights), max(counts) / min(counts)
    # by their own weights, of rare classes say, targets may count unequally; a mean over each part makes them so
    if ratio < UNEQUAL or not 1 / AS_COUNTED <= ratio / expected <= AS_COUNTED:
        return None
    return confirmed(
        f"{FAMILY}/unequal-shares",
        f"{len(calls)} micro-batches have {min(counts)} to {max(counts)} targets that count, and each is averaged by "
        f"itself: a target of the smallest weighs {ratio:.3g} times as much as one of the largest",
        where=place_of("", compared[0].operation.line),
        fix="add up the losses (reduction='sum') and divide by the number of targets of the whole step",
        level="problem" if ratio >= VERY_UNEQUAL else "warning",
        confidence="likely",  # counted; that each target should weigh the same is what people mean, as a rule
        lasting=False,
    )


def divides_by_its_size(optimizer: Any) -> bool:
    """Whether a gradient that is k times as large makes the same step: no decay is added to it before."""
    apart = type(optimizer).__name__ == "AdamW"
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    return type(optimizer).__name__ in ADAPTIVE and (apart or not decays)


def touched_since(tape: Tape, end: int) -> bool:
    """Whether anything was done to the gradients after the last backward that a factor may matter to, as in a clip."""
    gradients = {slot for _, slot in tape.final_gradients.values()}
    return any(op.phase != "optimizer" and gradients.intersection(op.writes) for op in tape.operations[end:])


def not_divided(evidence: Evidence) -> Verdict | None:
    """k backwards from one line, each of a mean, have to be divided by k to be the mean of the whole batch."""
    calls = parts_of_a_batch(evidence)
    if not calls:
        return None
    terms = [term for call in calls for term in take_apart(evidence.flow, call.roots[0])]
    if not terms or not all(term.is_averaged_over(term.operand[0] if term.operand else 1) for term in terms):
        return None
    # what a mean over its own part counts for; a sum that is divided by its part is one, too
    later = scaled_since(evidence.tape, calls[-1].last)
    divided = [
        later * term.weight * math.prod(term.operand if term.mean else term.operand[:1]) for term in terms
    ]
    # of a loss of several terms, what weighs them cannot be told from what divides them
    total = sum(divided) if len(terms) == len(calls) else len(calls) * float(min(divided) > WHOLE)
    if total < OFTEN:
        said = f"{len(calls)} backwards a step add up to {total:.3g} times the mean of the whole batch"
        return excluded(f"{FAMILY}/not-divided", said)
    shorter, whole = (evidence.loss_at(evidence.moved(share)) for share in (1 / total, 1.0))
    harmful = type(evidence.optimizers[0]).__name__ not in ADAPTIVE and not whole <= shorter
    same = all(map(divides_by_its_size, evidence.optimizers)) and not touched_since(
        evidence.tape, calls[-1].last
    )
    by = "nothing divides" if min(divided) > WHOLE else f"each is divided by {1 / divided[0]:.3g}, not"
    return confirmed(
        f"{FAMILY}/not-divided",
        f"{len(calls)} backwards a step add up their means, and {by} by {len(calls)}: "
        f"the gradient is {total:.3g} times that of the whole batch",
        f"{type(evidence.optimizers[0]).__name__} divides each gradient by its own size: the step is the same"
        if same
        else f"the loss of this batch after the step {whole:.4g}, after a step {total:.3g} times shorter {shorter:.4g}",
        where=place_of("", terms[0].operation.line),
        fix=f"(loss / {len(calls)}).backward()",
        level="note" if same else "problem" if harmful else "warning",
        confidence="likely",
        lasting=False,
    )
