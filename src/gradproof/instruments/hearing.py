"""Who hears whom: one unit of the input is exchanged for another one of the batch, and what moves by it is measured.

A unit is what lies at one place along an axis: a sample, a position, a channel. The step is replayed as it was and with
the unit exchanged, in float64: everything else, its random numbers too, is the same to the last bit.

    heard = who_hears_whom(evidence)        # samples of the inputs against rows of the prediction
    heard[3, 5] / heard.max()               # what exchanging sample 3 does to prediction 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, Flow
from gradproof.tape.operations import Operation, Ref
from gradproof.tape.replay import Player

FINE = torch.float64
CHANGED = 1e-5  # of a tensor's largest entry: what a float32 that was stored on the way may lose
MOST_BYTES = 400_000_000  # kept of one replay, to hold another against it
MOST_UNITS = 64  # exchanged one after the other: each is a replay
SORTS = {"sort", "argsort"}
BATCH_NORMS = (
    "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm",
    "_batch_norm_with_update", "batch_norm_update_stats",
)  # fmt: skip

Look = Callable[[Player, Operation], None]
# (changed elements of a result) -> kept to its place? None when the shape does not tell
Confined = Callable[[Tensor], bool | None]


def who_hears_whom(
    evidence: Evidence, axis: int = 0, end: int | None = None, end_axis: int = 0, at_most: int = MOST_UNITS
) -> Tensor:
    """(units, places): how far each place of a prediction moves, at most, when one unit of the inputs is exchanged.

    Empty where nothing can be exchanged. BatchNorm's statistics are held: by them everybody hears everybody.
    """
    flow = evidence.flow
    ends = [end] if end is not None else predictions_of(flow)[:1]
    slots = alike_along(flow, axis)
    count = flow.tape.slots[slots[0]].shape[axis] if slots and ends else 0
    statistics = Statistics(flow)
    before = outcome(flow, ends, look=statistics.keep) if count > 1 else {}
    rows = []
    for unit in range(min(count, at_most)):
        leaves = exchange(flow, slots, axis, unit, (unit + count // 2) % count)
        moved = how_far(before, outcome(flow, ends, leaves, statistics.put_back))
        rows += [along(moved[slot], [end_axis]) for slot in ends if slot in moved]
    return torch.stack(rows) if rows else torch.zeros(0, 0)


def predictions_of(flow: Flow) -> list[int]:
    """What the loss compares with targets; where it compares nothing, what the last weights make."""
    return list(dict.fromkeys(c.prediction for c in flow.comparisons)) or flow.predictions


def alike_along(flow: Flow, axis: int) -> list[int]:
    """The inputs that have as many units along an axis as the first one has."""
    slots = [slot for slot in flow.inputs if len(flow.tape.slots[slot].shape) > axis]
    return [s for s in slots if flow.tape.slots[s].shape[axis] == flow.tape.slots[slots[0]].shape[axis]]


def exchange(flow: Flow, slots: Iterable[int], axis: int, unit: int, other: int) -> dict[int, Tensor]:
    """Some inputs, in each of which one unit is what another is; none where both are the same."""
    leaves, differs = {}, False
    for slot, value in flow.values(slots).items():
        leaves[slot] = value.clone()
        differs = differs or not torch.equal(value.select(axis, unit), value.select(axis, other))
        leaves[slot].select(axis, unit).copy_(value.select(axis, other))
    return leaves if differs else {}


def outcome(
    flow: Flow, ends: Iterable[int], leaves: Mapping[int, Tensor] | None = None, look: Look | None = None
) -> dict[int, Tensor]:
    """What some slots hold after the whole forward pass in float64, with other values in some slots."""
    return flow.as_numbers(flow.play(flow.forward, leaves, keep=ends, after=look, dtype=FINE).replay.values)


def how_far(before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """How far each entry has moved; what is not finite on one side has not."""
    both = [slot for slot in before if slot in after and before[slot].shape == after[slot].shape]
    return {s: torch.nan_to_num((after[s].double() - before[s].double()).abs(), 0.0, 0.0, 0.0) for s in both}


def who_moves(
    flow: Flow,
    ends: list[int],
    leaves: Mapping[int, Tensor],
    keep: Look | None = None,
    hold: Look | None = None,
) -> dict[int, Tensor]:
    """Which entries of some slots are others with these leaves; `keep` looks at the step as it was, `hold` at this."""
    before, after = outcome(flow, ends, look=keep), outcome(flow, ends, leaves, hold)
    return {slot: has_changed(before[slot], after[slot]) for slot in ends if slot in before and slot in after}


def along(values: Tensor, dims: list[int]) -> Tensor:
    """The largest along all axes but some; of true and false, whether any is true."""
    others = [dim for dim in range(values.dim()) if dim not in [d % values.dim() for d in dims]]
    return values.amax(dim=others) if others else values


class Statistics:
    """What each BatchNorm takes from the batch: held, so that a changed sample does not reach the others by it."""

    def __init__(self, flow: Flow) -> None:
        norms = [op for op in flow.operations if op.name in BATCH_NORMS and _is_training(op)]
        self.out_of_reach = any(len(op.makes) < 3 for op in norms)
        self.held = ", BatchNorm's statistics held" if norms else ""
        self._norms = {op.index for op in norms}
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    def keep(self, player: Player, op: Operation) -> None:
        if op.index in self._norms and player.env.keys() >= set(op.makes[1:3]):
            self._kept[op.index] = tuple(player.env[slot].clone() for slot in op.makes[1:3])

    def put_back(self, player: Player, op: Operation) -> None:
        if op.index not in self._kept:
            return
        x = player.value(op.reads[0])
        mean, inverse = (kept.reshape(1, -1, *[1] * (x.dim() - 2)) for kept in self._kept[op.index])
        y = (x - mean) * inverse
        for place, combine in ((1, Tensor.mul), (2, Tensor.add)):
            part = op.args[place]
            if isinstance(part, Ref):
                y = combine(y, player.value(part.slot).reshape(mean.shape))
        player.env[op.makes[0]] = y


def _is_training(op: Operation) -> bool:
    flags = [arg for arg in op.args if isinstance(arg, bool)]
    return not flags or flags[0] or op.name in ("batch_norm_update_stats", "_batch_norm_with_update")


class HeldOrders:
    """Whole rows that are taken in an order which the network itself has sorted out: held as it was, so that who goes
    where (to which expert, say) does not change with what one sample says."""

    def __init__(self, flow: Flow) -> None:
        sorted_out = {slot for op in flow.forward if op.name in SORTS for slot in flow.makes(op)}
        taken = {
            op.index: flow.reads(op)[-1] for op in flow.operations if op.name in ("index", "index_select")
        }
        taken = {at: order for at, order in taken.items() if flow.behind(order, ALIASES) in sorted_out}
        known = flow.values(set(taken.values())) if taken else {}
        rows = {at: known[order] for at, order in taken.items() if order in known}
        self._orders = {at: order for at, order in rows.items() if order.dim() == 1}
        seen: set[int] = set()
        self.again: set[int] = set()  # where an order is used that rows have been taken by before
        for at in sorted(self._orders):
            self.again.update([at] if taken[at] in seen else [])
            seen.add(taken[at])

    def astray(self, count: int) -> int | None:
        """A sample of so many that comes back to another place than its own where an order is used again."""
        for order in (self._orders[at] for at in sorted(self.again)):
            moved = (order[order] != torch.arange(len(order), device=order.device)).nonzero().flatten()
            if count and len(moved) and len(order) % count == 0:
                return int(moved[0]) * count // len(order)
        return None

    def put_back(self, player: Player, op: Operation) -> None:
        if op.index in self._orders:
            self._take(player, op, self._orders[op.index])

    def put_back_by_the_inverse(self, player: Player, op: Operation) -> None:
        if op.index in self.again:
            self._take(player, op, self._orders[op.index].argsort())
        else:
            self.put_back(player, op)

    def _take(self, player: Player, op: Operation, order: Tensor) -> None:
        rows, made = player.value(op.reads[0]), player.env[op.makes[0]]
        if len(rows) == len(order) and rows.shape == made.shape:
            player.env[op.makes[0]] = rows[order.to(rows.device)]


def find_first_spread(
    flow: Flow, leaves: dict[int, Tensor], confined: Confined, look: Look = lambda player, op: None
) -> Operation | None:
    """The first operation whose operands keep a change to its place, and whose result does not.

    `look` may put right what an operation has made of the change, before anybody else looks at it.
    """
    before: dict[int, list[Tensor]] = {}
    found: list[Operation] = []
    size = 0

    def keep(player: Player, op: Operation) -> None:
        nonlocal size
        if size < MOST_BYTES:
            before[op.index] = [player.env[s].detach().float() for s in made_by(player, op)]
            size += sum(4 * value.numel() for value in before[op.index])

    def compare(player: Player, op: Operation) -> None:
        look(player, op)
        for slot, old in zip(made_by(player, op), before.get(op.index, ()), strict=False):
            changed = has_changed(old, player.env[slot].float()) if not found else None
            if changed is not None and bool(changed.any()) and confined(changed) is False:
                found.append(op)

    def made_by(player: Player, op: Operation) -> list[int]:
        mine = [s for s in flow.makes(op) if s in player.env and s in flow.tracked]
        return [s for s in mine if player.env[s].is_floating_point()]

    as_they_were = flow.values(leaves)  # what filled them may not be played
    flow.play(flow.operations, as_they_were, after=keep, dtype=FINE)
    flow.play(flow.operations, leaves, after=compare, dtype=FINE)
    return found[0] if found else None


def has_changed(old: Tensor, new: Tensor) -> Tensor:
    """By more than rounding; infinities (masks) that stay are no change."""
    if old.shape != new.shape:
        return torch.ones_like(old, dtype=torch.bool)
    finite = old[torch.isfinite(old)]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return ((new - old).abs() > CHANGED * scale) & (new != old)
