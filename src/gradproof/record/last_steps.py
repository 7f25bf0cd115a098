"""The last steps of a rank, tensor by tensor, in a file that is mapped into memory and survives `kill -9`.

A ring of places, one a step; each holds a record as `tensor_prints.bin` has them, by a checksum whole or not there.
Where a rank has died, it says what the numbers did in the steps before, of which no landmark was one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradproof.files import read_file
from gradproof.record.prints import TENSOR_HEADER, unpack_tensors
from gradproof.record.writer import RunWriter, Store

LAST_STEPS_FILE = "last_steps.bin"
STEPS = 32
LARGEST = 16 << 20  # bytes: of a model with more tensors, fewer steps
FEWEST = 4
TINY = 1e-30
HEAD = 8  # bytes: the size of a place


class LastSteps:
    """Keeps records in a ring; made when the first one tells how large they are."""

    def __init__(self, writer: RunWriter, failed: Callable[[OSError], None]) -> None:
        self._writer, self._failed = writer, failed
        self._store: Store | None = None
        self._place = self._steps = self._count = 0
        self._given_up = False

    def keep(self, record: bytes) -> None:
        """A step's record; one that is larger than its place is not kept, nor any on a disk that has no room."""
        if self._store is None and not self._given_up:
            self._make(2 * len(record))  # landmarks have more tensors than the steps between them
        if self._store is None or len(record) > self._place:
            return
        at = HEAD + self._count % self._steps * self._place
        self._store(at, record)
        self._count += 1

    def _make(self, place: int) -> None:
        self._place, self._steps = place, min(STEPS, LARGEST // max(place, 1))
        self._given_up = True
        if self._steps < FEWEST:
            return
        try:
            self._store = self._writer.open_ring(LAST_STEPS_FILE, HEAD + place * self._steps)
            self._store(0, place.to_bytes(HEAD, "little"))
        except OSError as error:
            self._failed(error)


def read_last_steps(folder: Path) -> dict[int, dict[int, float]]:
    """Σx² by step and tensor number, of the last steps, oldest first; empty where there is no such file."""
    try:
        data = read_file(folder / LAST_STEPS_FILE, LARGEST + HEAD)
    except OSError:
        return {}
    place = int.from_bytes(data[:HEAD], "little")
    if place < TENSOR_HEADER.size:
        return {}
    records = [unpack_tensors(data, at) for at in range(HEAD, len(data), place)]
    return dict(sorted((record for record in records if record is not None), key=lambda record: record[0]))


def last_norms(folder: Path, info: dict[str, Any]) -> dict[int, dict[tuple[str, str], float]]:
    """The norm of what a rank holds of each tensor, by step and (kind, name), of its last steps."""
    listed = info.get("prints", [])
    return {
        step: {
            (listed[n][0], listed[n][1]): math.sqrt(square) if square >= 0 else math.nan
            for n, square in squares.items()
            if n < len(listed)
        }
        for step, squares in read_last_steps(folder).items()
    }


def describe_last_steps(steps: dict[int, dict[tuple[str, str], float]]) -> str:
    """What the gradients did in them: of all, and where they changed most. Empty of fewer than two.

    >>> a, b = ("gradient", "a"), ("gradient", "b")
    >>> describe_last_steps({7: {a: 3.0, b: 4.0}, 8: {a: 3.0, b: 40.0}})
    'from step 7 to 8 the norm of its gradients went from 5 to 40.1, that of b from 4 to 40'
    """
    known = {
        step: {name: norm for (kind, name), norm in found.items() if kind == "gradient"}
        for step, found in steps.items()
    }
    known = {step: found for step, found in known.items() if found}
    if len(known) < 2:
        return ""
    first, last = min(known), max(known)
    before, after = known[first], known[last]
    both = [name for name in after if name in before]
    if not both:
        return ""
    grown = {name: max(after[name], TINY) / max(before[name], TINY) for name in both}
    most = max(both, key=lambda name: max(grown[name], 1 / max(grown[name], TINY)))
    whole = [math.sqrt(sum(found[name] ** 2 for name in both)) for found in (before, after)]
    text = f"from step {first} to {last} the norm of its gradients went from {whole[0]:.3g} to {whole[1]:.3g}"
    return f"{text}, that of {most} from {before[most]:.3g} to {after[most]:.3g}"
