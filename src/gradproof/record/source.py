"""Which code ran: the training script's own text, its hash, and the commit of the repository around it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPT_COPY = "script.py.txt"  # in the run directory; no .py, so that no tool takes it for a module
LARGEST_COPY = 500_000  # bytes; a larger script has only its hash


def describe_source(file: str | os.PathLike | None) -> tuple[dict[str, Any], bytes]:
    """What run.json says about the script, and the script itself; both empty where there is no file to read."""
    if file is None:
        return {}, b""
    path = Path(file)
    try:
        text = path.read_bytes()
        commit = find_commit(path.resolve().parent)
    except (OSError, ValueError):
        return {}, b""
    return {"file": str(file), "sha256": hashlib.sha256(text).hexdigest(), "commit": commit}, text


def rename_cells(text: str, cells: Mapping[str, str]) -> str:
    """Places in a notebook by the names of its cells; a kernel calls their code /tmp/ipykernel_7/1234.py.

    >>> rename_cells("at /tmp/ipykernel_7/1234.py:5 in step", {"1234.py": "cell-3.py"})
    'at cell-3.py:5 in step'
    """
    if not cells:
        return text
    code = r"(?:[^\s:(]*/)?\b(" + "|".join(map(re.escape, cells)) + r")(?=:\d)"
    return re.sub(code, lambda found: cells[found[1]], text)


def find_commit(directory: Path) -> str | None:
    """The commit that is checked out around a directory, read from .git itself: no process is started."""
    for parent in (directory, *directory.parents):
        git = parent / ".git"
        if git.is_file():  # a worktree or submodule: one line, `gitdir: PATH`
            git = parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = _read_text(git / "HEAD")
        if head is None:
            continue
        reference = head.removeprefix("ref:").strip()
        if reference == head:
            return head
        shared = git / (_read_text(git / "commondir") or ".")
        return _read_text(git / reference) or _read_text(shared / reference) or _packed(shared, reference)
    return None


def _packed(git: Path, reference: str) -> str | None:
    lines = (_read_text(git / "packed-refs") or "").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {reference}")), None)


def _read_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None
