"""Has validation been trained on? Samples of passes without gradient, looked for among those of the training steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradproof.experiments.batches import Batch, fingerprints
from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded

FAMILY = "data-order-or-sampling"
FEWEST = 50  # samples of a validation
SEEN = 0.9  # of the last batches' samples had been seen before: an epoch is complete
SOME, ALL = 0.02, 0.98


def has_validation_been_trained_on(evidence: Evidence) -> Iterator[Verdict]:
    """Part of a validation set in the training set is a leak; all of it is a look at the training error."""
    batches: list[Batch] = evidence.memory.get("batches", [])
    evaluated = evidence.memory.get("facts", {}).get("_evaluated", {})
    if not evaluated or not is_epoch_complete(batches):
        return
    trained = np.concatenate([batch.prints for batch in batches])
    clean = 0
    for line, (_, rows) in list(evaluated.items()):
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
                fix="split once, before training, and keep the parts apart: one permutation, cut in two",
                level="warning",
                confidence="likely",
                lasting=True,
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
