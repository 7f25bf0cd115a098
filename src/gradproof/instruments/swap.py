"""The data or the weights? Steps from before and after a turn of the loss, each replayed with the other's weights.

A loss that has risen has risen because the batches are others, or because the network is. With the weights of before,
the batches of after lose what they lose (it is the data), or what was usual before (it is the weights): then one part
of the network after the other is put back, and where the loss comes back with it, that part is what was spoilt.

    swap([before], [after]).blame     # "data", "weights", "both" or "neither"
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import line_of, storage_of

MUCH, LITTLE = 0.65, 0.35  # of the rise of the loss: what brings it, and what does not
RISEN = 1.05  # times the loss before: less is no rise
NEARLY_ALL, FEWEST = 0.9, 3  # of the rise; and other parts: of fewer each is much of the network
BEYOND = 2.0  # times what its updates can have moved a tensor: further, and it was not them
MOST_PARTS = 80  # of a network that are put back: each is a replay
SHOWN = 5  # parts that a run keeps
DATA, WEIGHTS, BOTH, NEITHER = "data", "weights", "both", "neither"


@dataclass(frozen=True)
class PutBack:
    """A part of the late network as it was early, all else as it is: the loss, and how much of the rise is gone."""

    part: str
    loss: float
    share: float
    is_tensor: bool = True


@dataclass(frozen=True)
class Swapped:
    """Losses by whose batches and whose weights: the middle one of each kind."""

    early: tuple[int, ...]  # steps
    late: tuple[int, ...]
    early_as_it_was: float
    late_as_it_was: float
    late_batch_early_weights: float
    early_batch_late_weights: float
    put_back: tuple[PutBack, ...] = ()  # the most telling first
    way: tuple[float, float] = (math.nan, math.nan)  # of the one tensor to blame: see `way_of`
    written: str = ""  # the line of the script that wrote into it, outside of the updates

    @property
    def rise(self) -> float:
        return self.late_as_it_was - self.early_as_it_was

    @property
    def of_the_data(self) -> float:
        """The share of the rise that the late batches bring to the early network."""
        return (self.late_batch_early_weights - self.early_as_it_was) / self.rise

    @property
    def of_the_weights(self) -> float:
        """The share of it that the late weights bring to the early batches."""
        return (self.early_batch_late_weights - self.early_as_it_was) / self.rise

    @property
    def blame(self) -> str:
        """Empty where the loss has not risen, or nothing was decided."""
        if not self.rise > (RISEN - 1) * abs(self.early_as_it_was):
            return ""
        data, weights = self.of_the_data, self.of_the_weights
        if data > MUCH and weights > MUCH:
            return BOTH
        if data < LITTLE and weights < LITTLE:
            return NEITHER
        share = (weights + 1 - data) / 2  # of the weights: those exchanged first, or last
        return WEIGHTS if share > MUCH else DATA if share < LITTLE else ""

    @property
    def one_tensor(self) -> PutBack | None:
        """The one with which, put back, the rise is gone, while no other does much."""
        best = next((each for each in self.put_back if each.is_tensor and each.share > NEARLY_ALL), None)
        if best is None:
            return None
        others = [each for each in self.put_back if not f"{best.part}.".startswith(f"{each.part}.")]
        return best if len(others) >= FEWEST and all(each.share < LITTLE for each in others) else None

    @property
    def spoilt(self) -> PutBack | None:
        """The one tensor, if something else than its updates has moved it."""
        moved, explained = self.way
        return self.one_tensor if moved > BEYOND * explained and not self.written else None


def swap(early: Sequence[Evidence], late: Sequence[Evidence]) -> Swapped:
    """Each batch with the weights of the steps on its own side, and of those on the other."""

    def middle(batches: Sequence[Evidence], weights: Sequence[Evidence]) -> float:
        losses = [b.loss_at({} if b is w else weights_for(b, w)) for b in batches for w in weights]
        return statistics.median(losses) if all(map(math.isfinite, losses)) else math.nan

    found = Swapped(
        tuple(each.step for each in early),
        tuple(each.step for each in late),
        statistics.median(each.loss for each in early),
        statistics.median(each.loss for each in late),
        middle(late, early),
        middle(early, late),
    )
    if found.blame != WEIGHTS:
        return found
    worst = max(late, key=lambda each: each.loss - each.loss_at(weights_for(each, early[-1])))
    found = replace(found, put_back=tuple(put_back(early[-1], worst)))
    if found.one_tensor is None:
        return found
    tensor = found.one_tensor.part
    return replace(found, way=way_of(tensor, early, late), written=written_at((*early, *late), tensor))


def way_of(tensor: str, early: Sequence[Evidence], late: Sequence[Evidence]) -> tuple[float, float]:
    """How far it went between the nearest two steps, and how far the updates in between can have taken it: each of
    them as long as the longest that was recorded."""
    before, after = early[-1], late[0]
    ((slot, there),) = weights_for(after, before, tensor).items()
    moved = float((after.tape.leaf_value(slot).double() - there.double()).norm())
    slots = [(each, each.tape.leaf_named.get(tensor, -1)) for each in (*early, *late)]
    longest = max((float(e.updates[s].double().norm()) for e, s in slots if s in e.updates), default=math.inf)
    return moved, longest * (after.step - before.step)


def written_at(steps: Sequence[Evidence], tensor: str) -> str:
    """The line of the script, if one was recorded, that writes into it before or after the update."""
    for tape in (each.tape for each in steps):
        memory = storage_of(tape, tape.leaf_named[tensor]) if tensor in tape.leaf_named else None
        for op in tape.operations:
            if op.phase != "optimizer" and any(storage_of(tape, slot) == memory for slot in op.writes):
                return line_of(op)
    return ""


def weights_for(batch: Evidence, source: Evidence, part: str | None = None) -> dict[int, Tensor]:
    """The weights and statistics of another step, by slots of this one; of one part alone, where it is named."""
    tape, other = batch.tape, source.tape
    found = {}
    for name, slot in tape.leaf_named.items():
        theirs = other.leaf_named.get(name)
        here = tape.slots[slot]
        if theirs is None or here.kind not in ("parameter", "buffer") or not here.dtype.is_floating_point:
            continue
        if part is not None and name != part and not name.startswith(f"{part}."):
            continue
        if slot in tape.memory_of and theirs in other.memory_of and other.slots[theirs].shape == here.shape:
            found[slot] = other.leaf_value(theirs)
    return found


def put_back(early: Evidence, late: Evidence) -> list[PutBack]:
    """Of the late step: parts of the network as they were early, from the largest down to single tensors, always into
    the one that takes back most of the rise; the most telling first."""
    whole, usual = late.loss, late.loss_at(weights_for(late, early))
    done: dict[str, PutBack] = {}
    prefix = ""
    while len(done) < MOST_PARTS and whole > usual:
        inside = parts_below(late, prefix)
        for part in [part for part in inside if part not in done][: MOST_PARTS - len(done)]:
            loss = late.loss_at(weights_for(late, early, part))
            share = (whole - loss) / (whole - usual) if math.isfinite(loss) else 0.0
            done[part] = PutBack(part, loss, share, not parts_below(late, part))
        best = max((done[part] for part in inside if part in done), key=lambda each: each.share, default=None)
        if best is None or best.is_tensor:
            break
        prefix = best.part
    # of a module and a tensor in it that does as much, the tensor
    return sorted(done.values(), key=lambda each: (-round(each.share, 2), not each.is_tensor))


def parts_below(evidence: Evidence, prefix: str) -> list[str]:
    """The next names below a module: modules, or tensors."""
    start = f"{prefix}." if prefix else ""
    names = [slot.name for slot in evidence.tape.leaves() if slot.kind in ("parameter", "buffer")]
    below = [name.removeprefix(start).partition(".")[0] for name in names if name.startswith(start) and name]
    return list(dict.fromkeys(f"{start}{part}" for part in below))


def describe_swap(found: Swapped) -> dict[str, Any]:
    """As a run keeps it; see record/shapes.py."""
    losses = {
        "early_as_it_was": found.early_as_it_was,
        "late_as_it_was": found.late_as_it_was,
        "late_batch_early_weights": found.late_batch_early_weights,
        "early_batch_late_weights": found.early_batch_late_weights,
    }
    back = [{"part": each.part, "loss": each.loss, "share": each.share} for each in found.put_back[:SHOWN]]
    spoilt = found.spoilt.part if found.spoilt is not None else ""
    moved, explained = found.way
    way = {"moved": moved, "explained": explained} if math.isfinite(explained) else {}
    return {
        "blame": found.blame,
        "losses": losses,
        "put_back": back,
        "spoilt": spoilt,
        "written": found.written,
        **way,
    }
