"""Are the ranks in step? The runs of all ranks lie side by side: their gradients, weights and losses are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts, line_of
from gradproof.errors import UserError
from gradproof.record.run import Run, open_run

FEWEST = 5  # steps that two ranks have in common
SAME = 1e-4  # relative difference that the order of sums explains


def ranks_out_of_step(run: Run) -> Iterator[Symptom]:
    """Gradients that differ after they were meant to be averaged, weights that differ, or the same data for all."""
    if facts(run, "sharded"):
        return  # each rank holds another part of one model: nothing is meant to be equal
    for number, other in other_ranks(run):
        found = compare(run, other, f"rank {run.info.get('rank', 0)}", f"rank {number}")
        if found is not None:
            yield found
            return


def other_ranks(run: Run) -> Iterator[tuple[int, Run]]:
    """The runs of the other ranks of the same training, those that can be read."""
    base = run.path.name.partition(".rank")[0]
    folder = Path(run.path).parent
    for path in (*sorted(folder.glob(f"{base}.rank*")), folder / base):
        suffix = path.name.rpartition(".rank")[2] if ".rank" in path.name else "0"
        if path.name == run.path.name or not suffix.isdecimal() or not path.is_dir():
            continue
        try:
            other = open_run(path)
        except UserError:
            continue
        if len(other) >= FEWEST:
            yield int(suffix), other


def compare(run: Run, other: Run, here: str, there: str) -> Symptom | None:
    gradients = difference(run, other, "grad_norm")
    if gradients is not None and gradients > SAME:
        name = first_different(run, other, "gradient")
        text = f"the optimizers of {here} and {there} see different gradients, {100 * gradients:.2g} % apart in size"
        text += f"; first in {name}" if name else ""
        why, line = why_not_averaged(run)
        suspects = ("distributed-desync/gradients-not-averaged",)
        return Symptom("ranks_differ", "problem", text + why, 0, place(name, line), suspects)
    weights = difference(run, other, "weight_norm")
    if weights is not None and weights > SAME:
        name = first_different(run, other, "weight")
        text = f"the gradients of {here} and {there} agree, their weights do not ({100 * weights:.2g} % apart in size)"
        text += f"; first {name}" if name else ""
        if seed := line_of(run, "manual_seed"):
            text += f". They begin with the random numbers of the seed set at {seed}"
        suspects = ("distributed-desync/initial-weights",)
        return Symptom("ranks_differ", "problem", text, 0, place(name, seed), suspects)
    equal = share_equal(run, other, "loss")
    if equal is not None and equal > 0.9 and gradients is not None:
        text = (
            f"{here} and {there} have the same loss, to the last digit, at {100 * equal:.0f} % of the steps"
        )
        line = line_of(run, "sampler", "loader", "forward")
        return Symptom("ranks_see_the_same", "problem", text, 0, line, ("distributed-desync/same-data",))
    return None


def why_not_averaged(run: Run) -> tuple[str, str | None]:
    """What the script does about averaging, in words, and the line of it."""
    wrapped, without = line_of(run, "ddp"), line_of(run, "no_sync")
    if wrapped and not line_of(run, "synchronised forward"):
        if without:
            return (
                f". Every pass through the DDP model of {wrapped} is inside the no_sync of {without}",
                without,
            )
        forward = line_of(run, "forward")
        return (
            f". The DDP model made at {wrapped} is never called: the forward at {forward} goes around it",
            forward,
        )
    if by_hand := line_of(run, "all_reduce"):
        return f". all_reduce is called at {by_hand}", by_hand
    if wrapped:
        return f". DDP is made at {wrapped}", without or wrapped
    return ". Nothing in the script averages them", line_of(run, "backward", "step")


def place(name: str, line: str | None) -> str | None:
    return f"{name} ({line})" if name and line else name or line


def common(run: Run, other: Run, column: str) -> tuple[np.ndarray, np.ndarray] | None:
    """A column of both runs at the steps that both measured."""
    _, mine, theirs = np.intersect1d(run.steps["step"], other.steps["step"], return_indices=True)
    first, second = run.steps[column][mine], other.steps[column][theirs]
    known = np.isfinite(first) & np.isfinite(second)
    return (first[known], second[known]) if known.sum() >= FEWEST else None


def difference(run: Run, other: Run, column: str) -> float | None:
    """The median relative difference; None where too little was measured."""
    pair = common(run, other, column)
    if pair is None:
        return None
    return float(np.median(np.abs(pair[0] - pair[1]) / (np.abs(pair[0]) + np.abs(pair[1]) + 1e-30)))


def share_equal(run: Run, other: Run, column: str) -> float | None:
    pair = common(run, other, column)
    return None if pair is None else float(np.mean(pair[0] == pair[1]))


def first_different(run: Run, other: Run, kind: str) -> str:
    """The first tensor whose norms differ at the first step that both measured whole."""
    mine, theirs = run.table(kind, "norm"), other.table(kind, "norm")
    steps = np.intersect1d(mine.steps, theirs.steps)
    for name in mine.names if len(steps) else ():
        if name in theirs.names:
            a = mine.values[np.isin(mine.steps, steps), mine.names.index(name)]
            b = theirs.values[np.isin(theirs.steps, steps), theirs.names.index(name)]
            known = np.isfinite(a) & np.isfinite(b)
            if known.any() and np.median(np.abs(a - b)[known] / (np.abs(a) + 1e-30)[known]) > SAME:
                return name
    return ""
