"""Tokens and their targets as grids of rows and positions, and where their rows are padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison, Flow
from gradproof.instruments.hearing import how_far, outcome
from gradproof.instruments.walk import CUTS, carry
from gradproof.tape.operations import Operation, Ref

EXACT = 0.98  # of the targets are the token at some lag: but for a few that a script treats apart
WHOLE = 0.95  # of the targets count: but for the ends of sequences
COMMON = 0.6  # of pairs of tokens that are the same by chance: there is little to tell apart
UNHEARD = 1e-3  # of the change of a changed token's own prediction: less is rounding on the way
POINTWISE = {"_log_softmax", "_softmax", "log", "mul", "div", "add", "tanh", "clone", "_to_copy", "detach"}
PICKS = {"index"}  # rows by a mask, or by their numbers


@dataclass
class Grid:
    """A batch of token sequences (rows B, positions T) and what the loss wants at each position.

    Where a loss leaves out some predictions, what it wants of them is `ignored`.
    """

    evidence: Evidence
    comparison: Comparison
    token_slot: int
    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, S), S ≤ T: of the first S positions
    places: Tensor  # of each prediction that is compared: its place in `targets`, counted row by row
    time_first: bool  # how the tokens lie in memory
    vocabulary: int  # rows of the embedding
    classes: int
    ignored: int  # ignore_index

    @property
    def valid(self) -> Tensor:
        return self.targets != self.ignored

    @property
    def is_whole(self) -> bool:
        """Whether every target counts, but for those where the token is padding."""
        left_out = self.tokens[:, : self.targets.shape[1]][~self.valid]
        return float(self.valid.double().mean()) > WHOLE or len(torch.unique(left_out)) == 1

    @cached_property
    def inside(self) -> tuple[int, int]:
        """The row with the most targets that count, and the middle one of them."""
        row = int(self.valid.sum(1).argmax())
        places = self.valid[row].nonzero().flatten()
        return row, int(places[len(places) // 2]) if len(places) else 0

    def by_position(self, rows: Tensor) -> Tensor:
        """One number a row of the prediction, as a grid like `targets`; zero of what is left out."""
        grid = rows.new_zeros(self.targets.numel())
        grid[self.places] = rows.reshape(-1)
        return grid.view_as(self.targets)

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

    @property
    def is_of_next_tokens(self) -> bool:
        return self.share_at(1) >= EXACT

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
        flow, ends = self.evidence.flow, [self.comparison.prediction]
        moved = how_far(outcome(flow, ends), outcome(flow, ends, {self.token_slot: changed}))
        found = moved.get(ends[0])
        return None if found is None else (changed, self.by_position(found.amax(self.comparison.axis)))


def find_grids(evidence: Evidence, by_hand: bool = False) -> Iterator[Grid]:
    """Every pair of an embedded token sequence and the targets of a classification at each of its positions.

    by_hand: also of losses that pick the entry of the right class themselves.
    """
    flow = evidence.flow
    # a packed sequence is written back into a padded one, and its way to the loss is lost there
    trained = (op for op in flow.forward if op.grad_enabled)
    looked_up = find_tokens(flow, flow.operations) or find_tokens(flow, trained)
    known = [c for c in flow.comparisons if c.kind == "class" and isinstance(c.operation.args[1], Ref)]
    for comparison in [*known, *(flow.picked if by_hand else ())]:
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
    slots = flow.tape.slots
    pairs = [(looked, slots[table].shape[0]) for op in operations for table, looked in _lookups(flow, op)]
    return {slot: size for slot, size in pairs if len(slots[slot].shape) == 2}


def _lookups(flow: Flow, op: Operation) -> list[tuple[int, int]]:
    """The table and what is looked up in it: by an embedding, or by hand, table[tokens]."""
    if op.name == "embedding":
        return [(op.args[0].slot, op.args[1].slot)]
    if op.name != "index" or len(op.args[1]) != 1 or op.args[0].slot not in flow.weights:
        return []
    whole = not flow.tape.slots[op.args[1][0].slot].dtype.is_floating_point
    return [(op.args[0].slot, op.args[1][0].slot)] if whole else []


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
    places = places_of(evidence.flow, comparison, count, length, time_first)
    if places is None or len(places) != targets.numel() or len(torch.unique(places)) < len(places):
        return None
    places = places.to(targets.device)
    args = comparison.operation.args
    ignored = args[4] if len(args) > 4 and isinstance(args[4], int) else -100
    wide = int((places % length).max()) + 1
    places = torch.div(places, length, rounding_mode="floor") * wide + places % length
    wanted = targets.new_full((count * wide,), ignored)
    wanted[places] = targets.reshape(-1)
    classes = evidence.slot(comparison.prediction).shape[comparison.axis]
    return Grid(
        evidence, comparison, slot, rows, wanted.view(count, wide), places, time_first, vocabulary, classes, ignored
    )  # fmt: skip


def places_of(flow: Flow, comparison: Comparison, count: int, length: int, time_first: bool) -> Tensor | None:
    """Of each prediction that is compared, its place among all: row · length + position.

    Where the network's predictions still stand for every position, each is given its number, and what cuts, views and
    masks do to predictions is done to these.
    """
    path: list[Operation] = []
    origin, after = None, 0
    slot: int | None = comparison.prediction
    while slot is not None:
        shape = flow.tape.slots[slot].shape
        numbers = number_places(shape, count, length, time_first)
        if numbers is not None:
            origin, after = numbers, len(path)
        op = flow.maker(slot)
        before = flow.reads(op)[0] if op is not None and flow.reads(op) else None
        if op is None or before is None or op.writes:
            break
        same = op.name in POINTWISE and flow.tape.slots[before].shape == shape
        if not same and op.name not in CUTS | PICKS:
            break
        path.append(op)
        slot = before
    if origin is None:
        return in_order(flow, comparison, count, length, time_first)
    for op in reversed(path[:after]):
        if op.name in PICKS:
            chosen = [each.slot for each in op.args[1] if isinstance(each, Ref)]
            known = flow.values(chosen)
            if len(known) < len(set(chosen)):
                return None
            picks = [known[each.slot].cpu() if isinstance(each, Ref) else None for each in op.args[1]]
            origin = torch.ops.aten.index(origin, picks)
        else:
            origin = carry(flow, [op], origin)
    return origin.select(comparison.axis, 0).reshape(-1)


def number_places(shape: tuple[int, ...], count: int, length: int, time_first: bool) -> Tensor | None:
    """Predictions for every position of every row, one behind the other or along axes of their own.

    >>> number_places((6, 9), 2, 3, False)[:, 0], number_places((3, 2, 9), 2, 3, True)[..., 0].tolist()
    (tensor([0, 1, 2, 3, 4, 5]), [[0, 3], [1, 4], [2, 5]])
    """
    if len(shape) < 2:
        return None
    numbers = torch.arange(count * length).view(count, length)
    lying = numbers.T if time_first else numbers
    rest = len(shape) - 2
    if shape[0] == count * length:
        return lying.reshape(-1, *[1] * (rest + 1)).expand(shape)
    if rest and tuple(shape[:2]) == tuple(lying.shape):
        return lying.reshape(*lying.shape, *[1] * rest).expand(shape)
    if rest and (shape[0], shape[-1]) == (count, length):  # classes between the two
        return numbers.reshape(count, *[1] * rest, length).expand(shape)
    return None


def in_order(flow: Flow, comparison: Comparison, count: int, length: int, time_first: bool) -> Tensor | None:
    """Of predictions that are made for all positions but the last."""
    shape = flow.tape.slots[comparison.prediction].shape
    if shape[0] != count * (length - 1):
        return None
    numbers = torch.arange(count * length).view(count, length)[:, :-1]
    return (numbers.T if time_first else numbers).reshape(-1)


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
