"""Do two loaders go together? Where a loss pairs the batches of two loaders row by row, both must hand out one order.

Two loaders that are not meant as pairs (labelled and unlabelled data, two domains) are in no such loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from gradproof.experiments.verdict import Verdict, confirmed
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.fetched import Fetched, slots_of
from gradproof.instruments.flow import Comparison, Flow
from gradproof.instruments.rows import is_diagonal

ID = "data-target-misaligned/loaders-shuffled-apart"
FEWEST = 8  # rows of a batch


def do_two_loaders_go_together(evidence: Evidence) -> Iterator[Verdict]:
    """Inputs from one loader, targets (or the other half of each pair) from another that shuffles on its own."""
    flow = evidence.flow
    for one, other in permutations([Fetched(**facts) for facts in evidence.facts.fetched], 2):
        alike = one.length == other.length and len(one.rows) == len(other.rows) >= FEWEST
        if not alike or one.rows == other.rows:
            continue
        mine, others = slots_of(flow, one), slots_of(flow, other)
        if not any(is_paired(flow, c, mine, others, len(one.rows)) for c in flow.comparisons):
            continue
        pairs = list(zip(one.rows, other.rows, strict=True))
        wrong, shown = sum(a != b for a, b in pairs), ", ".join(f"{a} with {b}" for a, b in pairs[:4])
        yield confirmed(
            ID,
            f"two loaders hand out the two halves of each pair, of data sets with {one.length} rows each; "
            f"{wrong} of {len(pairs)} pairs of this batch are of different rows: rows {shown}, …",
            where=one.line or None,
            fix="put both into one data set (TensorDataset(a, b), or a Dataset that returns a[i], b[i]) and read it "
            "with one DataLoader(shuffle=True)",
            confidence="proven",  # the rows that each loader handed out
        )
        return


def is_paired(flow: Flow, comparison: Comparison, mine: set[int], others: set[int], count: int) -> bool:
    """Whether row i of one batch is compared with row i of the other, or is to be nearest to it of all."""
    behind, wanted = flow.ancestors(comparison.prediction), flow.ancestors(comparison.target)
    shape = flow.tape.slots[comparison.prediction].shape
    if not mine or not others or mine.isdisjoint(behind) or not shape or shape[0] % count:
        return False
    if others.isdisjoint(wanted):
        return not others.isdisjoint(behind) and shape[0] == count and is_diagonal(flow, comparison)
    return others.isdisjoint(behind) and mine.isdisjoint(wanted) and not flow.is_learned(comparison.target)
