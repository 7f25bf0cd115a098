"""A loss that leaps where one of many data files begins, and stays up: that file is not like the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts
from gradproof.diagnosis.series import Track, tracks, turn
from gradproof.record.run import Run

FEWEST = 4  # files of one kind that were begun one after the other: of fewer, none is the exception
NEAR = 3  # steps between a file and the leap: where a leap begins is known to a few steps
BY_CHANCE = 0.1  # of all steps that are so near to some file: of more, nearness says nothing
OTHERS = 0.25  # of the leap: where other files move the loss as far, it is how the files follow each other


def leaps_at_a_file(run: Run) -> Iterator[Symptom]:
    """Of shards read one after the other, the one at which the loss leaves its course."""
    kinds: dict[str, dict[str, int]] = defaultdict(dict)
    for file, step in (facts(run, "opened") or {}).items():
        kinds[re.sub(r"\d+", "#", file)][file] = step
    for track in tracks(run):
        found = turn(track.loss)
        if found is None or not found.leaps:
            continue
        leap, rise = int(track.steps[found.place]), found.after - found.before
        for files in kinds.values():
            begun = sorted({step for step in files.values() if step > 0})
            near = [step for step in begun if abs(step - leap) <= NEAR]
            if len(begun) < FEWEST or not near or (2 * NEAR + 1) * len(begun) > BY_CHANCE * len(track.steps):
                continue
            if any(moves(track, step) > OTHERS * rise for step in begun if step < near[0]):
                continue
            name = next(file for file, step in files.items() if step == near[0])
            text = f"the loss leaps at step {leap}, from {found.before:.4g} to {found.after:.4g}, where {name} was "
            text += (
                f"opened (step {near[0]}); at the {len(begun) - len(near)} other files like it, it does not"
            )
            yield Symptom(
                "leaps_at_a_file", "warning", text, leap, name, ("data-target-misaligned/from-a-file-on",)
            )
            break


def moves(track: Track, step: int) -> float:
    """How far the loss goes up where a file begins."""
    at = int(np.searchsorted(track.steps, step))
    before, after = track.loss[max(0, at - 50) : at], track.loss[at : at + 50]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    return float(np.median(after) - np.median(before)) if len(before) and len(after) else 0.0
