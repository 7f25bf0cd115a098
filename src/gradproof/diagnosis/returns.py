"""Trained weights that are put back, again and again, to one and the same state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts
from gradproof.record.run import Run


def weights_put_back(run: Run) -> Iterator[Symptom]:
    """What was learned is thrown away each time; a state that changes between two returns is kept by something.

    A model that takes part in training and holds that state is a target network: it should get the weights, not give
    them. Where the state was only kept, each return may begin another task: not with the moments of the last one.
    """
    found = facts(run, "returns")
    if not found or found["times"] < 0.9 * found["writes"]:
        return
    steps, source = found["steps"], found["source"]
    every = float(np.median(np.diff(steps)))
    called = (facts(run, "copies_called") or {}).get(source["shapes"] if source else "") or {}
    taking_part = called.get("times", 0) > 0.3 * len(run)
    if not taking_part and found["times"] < 3:
        return
    if every < 2 and not found["loaded"]:  # weights that are kept inside of bounds, and lie on them
        return
    state = (
        "those that the run began with" if found["initial"] else f"those that were there at step {steps[0]}"
    )
    text = (
        f"{found['times']} times, every {every:.0f} steps, all trained weights become exactly {state}: "
        "what was learned in between is lost"
    )
    if source:
        text += f"; a {source['class']} that is not trained holds the same weights"
        text += f", and is called at {called['line']}" if called else ""
    problem = taking_part or (found["initial"] and found["moments"])
    suspects = ("weights-state-error/put-back",)
    level = "problem" if problem else "warning"
    yield Symptom("weights_put_back", level, text, steps[0], found["line"] or None, suspects)


def average_stays(run: Run) -> Iterator[Symptom]:
    """An average that is put in the weights' place (for a validation, say), and training goes on from it.

    It lags behind: each time, most of what the weights have gone since the last time is lost. Only where an average
    follows the weights at every step: who goes back to slow weights on purpose has no other average.
    """
    found, average = facts(run, "taken_back"), facts(run, "average")
    if not found or not average or len(found["shares"]) < 3:
        return
    if float(np.median([decay for _, decay in average["decays"]])) < 0.9:  # slow weights, not an average
        return
    share, every = float(np.median(found["shares"])), float(np.median(np.diff(found["steps"])))
    if 0.5 < share < 1.5 and every >= 2:
        text = (
            f"{len(found['shares'])} times, every {every:.0f} steps, the trained weights are written over, and "
            f"{100 * share:.0f} % of the way that they had gone since the last time is lost; an average is kept, "
            "and training goes on from it"
        )
        suspects = ("weights-state-error/average-stays",)
        yield Symptom("average_stays", "problem", text, found["steps"][0], found["line"] or None, suspects)
