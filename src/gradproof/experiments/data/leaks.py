"""Is validation like training, and apart from it? Samples of passes without gradient, beside those of the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.ledger import Batch, fingerprints, remember_batch

FAMILY = "data-order-or-sampling"
FEWEST = 50  # samples of a validation
SEEN = 0.9  # of the last batches' samples had been seen before: an epoch is complete
SOME, ALL = 0.02, 0.98  # of a validation: a few twins are no leak, and all of it is a look at the training
FEW = 16  # samples, to know their size
# between deviations, and of means in deviations: more than noise that is added to one of them
TIMES, AWAY = 4.0, 3.0
CLEAR = 8.0  # between deviations: nobody wants that


def has_validation_been_trained_on(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, is_part_of_it_trained_on, is_it_of_another_size))


def is_it_of_another_size(evidence: Evidence) -> Verdict | None:
    """What was done to the inputs of the training and not to those of the validation: a division, say."""
    for batch in evidence.flow.values(evidence.flow.inputs).values():
        if not batch.is_floating_point() or batch.dim() < 2 or len(batch) < FEW:
            continue
        middle, spread = size_of(batch)
        for line, rows in evidence.facts.evaluated.items():
            alike = [row for row in rows if row.shape[1:] == batch.shape[1:] and row.dtype == batch.dtype]
            if sum(map(len, alike)) < FEW:
                continue
            other_middle, other_spread = size_of(torch.cat([row.to(batch.device) for row in alike]))
            apart = abs(other_middle - middle) >= AWAY * max(spread, other_spread)
            if not math.isfinite(spread + other_spread + other_middle) or min(spread, other_spread) <= 0:
                continue
            times = other_spread / spread
            if apart or not 1 / TIMES < times < TIMES:
                return confirmed(
                    "input-or-target-scale/validated-otherwise",
                    f"the inputs of the training have a mean of {middle:.3g} and a deviation of {spread:.3g}, those "
                    f"of the validation {other_middle:.3g} and {other_spread:.3g}: they were prepared in another way",
                    where=line,
                    level="problem"
                    if not 1 / CLEAR < times < CLEAR
                    else "warning",  # a harder test may be meant
                    confidence="likely",
                )
    return None


def size_of(batch: Tensor) -> tuple[float, float]:
    numbers = batch.detach().double()
    return float(numbers.mean()), float(numbers.std())


def is_part_of_it_trained_on(evidence: Evidence) -> Iterator[Verdict]:
    """Part of a validation set in the training set is a leak; all of it is a look at the training error."""
    batches = remember_batch(evidence)
    evaluated = evidence.facts.evaluated
    if not evaluated or batches is None:
        return
    if not is_epoch_complete(batches):
        reason = f"the {len(batches)} taped batches are not all of the training data: no epoch is complete"
        yield undecided(FAMILY, reason)
        return
    trained = np.concatenate([batch.prints for batch in batches])
    clean = 0
    for line, rows in evaluated.items():
        prints = np.concatenate([fingerprints(tensor) for tensor in rows])
        if len(prints) < FEWEST or len(np.unique(prints)) < len(prints):
            continue  # data of few kinds meets itself by chance
        share = float(np.isin(prints, trained).mean())
        if SOME < share < ALL:
            yield confirmed(
                f"{FAMILY}/leaked-validation",
                f"{100 * share:.0f} % of the {len(prints)} samples that are validated with are trained on, too "
                f"(found among {len(np.unique(trained))} of the training)",
                where=line,
                level="warning",
                confidence="likely",
            )
            return
        clean += len(prints) if share <= SOME else 0
    if clean:
        reason = f"none of {clean} validated samples is among {len(np.unique(trained))} that are trained on"
        yield excluded(f"{FAMILY}/leaked-validation", reason)


def is_epoch_complete(batches: list[Batch]) -> bool:
    """Whether the last batches brought hardly anything new."""
    if len(batches) < 6:
        return False
    before = np.concatenate([batch.prints for batch in batches[:-3]])
    last = np.concatenate([batch.prints for batch in batches[-3:]])
    return float(np.isin(last, before).mean()) >= SEEN
