"""Are tables kept with all their digits? A column of minutes up to 60000 in float16 has steps of 32 minutes.

A phase of 45 minutes that is computed from it, in whatever precision, is noise: from one number of the format to the
next it has nothing in common, and rows that were apart have become one.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.numerics.stored import format_of, spacing

ID = "low-precision-error/stored-in-half"
TWINS = 50  # rows that have the same number as another one
NEIGHBOURS = 50  # numbers that are followed by the very next one of the format
JUMPS = 0.3  # of a feature's variance, between two such numbers
SAME = 1e-4  # standard deviations of a feature, between rows that have the same number
CASTS = re.compile(r"astype|\.to\(|half\(|dtype|\.type\(|bfloat16\(|array\(")
SHORT = re.compile(r"half\(|float16|[\"']f2[\"']")


@dataclass(frozen=True)
class Steps:
    """A column in half precision, and how much a feature made of it changes from one of its numbers to the next."""

    format: torch.dtype
    distinct: int
    largest: float
    spacing: float
    jump: float  # of the feature's variance


def are_tables_kept_whole(evidence: Evidence) -> Iterator[Verdict]:
    """Features that are a function of a column in half precision, and wholly different at its next number."""
    known = evidence.memory.get("facts", {}).get("_tables", [])
    while known:
        table = known.pop(0)
        for name, feature in table["others"].items():
            steps = compare(table["values"], feature)
            if steps is None or steps.jump < JUMPS:
                continue
            known.clear()
            format = str(steps.format).removeprefix("torch.")
            yield confirmed(
                ID,
                f"{table['name']} is kept in {format}: its numbers go up to {steps.largest:.4g}, in steps of "
                f"{steps.spacing:.3g}; {len(feature)} rows have {steps.distinct} different ones",
                f"{name} is made of it, and has little in common from one of these numbers to the next: "
                f"{100 * min(steps.jump, 1.0):.0f} % of its variance lie between them",
                where=line_that_shortens(table["file"]),
                fix=f"keep {table['name']} in float32 or float64 from the start: casting it back brings no digits back",
                lasting=True,
            )
            return


def compare(stored: Tensor, feature: Tensor) -> Steps | None:
    """None where the column is not rounded, or the feature is not made of it alone."""
    format, feature = format_of(stored), feature.double()
    variance = float(feature.var())
    if format is None or not variance > 0 or not bool(torch.isfinite(feature).all()):
        return None
    numbers, group, size = torch.unique(stored.double(), return_inverse=True, return_counts=True)
    mean = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, group, feature) / size
    twins = size[group] > 1
    apart = (feature - mean[group])[twins].abs() > SAME * variance**0.5
    if int(twins.sum()) < TWINS or float(apart.double().mean()) > 0.01:
        return None
    step = spacing(numbers, format)
    neighbours = torch.diff(numbers) <= 1.01 * torch.maximum(step[1:], step[:-1])
    if int(neighbours.sum()) < NEIGHBOURS:
        return None
    jump = float(torch.diff(mean).square()[neighbours].mean()) / (2 * variance)
    return Steps(format, len(numbers), float(numbers.abs().max()), float(step.max()), jump)


def line_that_shortens(file: str) -> str | None:
    """The line of a script that casts to half precision, if it has one."""
    for number, text in enumerate(linecache.getlines(file), 1):
        code = text.partition("#")[0]
        if SHORT.search(code) and CASTS.search(code) and "finfo" not in code:
            return f"{file.rsplit('/', 1)[-1]}:{number}"
    return None
