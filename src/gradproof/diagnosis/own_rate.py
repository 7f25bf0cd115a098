"""The rate of updates by hand, which no optimizer holds: read off how far the parameters move.

Where an update is a multiple of the gradient, its rate is recorded as any other learning rate; this is for the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts, line_of
from gradproof.record.run import Run

NOTHING = 1e-3  # of the longest steps: what is shorter is no training any more
EARLY = 0.6  # of the run


def own_rate_dies(run: Run) -> Iterator[Symptom]:
    """Steps that have become next to nothing, in themselves and beside their gradients, long before the end.

    Beside the gradient alone they shrink with Adam, too, where gradients grow; in themselves they shrink with plain
    descent as the gradient does.
    """
    seen = facts(run, "own_updates")
    if not seen or not len(run) or len(seen["steps"]) < 20 or np.isfinite(run.steps["lr"]).mean() > 0.5:
        return
    change, gradient = (np.array(seen[key], dtype=float) for key in ("change", "gradient"))
    ratio = change / np.where(gradient > 0, gradient, np.nan)
    alive = alive_until(change), alive_until(ratio)
    if max(alive) > EARLY * len(change) or not np.nanmax(change) > 0:
        return
    step, last = seen["steps"][max(alive)], seen["steps"][-1]
    text = (
        f"the updates by hand shrink from {np.nanmax(change):.2g} to {change[-1]:.2g} an entry, gradients from "
        f"{gradient[0]:.2g} to {gradient[-1]:.2g}: from step {step} of {last} on hardly anything moves"
    )
    where = line_of(run, "lr set", "step")
    yield Symptom("dies-early", "problem", text, step, where, ("lr-schedule-error/dies-early",))


def alive_until(values: np.ndarray) -> int:
    """The last place with more than next to nothing of the largest."""
    return int(np.flatnonzero(values >= NOTHING * np.nanmax(values))[-1]) if np.isfinite(values).any() else 0
