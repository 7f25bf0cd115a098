"""Can the loss be lowered without the network? Learned weights of its terms are moved alone, far, both ways."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.terms import policy_terms
from gradproof.tape.operations import Operation, Slot

FEW = 16  # numbers: a weight for each term, not a layer's bias
FAR = 8.0


def does_a_weight_of_the_loss_run_away(evidence: Evidence) -> Iterator[Verdict]:
    """exp(-s) · loss + s/2 is lowest somewhere; exp(s) · loss + s/2 falls without end, and the loss counts for less."""
    if not evidence.flow.comparisons or policy_terms(evidence.flow):
        return
    for parameter in evidence.tape.parameters:
        user = user_in_the_loss(evidence, parameter) if parameter.index in evidence.tape.stepped else None
        if user is None:
            continue
        value = evidence.tape.leaf_value(parameter.index)
        for way in (-1.0, 1.0):
            near, far = (
                evidence.loss_at({parameter.index: value + way * share * FAR}) for share in (0.5, 1.0)
            )
            fallen = evidence.loss - near
            if math.isfinite(far) and far < 0 < fallen and evidence.loss - far > 1.5 * fallen:
                yield confirmed(
                    "loss-scale-or-sign/weight-runs-away",
                    f"{parameter.name} moved by {way * FAR:g}, and nothing else, takes the loss from "
                    f"{evidence.loss:.3g} to {far:.3g}, and on without end: what it weighs counts for less and less",
                    where=place_of(user.module, user.line),
                    fix="with s = log σ²: exp(-s) * loss + 0.5 * s",
                    lasting=True,
                )
                return


def user_in_the_loss(evidence: Evidence, parameter: Slot) -> Operation | None:
    """The first operation on a parameter that never meets more than a few numbers on its way to the loss."""
    if math.prod(parameter.shape) > FEW:
        return None
    reach, first = {parameter.index}, None
    for op in evidence.flow.operations:
        if reach.isdisjoint(op.reads):
            continue
        if any(math.prod(evidence.slot(slot).shape) > FEW for slot in (*op.makes, *op.reads)):
            return None
        reach.update((*op.makes, *op.writes))
        first = first or op
    return first
