"""Do those who are alike get alike answers? Nearest neighbours among samples, against chance; and what is learned.

share, chance, deviations = agreement(inputs, labels, classes=True)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison

COLUMNS = 256  # of a sample: neighbours in so many are neighbours in all
CERTAIN = 0.1  # entropy of labels that are nearly all one: there is nothing to explain
LATE = 100  # steps after which a network that can learn has learned something


def agreement(x: Tensor, y: Tensor, classes: bool) -> tuple[float, float, float]:
    """(share of samples whose nearest other has the same label, share by chance, how many deviations apart)."""
    return agreement_with(nearest_others(x), y, classes)


def agreement_with(near: Tensor, y: Tensor, classes: bool) -> tuple[float, float, float]:
    if not classes:
        y = (y > y.median()).double()
    _, counts = torch.unique(y, return_counts=True)
    chance = float(((counts / counts.sum()) ** 2).sum())
    share = float((y == y[near]).double().mean())
    return share, chance, deviations(share, chance, len(y))


def deviations(share: float, chance: float, count: int) -> float:
    """How far a share of so many is from what chance gives."""
    return (share - chance) / math.sqrt(max(chance * (1 - chance), 1e-9) / count)


def nearest_others(x: Tensor) -> Tensor:
    """The number of the sample that is nearest to each; one seen twice is no neighbour of itself."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    _, first = torch.unique(x, dim=0, return_inverse=True)
    distance = torch.cdist(x, x)
    distance[first[:, None] == first[None, :]] = math.inf
    return distance.argmin(1)


def columns_of(samples: Tensor) -> Tensor:
    """A row a sample, of numbers that are spread over it."""
    flat = samples.detach().reshape(len(samples), -1)
    return flat[:, :: max(1, flat.shape[1] // COLUMNS)].double().cpu()


# learned ----------------------------------------------------------------------------------------------------


def share_learned(evidence: Evidence, comparison: Comparison) -> float | None:
    """How much of this batch's entropy or variance the predictions take away."""
    found = loss_and_guess(evidence, comparison)
    return None if found is None else 1 - found[0] / found[1]


def loss_and_guess(evidence: Evidence, comparison: Comparison) -> tuple[float, float] | None:
    """The cross-entropy, or the mean square, of this batch, and that of the best constant."""
    found = evidence.values([comparison.prediction, comparison.target])
    if len(found) < 2:
        return None
    prediction, target = found[comparison.prediction].double(), found[comparison.target]
    if comparison.kind == "class" and prediction.dim() == 2:
        target = target.reshape(-1)
        classes = (target >= 0) & (target < prediction.shape[1])  # what is ignored is none
        log_probs, target = prediction.log_softmax(1)[classes], target[classes]
        if not len(target):
            return None
        _, counts = torch.unique(target, return_counts=True)
        shares = counts.double() / counts.sum()
        # few samples of many classes seem surer than they are (Miller and Madow)
        entropy = float(-(shares * shares.log()).sum()) + (len(counts) - 1) / (2 * len(target))
        entropy = min(entropy, math.log(prediction.shape[1]))
        loss = float(-log_probs.gather(1, target[:, None]).mean())
        return (loss, entropy) if entropy > CERTAIN else None
    if "with_logits" in comparison.operation.name:
        prediction = prediction.sigmoid()
    variance = float(target.double().var())
    if prediction.shape != target.shape or not variance > 0:
        return None
    return float(((prediction - target) ** 2).mean()), variance


def learned_line(evidence: Evidence, learned: float | None, digits: int = 0) -> list[str]:
    """As a line of evidence, where it is known."""
    said = (
        f"after {evidence.step} steps the predictions explain {100 * max(learned or 0.0, 0.0):.{digits}f} %"
    )
    return [] if learned is None else [f"{said} of the targets"]
