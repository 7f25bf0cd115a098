"""Do missing entries count? One value that fills a target's gaps, apart from all others, and is learned with them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import Comparison
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.provenance import say_where_made
from gradproof.tape.replay import differentiate

ID = "loss-mask-error/missing-entries-count"
FEWEST = 64  # entries that are not filled
SHARE = (0.1, 0.98)  # of the entries that hold the one value
DIFFERENT = 0.3  # of the others are different numbers: measured, not counted or classified
APART = 20  # typical distances between neighbours among the others
OUTSIDE = 10  # ranges of the others away: nobody measures that


def do_missing_entries_count(evidence: Evidence) -> Iterator[Verdict]:
    """Ratings of 1 to 5 with 0 for none, measurements with -999 for none; one-hot rows and sparse signals are not."""
    for comparison in evidence.flow.comparisons:
        if comparison.kind != "value":
            continue
        target = evidence.flow.values([comparison.target]).get(comparison.target)
        found = None if target is None else find_filling(target.detach())
        if target is None or found is None:
            continue
        value, share, gap, outside = found
        counting = share_that_counts(evidence, comparison, target == value)
        if counting < 0.9:
            return
        yield confirmed(
            ID,
            f"{100 * share:.0f} % of the {target.numel()} target entries are exactly {value:g}; the others are "
            f"{gap:.3g} or more away from it, and hardly two the same: missing entries?",
            f"{100 * counting:.0f} % of those entries have a gradient: the loss learns {value:g} there",
            *say_where_made(evidence, comparison.target, comparison.operation.line, target=True),
            where=place_of("", comparison.operation.line),
            fix=f"let them not count: mask = target != {value:g}; (loss * mask).sum() / mask.sum()",
            level="problem" if outside else "warning",
            confidence="likely" if outside or are_scattered(target == value) else "possible",
        )
        return


def find_filling(target: Tensor) -> tuple[float, float, float, bool] | None:
    """(the one value, its share, how far the next one is, whether that is outside of anything measured)."""
    flat = target.flatten().double()
    if not target.is_floating_point() or flat.numel() < 2 * FEWEST or not bool(flat.isfinite().all()):
        return None
    value = torch.mode(flat).values
    rest = flat[flat != value].sort().values
    share = 1 - len(rest) / len(flat)
    if len(rest) < FEWEST or not SHARE[0] < share < SHARE[1]:
        return None
    different = torch.unique(rest)
    if len(different) < DIFFERENT * len(rest) or is_inside(value, different):
        return None
    gap, usual = float((different - value).abs().min()), float(different.diff().median())
    span = float(different[-1] - different[0])
    # a signal that is cut off at 0 comes near it; so do the dark pixels of a picture
    if gap < APART * usual or gap < 0.1 * span:
        return None
    return float(value), share, gap, gap > OUTSIDE * span


def is_inside(value: Tensor, different: Tensor) -> bool:
    """A value amid the others is the most common measurement; zeros between signs may be silence."""
    return bool(different[0] < value) and bool(value < different[-1])


def share_that_counts(evidence: Evidence, comparison: Comparison, filled: Tensor) -> float:
    slot = comparison.prediction
    gradient = differentiate(evidence.tape, gradients_at=[slot]).slot_gradients.get(slot)
    if gradient is None or gradient.numel() != filled.numel():
        return 0.0
    return float((gradient.reshape(filled.shape) != 0)[filled].double().mean())


def are_scattered(filled: Tensor) -> bool:
    """Whether an entry tells nothing of its neighbour: the background of a picture hangs together."""
    rows = filled.reshape(-1, filled.shape[-1]).double()
    if rows.shape[1] < 2:
        return False
    a, b = rows[:, :-1] - rows[:, :-1].mean(), rows[:, 1:] - rows[:, 1:].mean()
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return scale > 0 and abs(float((a * b).sum())) < 0.3 * scale
