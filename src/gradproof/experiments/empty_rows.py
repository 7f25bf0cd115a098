"""Does every sequence count? Short sequences of a padded batch in which no position has a target.

A mask that is counted from the end of the padded row, `labels[i, :-len(answer)] = -100`, leaves only padding of all but
the longest. Sequences that lost their answers because they were cut off are the longest of a batch, not the shortest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import place_of_data
from gradproof.experiments.grids import Grid, find_grids, find_padding
from gradproof.experiments.positions import positions_that_count
from gradproof.experiments.provenance import read
from gradproof.tape.operations import Line

ID = "loss-mask-error/sequences-without-targets"
FEWEST = 8  # rows without targets
MANY = 0.5  # of the rows: more than a few that are too short for anything
SHORTER = 0.95  # of the pairs of a row without and one with targets, the first is the shorter


def does_every_sequence_count(evidence: Evidence) -> Iterator[Verdict]:
    """Next tokens of padded rows: how many rows have none that counts, and whether it is the short ones."""
    for grid in find_grids(evidence):
        pad = find_padding(grid.tokens, front=False) if grid.share_at(1) >= 0.98 else None
        if pad is None:
            continue
        counts = grid.valid & (grid.targets != pad)
        if not is_averaged(grid):  # a mask may follow
            found = positions_that_count(grid)
            counts = counts if found is None else counts & found
        yield from verdict_on(grid, (grid.tokens != pad).sum(1), counts.any(1))
        return


def is_averaged(grid: Grid) -> bool:
    args = grid.comparison.operation.args
    return len(args) > 3 and args[3] in (1, 2)


def verdict_on(grid: Grid, lengths: Tensor, counted: Tensor) -> Iterator[Verdict]:
    empty, full = lengths[~counted], lengths[counted]
    if not len(empty):
        yield excluded(ID, f"each of {len(lengths)} sequences has a position that counts")
        return
    if len(empty) < max(FEWEST, MANY * len(lengths)) or not len(full):
        return
    shorter = float((empty[:, None] < full[None, :]).double().mean())
    if shorter < SHORTER or int(empty.max()) >= grid.tokens.shape[1]:
        return
    line = masking_line(grid)
    yield confirmed(
        ID,
        f"{len(empty)} of {len(lengths)} sequences have no position that counts in the loss, and they are the short "
        f"ones: {int(empty.min())} to {int(empty.max())} tokens, the others {int(full.min())} to {int(full.max())}, "
        f"padded to {grid.tokens.shape[1]}",
        "so it is with a mask that is counted from the end of the padded row: there short sequences have only padding",
        where=place_of_data(line) if line else grid.evidence.flow.origin(grid.comparison.target),
        fix="count from the front, labels[i, :len(prompt)] = -100, or from the end of the text, not of the padding",
        confidence="likely",
        lasting=True,
    )


def masking_line(grid: Grid) -> Line | None:
    """Where targets are set to what is ignored: the last such write on the tape, or the only one of the source."""
    flow, slots = grid.evidence.flow, grid.evidence.tape.slots
    behind = {slots[slot].storage for slot in flow.ancestors(grid.comparison.target)}
    for op in reversed(flow.forward):
        filled = any(isinstance(a, (int, float)) and a == grid.ignored for a in op.args)
        if filled and op.line is not None and any(slots[slot].storage in behind for slot in op.writes):
            return op.line
    return line_of_source(grid)


def line_of_source(grid: Grid) -> Line | None:
    line = grid.comparison.operation.line
    if line is None:
        return None
    try:
        tree = read(line.file).tree
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and ast.unparse(node.value) == str(grid.ignored)
    ]
    return Line(line.file, found[0], "<mask>") if len(found) == 1 else None
