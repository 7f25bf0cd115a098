"""What a training loses to its examination, by the times of its own steps: measured, not guessed.

Two programs on one GPU take turns, and how much one of them loses depends on both. A question that waits for Python
costs a training nothing, one that multiplies large matrices half of the time. The training's rows know.
"""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path

from gradproof.files import open_file
from gradproof.record.door import Damaged, read_json
from gradproof.record.schema import INFO_FILE, STEP_COLUMNS, STEPS_FILE

TAIL = 64 << 10  # bytes of the record's end: some hundred steps
FEWEST = 8  # steps of each kind
BEFORE = 60.0  # seconds before the first question
PLAINLY = 1  # depth: deeper steps take longer for another reason
REMEMBERED = 256  # times at which something was asked
STEP, SECONDS, DEPTH = (STEP_COLUMNS.index(name) for name in ("step", "seconds", "depth"))


class Pulse:
    """How many seconds of a training its examination has cost."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._busy: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when something was being asked
        self._asked = 0.0  # seconds of that, in all
        self.share = 1.0  # of it, lost; as long as nothing is known, all of it

    def was_asked(self, began: float, ended: float) -> None:
        """Between two times (since 1970) a question was being answered."""
        self._busy.append((began, ended))
        self._asked += ended - began

    def lost(self) -> float:
        """Seconds, so far; what was charged before anything was known is corrected as steps arrive."""
        if (share := self._measure()) is not None:
            self.share = share
        return self.share * self._asked

    def _measure(self) -> float | None:
        """The share of the time by which steps beside questions were longer than those alone; None if few are known."""
        if not self._busy:
            return None
        beside, alone = [], []
        for start, end in self._steps():
            if any(start < until and end > since for since, until in self._busy):
                beside.append(end - start)
            elif start >= self._busy[0][0] - BEFORE:
                alone.append(end - start)
        if min(len(beside), len(alone)) < FEWEST:
            return None
        usual = statistics.median(alone)
        return min(1.0, max(0.0, 1.0 - usual / max(statistics.median(beside), 1e-9)))

    def _steps(self) -> list[tuple[float, float]]:
        """When each of the last steps began and ended, of those that were measured no deeper than most."""
        try:
            info = read_json(self._run / INFO_FILE)
            with open_file(self._run / STEPS_FILE) as stream:
                stream.seek(max(0, stream.seek(0, 2) - TAIL))
                lines = stream.read().decode("ascii", "replace").split("\n")[1:-1]
            zero = float(info["began"])
        except (OSError, Damaged, KeyError, TypeError, ValueError):
            return []
        found, last = [], (-1, 0.0)
        for line in lines:
            cells = line.split(",")
            try:
                now, depth = (int(cells[STEP]), zero + float(cells[SECONDS])), int(cells[DEPTH] or 0)
            except (ValueError, IndexError):
                continue
            if now[0] == last[0] + 1 and depth <= PLAINLY:
                found.append((last[1], now[1]))
            last = now
        return found
