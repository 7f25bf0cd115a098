"""A rank's flight recorder: what it was doing, in a small file that is mapped into memory and survives `kill -9`.

Its last events (step, phase, collective, time) go round in a ring; one place holds the lines of the script at which the
rank stood when nothing had happened for a while, another the time at which its process was last alive.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gradproof.files import read_file

FLIGHT_FILE = "flight.bin"
PHASES = ("before backward", "in backward", "between backward and update", "in the update", "in a collective")
FORWARD, BACKWARD, BETWEEN, UPDATE, COLLECTIVE = range(len(PHASES))

MAGIC = b"GPflight"
HEAD = struct.Struct("<8sQdQ")  # magic, process, time of the last beat, events so far
SLOT = struct.Struct("<QdII48s")  # number of the event from 1 on, time, step, phase, what
SLOTS, TEXT_AT, TEXT = 64, 64, 1984
SIZE = TEXT_AT + TEXT + SLOTS * SLOT.size


@dataclass(frozen=True)
class Event:
    time: float
    step: int
    phase: str
    what: str  # the collective

    def __str__(self) -> str:
        return f"step {self.step}, {f'in {self.what}' if self.what else self.phase}"


@dataclass(frozen=True)
class Flight:
    """What a recorder says; events the oldest first."""

    process: int
    beat: float
    events: list[Event]
    lines: str  # where it stood, if it stood still: "train.py:31 in forward, train.py:50 in main"

    @property
    def still(self) -> float:
        """Seconds from its last event to the last time it was alive."""
        return self.beat - self.events[-1].time if self.events else 0.0


class Recorder:
    """Puts each event in its place; on most disks that is a copy of some bytes."""

    def __init__(self, store: Callable[[int, bytes], None]) -> None:
        self._store = store
        self.count = 0
        self.last = time.time()
        self._process = os.getpid()
        self.beat()

    def note(self, step: int, phase: int, what: str = "") -> None:
        self.last = time.time()
        self.count += 1
        place = TEXT_AT + TEXT + (self.count % SLOTS) * SLOT.size
        name = what.encode()[:48] if what else b""
        self._store(place, SLOT.pack(self.count, self.last, step, phase, name))

    def beat(self) -> None:
        self._store(0, HEAD.pack(MAGIC, self._process, time.time(), self.count))

    def stand_at(self, lines: str) -> None:
        data = lines.encode()[: TEXT - 1]
        self._store(TEXT_AT, data.ljust(TEXT, b"\0"))


def read_flight(folder: Path) -> Flight | None:
    """What a rank's recorder holds; None where there is none, or it is damaged."""
    try:
        data = read_file(folder / FLIGHT_FILE, SIZE)
    except OSError:
        return None
    if len(data) != SIZE or data[:8] != MAGIC:
        return None
    _, process, beat, _ = HEAD.unpack_from(data)
    slots = (SLOT.unpack_from(data, TEXT_AT + TEXT + n * SLOT.size) for n in range(SLOTS))
    events = sorted(slot for slot in slots if slot[0] and slot[3] < len(PHASES))
    lines = data[TEXT_AT : TEXT_AT + TEXT].rstrip(b"\0").decode("utf-8", "replace")
    return Flight(
        process,
        max([beat, *(moment for _, moment, *_ in events)]),
        [
            Event(moment, step, PHASES[phase], what.rstrip(b"\0").decode("utf-8", "replace"))
            for _, moment, step, phase, what in events
        ],
        lines,
    )
