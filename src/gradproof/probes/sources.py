"""Where a sample lies: the data set that a wrapper takes it from, its number there, and its file, if it can be told.

Only what a data set has as plain attributes is looked at: a property of the script's own might read, draw or wait.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradproof.probes.datasets import innermost

LONGEST = 1024  # characters of a path
ROOTS = ("root", "directory", "folder", "data_dir", "dir", "base_dir")
SPLITS = ("split", "_split")


def sources_of(data: Any, rows: Sequence[int]) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """The sources of some samples, and for each sample which of them and its number there.

    A source is a file, else the class of the data set; parts of one class are told apart by their number.
    """
    names: dict[str, int] = {}
    several: dict[int, str] = {}  # data sets of the same class, in the order in which they come up
    places = []
    for row in rows:
        source, inner = innermost(data, row)
        kind = type(source).__name__
        if id(source) not in several:
            alike = sum(text.split(" ")[0] == kind for text in several.values())
            several[id(source)] = kind if not alike else f"{kind} {alike + 1}"
        name = file_of(source, inner) or several[id(source)]
        places.append((names.setdefault(name, len(names)), inner))
    return tuple(names), tuple(places)


def file_of(source: Any, row: int) -> str:
    """The file that a sample is read from; empty where the data set does not say."""
    known = getattr(source, "__dict__", {})
    length = len(source)
    for value in known.values():
        if isinstance(value, (list, tuple)) and len(value) == length:
            entry = value[row]
            entry = entry[0] if isinstance(entry, (list, tuple)) and entry else entry
            if found := existing(entry, known):
                return found
    for value in known.values():
        if isinstance(value, np.memmap) and value.filename:
            return os.path.basename(value.filename)
    return next((found for value in known.values() if (found := existing(value, {}))), "")


def existing(entry: Any, known: dict[str, Any]) -> str:
    """A path as it is written, if there is such a file, from here or from a folder that the data set knows."""
    if not isinstance(entry, (str, os.PathLike)):
        return ""
    text = os.fspath(entry)
    if not isinstance(text, str) or not 0 < len(text) <= LONGEST or "\n" in text:
        return ""
    folders = [known[name] for name in ROOTS if isinstance(known.get(name), (str, os.PathLike))]
    return text if any(os.path.isfile(os.path.join(folder, text)) for folder in ("", *folders)) else ""


def split_of(data: Any) -> str:
    """`train`, `test`, … where a data set (or the one it is a part of) says so."""
    source, _ = innermost(data, 0) if len(data) else (data, 0)
    known = getattr(source, "__dict__", {})
    said = next((known[name] for name in SPLITS if isinstance(known.get(name), str)), "")
    if not said and isinstance(known.get("train"), bool):
        said = "train" if known["train"] else "test"
    return str(said)[:80]
