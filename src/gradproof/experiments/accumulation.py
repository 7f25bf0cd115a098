"""Does accumulation equal the big batch? Several backwards a step, and whether each counts by its share."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.terms import take_apart

FAMILY = "grad-accumulation-error"
ADAPTIVE = ("Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adafactor", "Adadelta")


def do_micro_batches_add_up(evidence: Evidence) -> Iterator[Verdict]:
    """k backwards from one line, each of a mean, have to be divided by k to be the mean of the whole batch."""
    lost = gradients_lost(evidence)
    if lost is not None:
        yield lost
        return
    calls = [call for call in evidence.tape.top_backwards if call.accumulates and len(call.roots) == 1]
    lines = {(call.line.file, call.line.number) for call in calls if call.line is not None}
    if len(calls) < 2 or len(lines) != 1 or any(type(o).__name__ == "LBFGS" for o in evidence.optimizers):
        return  # a closure that is called again starts again
    terms = [term for call in calls for term in take_apart(evidence.flow, call.roots[0])]
    if not terms or not all(term.is_averaged_over(term.operand[0] if term.operand else 1) for term in terms):
        return
    # what a mean over its own part counts for; a sum that is divided by its part is one, too
    divided = [term.weight * math.prod(term.operand if term.mean else term.operand[:1]) for term in terms]
    # of a loss of several terms, what weighs them cannot be told from what divides them
    total = sum(divided) if len(terms) == len(calls) else len(calls) * float(min(divided) > 0.99)
    if total < 1.5:
        return
    shorter = evidence.loss_at(evidence.moved(1 / total))
    whole = evidence.loss_at(evidence.moved(1.0))
    harmful = type(evidence.optimizers[0]).__name__ not in ADAPTIVE and not whole <= shorter
    by = "nothing divides" if min(divided) > 0.99 else f"each is divided by {1 / divided[0]:.3g}, not"
    yield confirmed(
        f"{FAMILY}/not-divided",
        f"{len(calls)} backwards a step add up their means, and {by} by {len(calls)}: "
        f"the gradient is {total:.3g} times that of the whole batch",
        f"the loss of this batch after the step {whole:.4g}, after a step {total:.3g} times shorter {shorter:.4g}",
        where=place_of("", terms[0].operation.line),
        fix=f"(loss / {len(calls)}).backward()",
        level="problem" if harmful else "warning",
        confidence="likely",
    )


def gradients_lost(evidence: Evidence) -> Verdict | None:
    """Several calls of autograd.grad from one line, of whose results only the last are ever used."""
    tape, trained = evidence.tape, set(evidence.tape.stepped)
    calls = [call for call in tape.top_backwards if call.inputs and not call.create_graph]
    calls = [call for call in calls if call.line is not None and trained.issuperset(call.inputs or ())]
    if len(calls) < 2 or len({call.line for call in calls}) != 1:
        return None
    read = {slot for operation in tape.operations for slot in operation.reads}
    used = [any(slot in read for slot in call.results) for call in calls]
    if any(used[:-1]) or not used[-1]:
        return None
    return confirmed(
        f"{FAMILY}/overwritten",
        f"{len(calls)} gradients are computed for a step, and only the last of them reaches the optimizer: .grad is "
        "assigned, not added to",
        where=place_of("", calls[0].line),
        fix="p.grad = g if p.grad is None else p.grad + g",
        lasting=True,
    )
