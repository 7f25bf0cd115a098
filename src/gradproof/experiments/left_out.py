"""Is a class left out of a masked loss? Real positions that never count, all of one class, in the midst of others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.grids import Grid, find_grids, find_padding
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.positions import positions_that_count
from gradproof.tape.operations import Line, Ref

FEWEST = 8  # positions that do not count
MOST = 0.6  # share of the real positions: beyond that it is what counts that is chosen
INSIDE = 0.4  # share of them with positions that count before and behind them: no prompt, no tail
SEEN = 0.1  # share of them whose token counts somewhere else: no special tokens, no second halves of words
OF_TOKENS = 0.9  # share of them that have the next token for their target: a target as it came from the text


def is_a_class_left_out(evidence: Evidence) -> Iterator[Verdict]:
    """`mask = tags > 0` where tag 0 is one of the tags; an ignore_index that is a class."""
    for grid in find_grids(evidence):
        args = grid.comparison.operation.args
        if (len(args) > 2 and isinstance(args[2], Ref)) or lies_the_other_way(grid):
            continue  # a weight for each class is meant so
        counts = positions_that_count(grid)
        found = left_out(grid, counts) if counts is not None and bool(counts.any()) else None
        if found is not None:
            yield describe(grid, *found)
            return


def lies_the_other_way(grid: Grid) -> bool:
    """Rows are padded, columns are not; where nothing is padded, rows are taken to come first."""
    if find_padding(grid.tokens) is not None:
        return False
    return grid.time_first or find_padding(grid.tokens.T) is not None


def left_out(grid: Grid, counts: Tensor) -> tuple[int, int, int, float] | None:
    """(class, positions of it that do not count, real positions, share of those whose token counts elsewhere)."""
    tokens = grid.tokens[:, : grid.targets.shape[1]]
    pad = find_padding(grid.tokens)
    real = torch.ones_like(counts) if pad is None else tokens != pad
    lost = real & ~counts
    number, total = int(lost.sum()), int(real.sum())
    if not FEWEST <= number <= MOST * total:
        return None
    classes = torch.unique(grid.targets[lost])
    left = int(classes[0])
    counted = grid.targets[counts]
    if len(classes) > 1 or not 0 <= left < grid.classes or bool((counted == left).any()):
        return None
    if len(torch.unique(counted)) < 2 or not is_in_the_midst(lost, counts, real):
        return None
    if grid.classes >= grid.vocabulary and (left == pad or share_of_next(grid, lost, left) < OF_TOKENS):
        return None  # a text of which only parts count, the rest marked with a token that is none of it
    seen = float(torch.isin(tokens[lost], tokens[counts]).double().mean())
    return left, number, total, seen


def is_in_the_midst(lost: Tensor, counts: Tensor, real: Tensor) -> bool:
    """Whether positions are lost here and there between others, and not the same ones in every row."""
    before = counts.long().cumsum(1) > 0
    behind = counts.flip(1).long().cumsum(1).flip(1) > 0
    inside = lost & before & behind
    mixed = (lost.any(0) & counts.any(0))[real.sum(0) >= 4]
    return float(inside.sum()) >= INSIDE * float(lost.sum()) and bool(mixed.double().mean() >= 0.5)


def share_of_next(grid: Grid, lost: Tensor, token: int) -> float:
    """How often a token follows, or stands at, the positions whose target it is."""
    length = min(grid.tokens.shape[1] - 1, lost.shape[1])
    chosen = lost[:, :length]
    following, same = grid.tokens[:, 1 : length + 1][chosen], grid.tokens[:, :length][chosen]
    shares = [float((found == token).double().mean()) for found in (following, same) if found.numel()]
    return max(shares, default=0.0)


def describe(grid: Grid, left: int, number: int, total: int, seen: float) -> Verdict:
    line = mask_line(grid) or grid.comparison.operation.line
    how = f"ignore_index is {left}" if grid.ignored == left else "the mask takes them away"
    return confirmed(
        "loss-mask-error/class-left-out",
        f"{number} of {total} real positions ({100 * number / total:.0f} %) do not count in the loss ({how}): all have "
        f"target {left}, one of the {grid.classes} classes, which counts nowhere",
        f"{100 * seen:.0f} % of them hold a token that counts at another position: they are not padding",
        where=place_of("", line),
        fix=f"let class {left} count: mask by the lengths or the input's padding, and give padded targets a number "
        "that is no class (-100)",
        level="problem" if seen >= SEEN else "warning",
        confidence="proven" if seen >= SEEN else "possible",
        lasting=True,
    )


def mask_line(grid: Grid) -> Line | None:
    """Where the mask was made that the losses of the positions are multiplied with or chosen by."""
    flow = grid.evidence.flow
    losses = grid.comparison.operation.makes[0]
    for op in flow.operations:
        reads = flow.reads(op)
        if op.name not in ("mul", "masked_fill", "index", "masked_select", "where") or len(reads) < 2:
            continue
        if losses in {flow.behind(slot, VIEWS) for slot in reads}:
            masks = (flow.behind(slot, VIEWS) for slot in reads if slot not in flow.tracked)
            makers = (flow.maker(mask) for mask in masks)
            return next(
                (maker.line for maker in makers if maker is not None and maker.line is not None), None
            )
    return None
