"""Does a recurrence remember: does its state, and not its input alone, reach what is learned?"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.record.run import Run

# by which nn.RNN, LSTM, GRU and their cells multiply their last state
STATE_WEIGHTS = re.compile(r"weight_hh(?=_l\d+|$)")
FEWEST_LOOKS = 3


def recurrence_never_used(run: Run) -> Iterator[Symptom]:
    """A recurrence that learns from its inputs and never from its state: of each sequence one step alone is read.

    The gradient of the one is a sum over steps of what comes back times the input, that of the other times the state
    before it. Where only the other is exactly zero, all that comes back comes to the first step, whose state is zero.
    """
    idle = state_weights_without_gradient(run)
    if not idle:
        return
    names = [name for name in idle if name.endswith("_reverse")] or idle
    if names[0].endswith("_reverse"):
        seen = "of the direction that reads from the end, only what it says after its first step (the last one) is used"
    else:
        seen = "each state that is used stands one step after a state of zeros: nothing is remembered"
    text = (
        f"the gradient of {', '.join(names[:3])} is exactly zero at every measured step, that of its inputs is not: "
        f"{seen}"
    )
    suspects = ("axis-or-shape-error/one-step-of-time",)
    yield Symptom("recurrence_never_used", "warning", text, None, names[0], suspects)


def state_weights_without_gradient(run: Run) -> list[str]:
    """Recurrent weights whose gradient is zero at every look, while the same layer's input weights have one at each."""
    table = run.table("gradient", "absmax")
    if len(table.steps) < FEWEST_LOOKS:
        return []
    looks = dict(zip(table.names, table.values.T, strict=True))
    found = []
    for name, values in looks.items():
        partner = looks.get(STATE_WEIGHTS.sub("weight_ih", name))
        if not STATE_WEIGHTS.search(name) or partner is None:
            continue
        both = np.isfinite(values) & np.isfinite(partner)
        if both.sum() >= FEWEST_LOOKS and (values[both] == 0).all() and (partner[both] > 0).all():
            found.append(name)
    return found
