"""Copies of the trained model that are evaluated with statistics that nobody has copied."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts
from gradproof.record.run import Run

LATE = 20  # steps after which the trained model's statistics have left their start
SHIFT, RATIO = 0.5, 1.5  # standard deviations, times the variance: what changes predictions


def statistics_left_behind(run: Run) -> Iterator[Symptom]:
    """An average or a copy of the weights whose BatchNorms still have the statistics that they were made with.

    One whose weights stand still, too, is whole: a reference, or a random network. A teacher that is called at most
    steps may have been meant so.
    """
    average = facts(run, "average") or {}
    for copy in facts(run, "copies") or ():
        if copy["step"] < LATE or not (copy["shift"] >= SHIFT or copy["ratio"] >= RATIO):
            continue
        averaged = str(average.get("shapes")) == copy["shapes"]
        stale = copy["untouched"] or (copy["still"] and copy["times"] >= 2)
        if not ((copy["follows"] or averaged) and stale):
            continue
        what = (
            "mean 0 and variance 1, as they were made"
            if copy["untouched"]
            else "what they were at its first call"
        )
        text = (
            f"{copy['class']}, a copy that follows the trained weights, is evaluated ({copy['line']}, step "
            f"{copy['step']}) with BatchNorms whose running statistics are {what}; those of the trained model have "
            f"moved: at {copy['norm']} the mean is {copy['shift']:.2g} standard deviations off, the variance "
            f"{copy['ratio']:.2g} times"
        )
        level = "warning" if copy["times"] > 0.6 * len(run) else "problem"
        where = average["where"] if averaged else copy["line"]
        suspects = ("weights-state-error/statistics-not-copied",)
        yield Symptom("statistics_left_behind", level, text, None, where or None, suspects)
        return
