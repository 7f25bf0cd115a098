"""Who hears whom? One sample, and one position, of an input is exchanged; whose prediction changes?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import Spot, find_spots, predictions, value_of
from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence

TRIED = 4  # samples or positions that are exchanged
HEARD = 1e-7  # of the largest change: less is rounding in float64


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    listeners = predictions(evidence)
    spot = next((s for s in find_spots(evidence, asked.of or "input") if not s.gradient), None)
    if spot is None or not listeners:
        raise UserError(f"step {evidence.step} has no prediction that could be told apart: nobody to listen")
    value, rows = value_of(evidence, spot), []
    hearing = Hearing(evidence, spot, listeners[0], value)
    before = hearing.own
    samples = value.shape[0] if value.dim() else 1
    for axis in range(min(2, value.dim())):
        if value.shape[axis] >= 2 and along(before, tuple(value.shape), axis) is not None:
            tried = chosen(value.shape[axis])
            rows += [exchange(hearing, axis, i) for i in tried]
    if not rows or rows[0]["changed"] != "sample":
        raise UserError(
            f"who hears whom cannot be told: {spot.words} is {list(value.shape)}, the prediction {list(before.shape)}"
        )
    eps = torch.finfo(before.dtype).eps if before.is_floating_point() else 0.0
    across = [row for row in rows if row["changed"] == "sample" and row["heard_by_others"]]
    back = [row for row in rows if row["changed"] == "position" and row["heard_before"]]
    heard = [row for row in rows if row["heard_by_itself"] or row["heard_by_others"]]
    if across:
        sentence = (
            f"Samples hear each other: exchanging sample {across[0]['index']} changes {across[0]['who']}."
        )
    elif not heard:
        sentence = f"Nobody hears {spot.words}: no prediction changes with it."
    else:
        sentence = f"Each prediction hears its own sample alone ({len(rows)} exchanges in {spot.words})."
    if back:
        sentence += f" Position {back[0]['index']} is heard by predictions before it: {back[0]['who']}."
    return Answer(
        "hears",
        sentence,
        "proven",
        numbers={"input": spot.words, "shape": list(value.shape), "prediction_shape": list(before.shape)},
        rows=tuple(rows),
        not_looked_at=(
            f"{len(chosen(samples))} of {samples} samples were exchanged, each for another of the batch",
            *(f"a second prediction (slot {s})" for s in listeners[1:2]),
            "BatchNorm's statistics are part of what is heard",
            *(
                ()
                if hearing.true is not None
                else (f"what is less than {eps:.0e} of a prediction: its rounding",)
            ),
        ),
        ask_next=("gradproof ask RUN are_samples_independent", "gradproof ask RUN does_it_see_the_future"),
    )


def chosen(count: int) -> list[int]:
    """
    >>> chosen(2), chosen(32)
    ([0, 1], [0, 10, 21, 31])
    """
    tried = min(TRIED, count)
    return sorted({round(i * (count - 1) / max(1, tried - 1)) for i in range(tried)})


def along(prediction: Tensor, shape: tuple[int, ...], axis: int) -> Tensor | None:
    """The prediction with the samples (0) or positions (1) of an input first; None where it has no such axis."""
    if prediction.dim() > axis and tuple(prediction.shape[: axis + 1]) == shape[: axis + 1]:
        return prediction.movedim(axis, 0).reshape(shape[axis], -1)
    if len(shape) > 1 and prediction.dim() and prediction.shape[0] == shape[0] * shape[1]:  # (B·T, …)
        return prediction.reshape(shape[0], shape[1], -1).movedim(axis, 0).reshape(shape[axis], -1)
    return None


@dataclass
class Hearing:
    """What a prediction says to an input: in float32 at least; in float64 where that must decide."""

    evidence: Evidence
    spot: Spot
    listener: int
    value: Tensor
    true: Tensor | None = None  # what it says to the input as it was, in float64

    def said(self, changed: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        leaves, flow = {} if changed is None else {self.spot.slot: changed}, self.evidence.flow
        return flow.values([self.listener], leaves, dtype or flow.fine)[self.listener]

    @cached_property
    def own(self) -> Tensor:
        return self.said(None)

    def changes(self, changed: Tensor, axis: int, index: int) -> Tensor:
        """By how much the prediction of each sample (axis 0) or position (1) changes.

        A row that hears nothing of it computes the same numbers again, to the last bit, in any precision. Where one
        changes that ought not to, float64 tells whether that is more than rounding: it takes several times as long.
        """
        found = self._changes(self.said(changed), self.own, axis)
        silent = slice(0, index) if axis else [i for i in range(len(found)) if i != index]
        if not bool(found[silent].any()):
            return found
        if self.true is None:
            self.true = self.said(None, torch.float64)
        return self._changes(self.said(changed, torch.float64), self.true, axis)

    def _changes(self, after: Tensor, before: Tensor, axis: int) -> Tensor:
        each = along((after.double() - before.double()).abs(), tuple(self.value.shape), axis)
        assert each is not None
        return each.amax(1)


def exchange(hearing: Hearing, axis: int, index: int) -> Row:
    """One sample (axis 0) or position (axis 1) replaced by another one that differs from it."""
    value = hearing.value
    count = value.shape[axis]
    here = value.select(axis, index)
    others = [(index + by) % count for by in range(1, count)]
    other = next((i for i in others if not torch.equal(value.select(axis, i), here)), None)
    word = ("sample", "position")[axis]
    if other is None:
        return row_of(word, index, [], "all are alike")
    changed = value.clone()
    changed.select(axis, index).copy_(value.select(axis, other))
    most = hearing.changes(changed, axis, index)
    who = (most > HEARD * float(most.max())).nonzero().flatten().tolist() if bool(most.any()) else []
    return row_of(word, index, who)


def row_of(word: str, index: int, who: list[int], note: str = "") -> Row:
    others = [i for i in who if i != index]
    row: Row = {
        "changed": word,
        "index": index,
        "heard_by_itself": index in who,
        "heard_by_others": len(others),
    }
    row["heard_before"] = sum(i < index for i in others) if word == "position" else 0
    row["who"] = note or (", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "") or "itself")
    return row
