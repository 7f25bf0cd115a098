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
