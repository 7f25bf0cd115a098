"""Symptoms in what a training saw of its data."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts
from gradproof.record.run import Run

FEW = 0.5  # of the different rows that as many independent shuffles would have drawn
ONCE_MORE = 3  # times that each row was drawn, on average


def few_rows_drawn(run: Run) -> Iterator[Symptom]:
    """A shuffled loader that draws the same few rows in every pass: its generator is seeded anew each time."""
    for seen in (facts(run, "rows") or {}).values():
        if not seen["trains"] or seen["drawn"] < ONCE_MORE * seen["distinct"]:
            continue
        if seen["distinct"] > FEW * min(seen["expected"], seen["size"]):
            continue
        text = (
            f"{seen['drawn']} samples were drawn in {seen['passes']} passes of a shuffled loader, and only "
            f"{seen['distinct']} different ones of {seen['size']}; shuffled anew, about {seen['expected']:.0f} would be"
        )
        suspects = ("data-order-or-sampling/same-rows-every-pass",)
        yield Symptom("few_rows_drawn", "problem", text, None, seen["line"] or None, suspects)
