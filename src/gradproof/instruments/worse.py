"""Which samples are worse off? Late batches with the weights of before: what those that lose most have in common.

A station whose labels have slipped, a source that is broken: the loss of the batch rises a little, that of its samples
by much. Each sample's own loss says which they are; a column that tells them from the others says what they are.

    who_loses(before, after)      # "input 1 is 2": 97 % of these lose more than 99 % did before, 3 % of the others
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradproof.instruments.changed import CHANCE, IDS, table_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison
from gradproof.instruments.swap import weights_for

USUAL = 0.99  # of the samples of before lose less than what is called much
MOST_VALUES = 64  # of a column: more are a measure, or an id of the sample itself
FEWEST = 8  # samples of a kind
OFTEN, SELDOM = 0.5, 0.25  # of a kind lose much; of the others, so many times as often
PLACE = "place in the batch"


@dataclass(frozen=True)
class Kind:
    """Samples that have one value in one column, and how many of them, and of the others, lose much."""

    column: str
    value: float
    count: int
    much: float
    among_them: float
    among_others: float

    @property
    def chance(self) -> float:
        """That so many of them lose much, if they did as often as the others (a bound: exp(-n KL))."""
        mine, theirs = self.among_them, min(max(self.among_others, 1e-3), 1 - 1e-3)
        apart = mine * math.log(mine / theirs) if mine else 0.0
        apart += (1 - mine) * math.log((1 - mine) / (1 - theirs)) if mine < 1 else 0.0
        return math.exp(-self.count * apart) if mine > theirs else 1.0

    def __str__(self) -> str:
        return (
            f"of the {self.count} late samples with {self.value:g} in {self.column} {100 * self.among_them:.0f} % lose "
            f"more than {self.much:.3g} with the weights of before, of the others {100 * self.among_others:.0f} %"
        )


def who_loses(early: Sequence[Evidence], late: Sequence[Evidence]) -> Kind | None:
    """The kind of sample that tells best who loses much, if one does, with the last weights of before."""
    usual = [part for step in early if (part := losses_by_sample(step, {})) is not None]
    steps = [(step, losses_by_sample(step, weights_for(step, early[-1]))) for step in late]
    now = [(step, part) for step, part in steps if part is not None]
    if not usual or not now:
        return None
    much = float(np.quantile(np.concatenate(usual), USUAL))
    bad = np.concatenate([part for _, part in now]) > much
    tables = [table_of(step) | {PLACE: np.arange(len(part))} for step, part in now]
    found = [
        Kind(name, float(value), int(mine.sum()), much, float(bad[mine].mean()), float(bad[~mine].mean()))
        for name, values in joined(tables, len(bad)).items()
        for value in (np.unique(values) if len(np.unique(values)) <= MOST_VALUES else ())
        if FEWEST <= (mine := values == value).sum() <= len(bad) - FEWEST
    ]
    telling = [
        kind
        for kind in found
        if kind.among_them >= OFTEN
        and kind.among_others <= SELDOM * kind.among_them
        and kind.chance * len(found) < CHANCE
    ]
    return max(telling, key=lambda kind: (kind.among_them - kind.among_others, kind.count), default=None)


def joined(tables: Sequence[dict[str, np.ndarray]], count: int) -> dict[str, np.ndarray]:
    """The columns that all steps have, one number a sample."""
    names = [name for name in tables[0] if all(name in table for table in tables) and not name.endswith(IDS)]
    whole = {name: np.concatenate([table[name] for table in tables]) for name in names}
    return {name: values for name, values in whole.items() if len(values) == count}


def losses_by_sample(evidence: Evidence, leaves: dict[int, Tensor]) -> np.ndarray | None:
    """What each sample of a batch loses, with other weights; None where the loss does not tell its samples apart."""
    flow = evidence.flow
    comparison = next(iter((*flow.comparisons, *flow.picked)), None)
    counts = {evidence.slot(slot).shape[0] for slot in flow.inputs}
    if comparison is None or len(counts) != 1:
        return None
    found = flow.values([comparison.prediction, comparison.target], leaves)
    if len(found) < 2:
        return None
    losses = losses_of(comparison, found[comparison.prediction].double(), found[comparison.target])
    count = counts.pop()
    if losses is None or len(losses) != count or not bool(torch.isfinite(losses).all()):
        return None
    return losses.reshape(count, -1).mean(1).cpu().numpy()


def losses_of(comparison: Comparison, prediction: Tensor, target: Tensor) -> Tensor | None:
    name = comparison.operation.name
    if comparison.kind == "class":
        places = (
            target.long().unsqueeze(comparison.axis) if target.dim() < prediction.dim() else target.long()
        )
        inside = (places >= 0) & (places < prediction.shape[comparison.axis])
        picked = prediction.gather(comparison.axis, places.where(inside, 0))
        return -picked.where(inside, 0.0)  # of logarithms; of probabilities the order is the same
    if comparison.kind == "binary":
        of = F.binary_cross_entropy_with_logits if name.endswith("logits") else F.binary_cross_entropy
        return of(prediction, target.double(), reduction="none")
    return (prediction - target).square() if prediction.shape == target.shape else None
