"""Is the average kept? A target network's or an average's new weights that are computed and go nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.averages import find_averages
from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of

TIMES = 2  # later taped steps that average anew, from a tensor that has not changed by one bit


def is_the_average_kept(evidence: Evidence) -> Iterator[Verdict]:
    """Each step computes decay * average + (1 - decay) * weight; at the next one, the average is what it was."""
    found = [average for average in find_averages(evidence) if not average.operation.grad_enabled]
    if not found or any(evidence.slot(average.slot).made_by is not None for average in found):
        return
    now = [evidence.tape.leaf_value(average.slot) for average in found]
    moves = any(
        not value.equal(evidence.tape.leaf_value(average.weight))
        for value, average in zip(now, found, strict=True)
        if evidence.slot(average.weight).made_by is None
    )
    kept = evidence.memory.setdefault("lost average", {"before": [], "times": 0})
    before = kept["before"]
    same = len(before) == len(now) and all(a.equal(b) for a, b in zip(before, now, strict=True))
    kept["times"] = kept["times"] + 1 if same and moves else 0
    kept["before"] = [value.clone() for value in now]
    if kept["times"] >= TIMES:
        operation = found[0].operation
        yield confirmed(
            "weights-state-error/average-thrown-away",
            f"every step averages {len(found)} tensors with the weights (decay {found[0].decay:g}), and {TIMES + 1} "
            "taped steps find them unchanged to the last bit: the result is never written back",
            where=place_of(operation.module, operation.line),
            fix="write the average back in place: target.lerp_(weight, 1 - decay), or target.copy_(...), under no_grad",
            lasting=True,
        )
