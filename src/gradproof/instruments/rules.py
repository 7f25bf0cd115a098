"""Which rule an update follows: the changes of some entries over the first updates, against the textbook's, in float64.

T updates of n entries: gradients, weights before, changes (T, n). A rule gives a direction for each update, from states
that begin at zero; what is fitted is one rate, and one decay, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from gradproof.numerics.adam import adam_direction

FITS = 5e-3  # of the size of the changes: what rounding, and an ε that was not tried, may leave
FEWEST = 4  # updates, below which rules cannot be told apart
ROUNDING = 2.0**-22  # of a weight: what a change of it is rounded to in float32
LEAST = 0.05  # of a momentum: what is fitted to plain steps may be as much by chance
# what people write: β1 and β2 cannot be fitted by least squares, so that each is tried
FIRST, SECOND = (0.9, 0.8, 0.85, 0.95, 0.99, 0.5), (0.999, 0.99, 0.95, 0.9, 0.98, 0.995, 0.9999)
EPSILONS = (1e-8, 1e-6, 1e-5)  # the same; what another one changes, FITS allows for
# the plainest first: what a plainer rule explains needs no other
ORDER = ("SGD", "sign", "momentum", "Nesterov", "RMSProp", "Adam", "AdamW")


@dataclass(frozen=True)
class Rule:
    """A rule of the textbook with its settings, and how far the changes are from what it makes."""

    name: str
    settings: tuple[tuple[str, float], ...] = ()
    corrected: tuple[bool, bool] = (True, True)  # of Adam: which of its averages are divided by 1 - β^t
    rate: float = 0.0
    decay: float = 0.0
    error: float = np.inf

    def __str__(self) -> str:
        """
        >>> str(Rule("Adam", (("β1", 0.9), ("β2", 0.999)), rate=0.01))
        'Adam (rate 0.01, β1 0.9, β2 0.999)'
        """
        parts = [f"rate {self.rate:.3g}"] if self.rate else []
        parts += [f"{name} {value:g}" for name, value in self.settings]
        parts += [f"decay {self.decay:.2g}"] if self.decay else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name


def recognise(gradients: np.ndarray, weights: np.ndarray, changes: np.ndarray) -> list[Rule]:
    """The rules that fit, the plainest first; empty where it is something else, or too little was seen."""
    if len(changes) < FEWEST or not np.isfinite(changes).all() or not changes.any():
        return []
    found = [fitted(rule, way, weights, changes) for rule, way in directions(gradients, changes)]
    right = [rule for rule in found if rule.error <= FITS]
    return sorted(right, key=lambda rule: (ORDER.index(rule.name), rule.error))


def directions(gradients: np.ndarray, changes: np.ndarray) -> Iterator[tuple[Rule, np.ndarray]]:
    """Each rule of the textbook, and the way that it goes at every update."""
    yield Rule("SGD"), gradients
    yield Rule("sign"), np.sign(gradients)
    # Δ = μ Δ before - rate · g: μ is fitted, too
    columns = np.stack([changes[:-1].ravel(), gradients[1:].ravel()], axis=1)
    (keep, _), *_ = np.linalg.lstsq(columns, changes[1:].ravel(), rcond=None)
    if LEAST < keep < 1:
        sums, settings = averages(gradients, keep) / (1 - keep), (("μ", round(float(keep), 3)),)
        yield Rule("momentum", settings), sums
        yield Rule("Nesterov", settings), gradients + keep * sums
    for second, eps in product(SECOND, EPSILONS):
        roots = np.sqrt(averages(gradients**2, second)) + eps
        yield Rule("RMSProp", (("β2", second), ("ε", eps))), gradients / roots
    both = (True, False)
    for first, second, eps, corrected in product(FIRST, SECOND, EPSILONS, product(both, both)):
        adam = Rule("Adam", (("β1", first), ("β2", second), ("ε", eps)), corrected)
        yield adam, adam_way(gradients, first, second, eps, corrected)


def averages(values: np.ndarray, beta: float) -> np.ndarray:
    """Running averages that begin at zero."""
    found, state = np.empty_like(values), np.zeros(values.shape[1])
    for step, value in enumerate(values):
        state = beta * state + (1 - beta) * value
        found[step] = state
    return found


def adam_way(
    gradients: np.ndarray,
    first: float,
    second: float,
    eps: float,
    corrected: tuple[bool, bool] = (True, True),
) -> np.ndarray:
    """Adam's direction at every update."""
    steps = np.arange(1, len(gradients) + 1)[:, None]
    m, v = averages(gradients, first), averages(gradients**2, second)
    return adam_direction(m, v, steps, (first, second), eps, corrected)


def fitted(rule: Rule, way: np.ndarray, weights: np.ndarray, changes: np.ndarray) -> Rule:
    """The rule with the rate, and the decay if one is needed, that come nearest to the changes."""
    (rate,), error = _fit(way[:, :, None], weights, changes)
    if error > FITS:
        (other, decay), less = _fit(np.stack([way, weights], axis=2), weights, changes)
        if less <= FITS and decay < 0:
            name = "AdamW" if rule.name == "Adam" else rule.name
            return replace(rule, name=name, rate=-float(other), decay=float(decay / other), error=less)
    return replace(rule, rate=-float(rate), error=error)


def _fit(columns: np.ndarray, weights: np.ndarray, changes: np.ndarray) -> tuple[np.ndarray, float]:
    flat = columns.reshape(-1, columns.shape[2])
    found, *_ = np.linalg.lstsq(flat, changes.ravel(), rcond=None)
    off = np.abs(changes.ravel() - flat @ found) - ROUNDING * np.abs(weights.ravel())
    error = np.linalg.norm(np.maximum(off, 0)) / np.linalg.norm(changes)
    return found, float(error)
