"""Are rare classes drawn more often? The weights of a sampler against the classes of the samples that they are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gradproof.experiments.verdict import Verdict, confirmed, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.source import lines_of_argument
from gradproof.tape.operations import Line

FAMILY = "data-order-or-sampling"
UNEVEN = 1.5  # times as many samples in the most frequent class as in the rarest
CLOSE = 0.1  # of an exponent, for two classes, through which any curve goes
GROWS = 0.3  # the power of the counts: frequencies have 1, their roots 0.5, less is none that anybody means
FITS = 0.98  # of the spread of the weights' logarithms that a power of the counts explains, for more classes
EQUAL = 1e-3  # of the largest weight: weights of classes that differ by less are all the same
SLACK = 1e-4  # of a class's weight: its samples have one, and float32 rounds it
INVERSE = 0.02  # of count times weight: 1 / (n + 1) is as near to 1 / n of fifty samples
FEW = 0.1  # of the samples: an epoch that leaves out nine in ten


def are_rare_classes_drawn_more_often(evidence: Evidence) -> Iterator[Verdict]:
    """Class frequencies for weights, where their inverses were meant; and weights for classes in place of samples."""
    for sampler in evidence.facts.samplers:
        verdict = too_few_weights(sampler) or judge(sampler)
        yield from (verdict,) if verdict is not None else ()


def too_few_weights(sampler: dict[str, Any]) -> Verdict | None:
    count, samples = len(sampler["weights"]), sampler["samples"]
    if count >= samples:
        return None
    of_classes = count in {len(np.unique(labels)) for labels in sampler["labels"]}
    return confirmed(
        f"{FAMILY}/weights-of-classes",
        f"the sampler has {count} weights for {samples} samples: only the first {count} are ever drawn",
        where=place_of_weights(sampler),
        level="problem" if of_classes or count < FEW * samples else "warning",
        confidence="proven" if of_classes else "likely",  # the numbers that the sampler was given
    )


def judge(sampler: dict[str, Any]) -> Verdict | None:
    """By the first labels of which each class has one weight, and not all classes the same."""
    weights = sampler["weights"][: sampler["samples"]]
    classes = next(filter(None, (by_class(weights, labels) for labels in sampler["labels"])), None)
    if classes is None or classes[0].max() < UNEVEN * classes[0].min():
        return None
    counts, means = classes
    exponent = grows_with(counts, means)
    if exponent is not None:
        said = f"a sample's weight grows with the count n of its class, as n^{exponent:.2g}: no inverse"
    elif belongs_to_others(counts, means):
        said = "the weights are the inverses of the classes' counts, each beside another class"
    elif not sampler["replacement"] and sampler["drawn"] >= len(weights):
        return None  # each sample comes once, whatever its weight
    else:
        return excluded(f"{FAMILY}/rare-classes-drawn-less", say_mix(counts, means))
    return confirmed(
        f"{FAMILY}/rare-classes-drawn-less",
        said,
        say_mix(counts, means),
        where=place_of_weights(sampler),
        confidence="likely",
    )


def by_class(weights: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(samples, weight) of each class; None where weights differ within a class, or are all the same."""
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.bincount(number, weights) / counts
    if not np.isfinite(means).all() or means.min() <= 0 or np.ptp(means) <= EQUAL * means.max():
        return None
    return (counts, means) if bool((np.abs(weights - means[number]) <= SLACK * means[number]).all()) else None


def grows_with(counts: np.ndarray, means: np.ndarray) -> float | None:
    """The power of a class's count that its weight is, if it is one and positive: 1 for frequencies."""
    x, y = np.log(counts), np.log(means)
    x, y = x - x.mean(), y - y.mean()
    exponent = float(x @ y / (x @ x))
    if exponent < GROWS:
        return None
    if len(counts) == 2:
        return exponent if min(abs(exponent - 1), abs(exponent - 0.5)) < CLOSE else None
    return exponent if exponent * float(x @ y) >= FITS * float(y @ y) else None


def belongs_to_others(counts: np.ndarray, means: np.ndarray) -> bool:
    """The inverses of the counts, all of them, but each beside another class."""
    share = counts * means / (counts * means).mean()
    ordered = np.sort(counts)[::-1] * np.sort(means)
    return bool(np.ptp(ordered) < INVERSE * ordered.max() and share.max() > UNEVEN * share.min())


def say_mix(counts: np.ndarray, means: np.ndarray) -> str:
    """The shares of the classes in the data and in what is drawn, for the most frequent and the rarest."""
    data, drawn = counts / counts.sum(), counts * means / (counts * means).sum()
    most, least = int(np.argmax(counts)), int(np.argmin(counts))
    return (
        f"of the {len(counts)} classes, the most frequent is {100 * data[most]:.3g} % of the data and "
        f"{100 * drawn[most]:.3g} % of what is drawn, the rarest {100 * data[least]:.2g} % and "
        f"{100 * drawn[least]:.2g} %"
    )


def place_of_weights(sampler: dict[str, Any]) -> str | None:
    """Where the sampler is made, and where the script computes its weights."""
    if not sampler["place"]:
        return None
    line = Line(*sampler["place"])
    file = line.file.rsplit("/", 1)[-1]
    lines = lines_of_argument(line, "WeightedRandomSampler", "weights")[:2]
    made = ", ".join(f"{file}:{number}" for number in lines if number != line.number)
    return f"{file}:{line.number}" + (f", weights computed at {made}" if made else "")
