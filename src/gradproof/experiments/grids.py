"""Tokens and their targets as grids of rows and positions, and where their rows are padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence
from gradproof.experiments.flow import Comparison, Flow
from gradproof.tape.operations import Operation, Ref


@dataclass
class Grid:
    """A batch of token sequences (rows B, positions T) and what the loss wants at each position."""

    evidence: Evidence
    comparison: Comparison
    token_slot: int
    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, S), S ≤ T: of the first S positions
    time_first: bool  # how both lie in memory
    vocabulary: int  # rows of the embedding
    classes: int
    ignored: int  # ignore_index

    @property
    def valid(self) -> Tensor:
        return self.targets != self.ignored

    def by_position(self, rows: Tensor) -> Tensor:
        """One number a row of the prediction, as a grid like `targets`."""
        flat, (count, length) = rows.reshape(-1), self.targets.shape
        return flat.reshape(length, count).T if self.time_first else flat.reshape(count, length)

    def share_at(self, lag: int) -> float:
        """How often the target at a position is the token `lag` positions further on; of valid targets."""
        length = self.targets.shape[1]
        places = [i for i in range(length) if 0 <= i + lag < self.tokens.shape[1]]
        if not places:
            return 0.0
        wanted, seen = self.targets[:, places], self.tokens[:, [i + lag for i in places]]
        valid = self.valid[:, places]
        count = int(valid.sum())
        return float(((wanted == seen) & valid).sum()) / count if count >= 8 else 0.0

    @cached_property
    def chance(self) -> float:
        """How often two tokens are the same by chance."""
        _, counts = torch.unique(self.targets[self.valid], return_counts=True)
        shares = counts.double() / counts.sum().clamp(min=1)
        return float((shares**2).sum())

    def perturb(self, row: int, position: int) -> tuple[Tensor, Tensor] | None:
        """The tokens (as they lie in memory) with one changed, and how much each prediction changes by it."""
        old = int(self.tokens[row, position])
        others = self.tokens[(self.tokens != old) & (self.tokens != (find_padding(self.tokens) or -1))]
        if not len(others):
            return None
        tokens = self.tokens.clone()
        tokens[row, position] = torch.mode(others).values
        changed = tokens.T.contiguous() if self.time_first else tokens
        slot = self.comparison.prediction
        before = self.evidence.flow.outcome([slot]).get(slot)
        after = self.evidence.flow.outcome([slot], {self.token_slot: changed}).get(slot)
        if before is None or after is None:
            return None
        change = (after.double() - before.double()).abs()
        change = torch.where(torch.isfinite(change), change, 0.0).amax(1)
        return changed, self.by_position(change)


def find_grids(evidence: Evidence) -> Iterator[Grid]:
    """Every pair of an embedded token sequence and the targets of a classification at each of its positions."""
    flow = evidence.flow
    # a packed sequence is written back into a padded one, and its way to the loss is lost there
    trained = (op for op in flow.forward if op.grad_enabled)
    looked_up = find_tokens(flow, flow.operations) or find_tokens(flow, trained)
    for comparison in flow.comparisons:
        if comparison.kind != "class" or not isinstance(comparison.operation.args[1], Ref):
            continue
        found = flow.values([*looked_up, comparison.target])
        targets = found.get(comparison.target)
        for slot, vocabulary in looked_up.items():
            tokens = found.get(slot)
            if targets is None or tokens is None:
                continue
            for time_first in (False, True):
                grid = _grid(evidence, comparison, slot, tokens, targets, time_first, vocabulary)
                if grid is not None:
                    yield grid


def find_tokens(flow: Flow, operations: Iterable[Operation]) -> dict[int, int]:
    """Slots of token grids, and how many different tokens the table has that they are looked up in."""
    found = [op for op in operations if op.name == "embedding"]
    pairs = [(op.args[1].slot, flow.tape.slots[op.args[0].slot].shape[0]) for op in found]
    return {slot: size for slot, size in pairs if len(flow.tape.slots[slot].shape) == 2}


def _grid(
    evidence: Evidence,
    comparison: Comparison,
    slot: int,
    tokens: Tensor,
    targets: Tensor,
    time_first: bool,
    vocabulary: int,
) -> Grid | None:
    rows = tokens.T if time_first else tokens
    count, length = rows.shape
    if length < 4 or bool((rows == rows[0]).all()):
        return None  # position numbers, or too short to tell
    for size in (length, length - 1):
        if targets.numel() == count * size:
            flat = targets.reshape(-1)
            shaped = flat.reshape(size, count).T if time_first else flat.reshape(count, size)
            args = comparison.operation.args
            ignored = args[4] if len(args) > 4 and isinstance(args[4], int) else -100
            classes = evidence.slot(comparison.prediction).shape[1]
            return Grid(evidence, comparison, slot, rows, shaped, time_first, vocabulary, classes, ignored)
    return None


def find_padding(rows: Tensor, front: bool = True) -> int | None:
    """The token that fills up the ends (or fronts) of rows of different lengths and stands nowhere else.

    Rows that are sorted have their smallest or largest tokens there by nature.
    """
    steps = rows.diff(dim=1)
    if bool((steps >= 0).all()) or bool((steps <= 0).all()):
        return None
    for grid in (rows, rows.flip(1))[: 1 + front]:
        pad = int(torch.mode(grid[:, -1]).values)
        is_pad = grid == pad
        trailing = is_pad.flip(1).long().cumprod(1).flip(1).bool()
        lengths = trailing.sum(1)
        padded = int((lengths > 0).sum())
        if (
            bool((is_pad == trailing).all())
            and padded * 4 >= len(grid)
            and int(lengths.max()) >= 2
            and len(torch.unique(lengths)) >= 2
            and int(lengths.sum()) > len(grid) // 2
        ):
            return pad
    return None
