"""Hears which files are read, at which step, and in which order: sorted as text, img_10 comes before img_2.

A training that reads its data from shards, one after the other, goes wrong at a shard: the last files that were opened
go with every recorded step, and the step at which each was first opened with the run.

Python tells its audit hooks of every file that is opened. Such a hook stays as long as the process; this one hands on
to whoever listens at the moment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from gradproof.probes.guard import quietly
from gradproof.probes.names import is_installed, user_line
from gradproof.probes.session import Session

FEWEST = 24  # files of one kind
MOST_FILES = 400
MOST_KINDS = 16
MOST_OPENED = 400  # files whose step the run keeps; of more, the last
LAST_OPENED = 8  # files that go with a recorded step
CODE = (".py", ".pyc", ".so")
NOT_DATA = (
    "/proc/",
    "/sys/",
    "/dev/",
    "/etc/",
    *(f"{prefix}/lib" for prefix in (sys.prefix, sys.base_prefix)),
)

_listening: list[Readings] = []
_installed = [False]


def files_read(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Notes the kinds of numbered files that are read in the order of their names as text."""
    readings = Readings(session.facts, lambda: session.step, str(session.writer.path.absolute()))
    _listening.append(readings)
    stack.callback(_listening.remove, readings)
    if not _installed[0]:
        sys.addaudithook(_heard)
        _installed[0] = True


def _heard(event: str, details: tuple) -> None:
    if event == "open" and _listening:
        with quietly():
            path, mode = details[0], details[1]
            if isinstance(path, (str, os.PathLike)) and isinstance(mode, str) and mode.startswith("r"):
                # Python looks for packages in places that are no files
                for readings in _listening if os.path.isfile(path) else ():
                    readings.note(os.fspath(path))


class Readings:
    """Files as they were read: at which step, and those with a number by what their names have in common."""

    def __init__(self, facts: dict[str, Any], step: Callable[[], int] = lambda: 0, own: str = "\0") -> None:
        """`own` is where this run itself is written."""
        self.facts, self._step, self._own = facts, step, own
        # file -> the step at which it was first opened; and last, the newest at the end
        self.first: dict[str, int] = facts.setdefault("opened", {})
        self.last: dict[str, int] = facts.setdefault("_opened", {})
        self.names: dict[tuple[str, str, str], dict[str, None]] = {}  # kind -> numbers as they are written

    def note(self, path: str) -> None:
        if path.endswith(CODE) or path.startswith((*NOT_DATA, self._own)) or is_installed(path):
            return
        self.remember(path)
        directory, name = os.path.split(path)
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        if match is None:
            return
        kind = (directory, match[1], match[3])
        if kind not in self.names and len(self.names) >= MOST_KINDS:
            return
        numbers = self.names.setdefault(kind, {})
        if match[2] in numbers or len(numbers) >= MOST_FILES:
            return
        numbers[match[2]] = None
        if len(numbers) % FEWEST == 0:
            self.judge(kind, list(numbers))

    def remember(self, path: str) -> None:
        step = self._step()
        self.last.pop(path, None)
        self.last[path] = step
        if len(self.last) > LAST_OPENED:
            del self.last[next(iter(self.last))]
        self.first.setdefault(path, step)
        if len(self.first) > MOST_OPENED:
            del self.first[next(iter(self.first))]

    def judge(self, kind: tuple[str, str, str], numbers: list[str]) -> None:
        found: dict[str, Any] = self.facts.setdefault("files", {})
        key = "".join(kind)
        as_text = sorted(numbers, key=lambda number: number + kind[2])
        if numbers == as_text and numbers != sorted(numbers, key=int):
            later = next(b for a, b in pairwise(numbers) if int(b) < int(a))
            before = numbers[numbers.index(later) - 1]
            line = found.get(key, {}).get("line") or user_line()
            names = [f"{kind[1]}{number}{kind[2]}" for number in (before, later)]
            found[key] = {"names": names, "count": len(numbers), "line": line}
        else:
            found.pop(key, None)
