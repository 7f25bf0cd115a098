"""Do positions run along the sequence? Numbers that a step counts for itself and looks up beside its tokens."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of

FEWEST = 4  # samples, positions
COUNTERS = ("cumsum", "arange")


def do_positions_run_along_the_sequence(evidence: Evidence) -> Iterator[Verdict]:
    """Position numbers (B, T) that go up by one from sample to sample say nothing about the order of a sequence."""
    flow = evidence.flow
    batches = {evidence.slot(c.target).shape for c in flow.comparisons}
    for op in evidence.forward:
        if op.name != "embedding" or len(op.reads) < 2:
            continue
        shape = evidence.slot(op.reads[1]).shape
        # one answer a sample says which axis the samples are on
        if len(shape) != 2 or min(shape) < FEWEST or shape[0] == shape[1] or (shape[0],) not in batches:
            continue
        behind = flow.ancestors(op.reads[1])
        counters = [o for o in evidence.forward if o.name in COUNTERS and not behind.isdisjoint(o.makes)]
        numbers = evidence.values([op.reads[1]]).get(op.reads[1])
        if counters and numbers is not None and runs_along_the_batch(numbers):
            yield confirmed(
                "axis-or-shape-error/positions-along-the-batch",
                f"the positions (shape {tuple(shape)}) looked up beside the tokens go from {int(numbers[0, 0])} "
                f"to {int(numbers[-1, 0])} over the {shape[0]} samples, and from {int(numbers[0, 0])} to "
                f"{int(numbers[0, -1])} over the {shape[1]} places of the first",
                where=place_of(counters[-1].module, counters[-1].line),
                fix="count along the sequence: cumsum(dim=1), or arange(T) for every sample",
                lasting=True,
            )
            return


def runs_along_the_batch(numbers: Tensor) -> bool:
    """Up by one or not at all from each sample to the next, mostly by one; hardly ever from place to place."""
    down, along = numbers.diff(dim=0), numbers.diff(dim=1)
    steady = bool(((down == 0) | (down == 1)).all()) and int(numbers[0].max()) <= 1
    return steady and float((down == 1).double().mean()) > 0.5 and float((along == 1).double().mean()) < 0.25
