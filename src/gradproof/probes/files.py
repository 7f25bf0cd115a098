"""Hears in which order numbered files are read: sorted as text, img_10 comes before img_2.

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
from gradproof.probes.names import user_line
from gradproof.probes.session import Session

FEWEST = 24  # files of one kind
MOST_FILES = 400
MOST_KINDS = 16

_listening: list[Readings] = []
_installed = [False]


def files_read(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Notes the kinds of numbered files that are read in the order of their names as text."""
    readings = Readings(session.facts)
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
                for readings in _listening:
                    readings.note(os.fspath(path))


class Readings:
    """The names of numbered files as they were first read, by what they have in common."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.names: dict[tuple[str, str, str], dict[str, None]] = {}  # kind -> numbers as they are written

    def note(self, path: str) -> None:
        directory, name = os.path.split(path)
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        if match is None or match[3] in (".py", ".pyc", ".so"):
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
