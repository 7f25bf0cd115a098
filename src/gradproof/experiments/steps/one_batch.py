"""Can it learn this batch at all? The first steps of training again, a few dozen times on the one taped batch and on
copies of the weights: at the run's own learning rate, and at a tenth of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.steps.step_length import largest_lr, say_rate
from gradproof.experiments.verdict import Verdict, causes_of, confirmed, excluded, undecided
from gradproof.instruments.arms import find_handling, gradient_at, length, steps_within, train
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import line_of_optimizer

FAMILY = "lr-too-high"
STEPS, FEWEST = 24, 12  # on one batch: of fewer, a rate ten times lower has not come far, be it the right one
LONGEST = 2.0  # seconds for both trainings
# a tenth of the rate leaves at most this share of the loss, and so many times less than the run's own rate
BETTER = (0.7, 1.2)
MUCH_BETTER = (0.5, 2.0)  # half and twice: no luck of a few steps
FIRST, LEARNED = 5, 0.3  # losses that tell where it began; what is left of them once the most is learned
NEARBY = 1e-6  # of the weights' length
AS_TOLD = 0.2  # of the slope that the gradient tells


def can_it_learn_this_batch(evidence: Evidence) -> Iterator[Verdict]:
    """A rate ten times lower that learns the same batch better, from the start of training on: the rate is too high,
    even where the loss still falls. At a rate that suits, a tenth of it is far behind."""
    if not evidence.memory.get("one batch"):
        yield from causes_of([learns_better_at_a_tenth(evidence)])


def learns_better_at_a_tenth(evidence: Evidence) -> Verdict | None:
    handling = find_handling(evidence) if evidence.updates else None
    if handling is None:
        said = "the optimizer is none of PyTorch's own, or sees another gradient than the loss has: there is no control"
        return undecided(FAMILY, said)
    evidence.memory["one batch"] = True
    steps = steps_within(evidence, LONGEST, STEPS)
    if steps < FEWEST:
        return undecided(FAMILY, f"{FEWEST} steps on one batch would take longer than {LONGEST:g} s")
    start, gradients = gradient_at(evidence, {})
    if not falls_as_told(evidence, gradients):
        return undecided(
            FAMILY, "the loss does not change along its gradient as that tells: a part of it is cut off"
        )
    own, tenth = (train(evidence, handling, steps, rate) for rate in (1.0, 0.1))
    evidence.noted["one_batch"] = {"steps": steps, "start": start, "end": min(own, tenth)}
    better = (0 <= tenth < left * start and own > times * tenth for left, times in (BETTER, MUCH_BETTER))
    clear, clearer = better
    if clear and not is_at_the_beginning(evidence, start):
        said = "most of what can be learned is learned: from there on, a lower rate fits any one batch better"
        return undecided(FAMILY, said)
    if not clear:
        said = f"{steps} steps on one batch take the loss from {start:.4g} to {own:.4g}, at a tenth of the rate to "
        return excluded(f"{FAMILY}/tenth-learns-better", f"{said}{tenth:.4g}") if math.isfinite(own) else None
    rate = largest_lr(evidence)
    return confirmed(
        f"{FAMILY}/tenth-learns-better",
        f"{steps} steps on the batch of step {evidence.step} alone take the loss from {start:.4g} to {own:.4g} at "
        f"the learning rate {rate:.1e}, and to {tenth:.4g} at a tenth of it",
        where=line_of_optimizer(evidence) or None,
        fix=f"lower the learning rate: {say_rate(0.1, rate)}, or less, and warm it up",
        level="problem" if clearer else "warning",
        numbers={"lr_factor": 0.1},
        confidence="proven",  # trained both ways
    )


def is_at_the_beginning(evidence: Evidence, loss: float) -> bool:
    """Whether the loss is still much of what it was when the training began; unknown is late."""
    first = evidence.losses[:FIRST]
    known = evidence.step <= len(evidence.losses)
    return evidence.step < FIRST or (known and loss > LEARNED * statistics.median(first))


def falls_as_told(evidence: Evidence, gradients: dict[int, Tensor]) -> bool:
    """Whether the loss changes along its gradient by what the gradient says.

    A part that the gradient was cut from (an advantage, a target from the same network) moves the loss unasked: which
    rate takes such a loss lower says nothing about the rate.
    """
    stepped = {slot: gradients[slot].double() for slot in evidence.tape.stepped if slot in gradients}
    weights = {slot: evidence.tape.leaf_value(slot).double() for slot in stepped}
    told, far = length(stepped.values()), NEARBY * length(weights.values())
    if not told > 0 or not far > 0:
        return False
    along = {slot: far / told * g for slot, g in stepped.items()}
    ways = ({slot: weights[slot] + way * step for slot, step in along.items()} for way in (1, -1))
    up, down = (evidence.loss_at(leaves, dtype=torch.float64) for leaves in ways)
    return abs((up - down) / (2 * far) - told) < AS_TOLD * told
