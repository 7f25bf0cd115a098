"""Applies a unified diff to a copy of somebody's files: exactly, or not at all, and never outside of the copy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gradproof.errors import UserError
from gradproof.files import read_file

LARGEST = 4 << 20  # bytes of a patch, and of a file that it changes
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NOWHERE = "/dev/null"


@dataclass
class Hunk:
    """Lines as they were, at `start` (from 0), and as they become."""

    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class FilePatch:
    """`old` is /dev/null for a new file, `new` for one that goes."""

    old: str
    new: str
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.old if self.new == NOWHERE else self.new


def parse_patch(text: str) -> list[FilePatch]:
    """The files of a unified diff, as `git diff` and `diff -u` write it."""
    found: list[FilePatch] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            found.append(FilePatch(name_of(line), name_of(lines[at + 1])))
            at += 2
        elif found and (head := HUNK.match(line)):
            at = read_hunk(lines, at + 1, head, found[-1])
        else:
            at += 1
    if not found or not all(patch.hunks for patch in found):
        raise UserError(
            "the patch has no change that could be read; it has to be a unified diff (git diff, diff -u)"
        )
    return found


def name_of(line: str) -> str:
    """
    >>> name_of("--- a/src/train.py\\t2026-01-01")
    'src/train.py'
    """
    name = line[4:].partition("\t")[0].strip()
    return name[2:] if name[:2] in ("a/", "b/") else name


def read_hunk(lines: list[str], at: int, head: re.Match[str], patch: FilePatch) -> int:
    """One hunk, by the lengths that its head gives; the place behind it."""
    olds, news = int(head[2] or 1), int(head[4] or 1)
    hunk = Hunk(max(0, int(head[1]) - 1))
    while (len(hunk.old) < olds or len(hunk.new) < news) and at < len(lines):
        mark, text = lines[at][:1] or " ", lines[at][1:]
        if mark not in " -+\\":
            break
        if mark in " -":
            hunk.old.append(text)
        if mark in " +":
            hunk.new.append(text)
        at += 1
    if (len(hunk.old), len(hunk.new)) != (olds, news):
        raise UserError(
            f"the patch of {patch.name} is cut off, or not as long as its heads say; make it anew: git diff"
        )
    patch.hunks.append(hunk)
    return at


def apply_patch(patches: list[FilePatch], directory: Path) -> list[str]:
    """Change the files of a directory; UserError says what does not fit. The names of what was changed."""
    for patch in patches:
        file = inside(directory, patch.name)
        old = [] if patch.old == NOWHERE else read_lines(inside(directory, patch.old), patch.old)
        new = list(changed(old, patch))
        if patch.new == NOWHERE:
            file.unlink()
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in new), encoding="utf-8")
    return [patch.name for patch in patches]


def inside(directory: Path, name: str) -> Path:
    parts = PurePosixPath(name)
    file = directory / parts
    if parts.is_absolute() or ".." in parts.parts or "\0" in name or not name.strip():
        raise UserError(
            f"the patch names {name!r}, which is outside of the script's directory; make it from there"
        )
    links = [
        p for p in (file, *file.parents) if p != directory and p.is_relative_to(directory) and p.is_symlink()
    ]
    if links:
        raise UserError(f"the patch names {name!r}, which is a link; name the file that it leads to")
    return file


def read_lines(file: Path, name: str) -> list[str]:
    try:
        return read_file(file, LARGEST).decode("utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(
            f"the patch changes {name}, which is not there; make it from the directory that the script was started in"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be patched: {error}") from None


def changed(old: list[str], patch: FilePatch) -> Iterator[str]:
    at = 0
    for number, hunk in enumerate(patch.hunks, 1):
        place = find_place(old, hunk, at)
        if place is None:
            raise UserError(
                f"change {number} of {patch.name} does not fit: the lines that it replaces are not there; "
                "make it against the script as it ran (script.py.txt in the run)"
            )
        yield from old[at:place]
        yield from hunk.new
        at = place + len(hunk.old)
    yield from old[at:]


def find_place(old: list[str], hunk: Hunk, least: int) -> int | None:
    """Where the old lines are: at the place that the hunk names, or at the nearest one where all of them are."""
    if not hunk.old:
        return max(least, min(hunk.start + 1 if old else 0, len(old)))
    last = len(old) - len(hunk.old)
    for place in sorted(range(least, last + 1), key=lambda place: abs(place - hunk.start)):
        if old[place : place + len(hunk.old)] == hunk.old:
            return place
    return None
