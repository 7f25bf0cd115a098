"""What can be known of a specimen without torch: its files, its label, and whether they are as they were written."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import Any

from gradproof.files import NotAFile, has_file, open_file, read_file

VERSION = 2
TAPE_FILE = "tape.json"
TENSORS_FILE = "tensors.safetensors"
LABEL_FILE = "label.json"  # what can be known of it without reading it
LARGEST_TAPE = 512 << 20  # bytes of JSON: what 300,000 operations take, with room to spare
LARGEST_LABEL = 1 << 16
IN_MEMORY = "gradproof-"  # how directories begin in which specimens are kept that do not fit on disk


class Damaged(ValueError):
    """What was read is no specimen: the reason in a few words."""


def signature(tape: bytes, header: bytes) -> int:
    """One number for what was taped and for what the tensors are; not for their values, which are only mapped."""
    return zlib.crc32(header, zlib.crc32(tape))


def find_specimens(run: str | os.PathLike) -> list[Path]:
    """The specimens of a run, by step."""
    folder = Path(run) / "specimens"
    if folder.is_symlink():
        return []
    return sorted(p for p in folder.glob("step-*") if is_ours(p) and has_file(p / TAPE_FILE))


def is_ours(path: Path) -> bool:
    """Whether it is part of the run itself, or a link to what the shelf keeps in memory: no other link is followed."""
    if not path.is_symlink():
        return True
    try:
        target = Path(os.readlink(path))
        found = os.lstat(target.parent)
    except OSError:
        return False
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and found.st_uid == os.geteuid()
    return private and target.parent.name.startswith(IN_MEMORY) and not target.is_symlink()


def find_damage(path: str | os.PathLike) -> str:
    """What is wrong with a specimen, as a sentence; empty for one whose files are whole."""
    try:
        read_tape(Path(path))
    except (Damaged, OSError, RecursionError) as error:
        return f"{path} cannot be read: {error}"
    return ""


def read_tape(path: Path) -> bytes:
    """The JSON of a specimen whose files belong together; Damaged says what is wrong with it."""
    for name in (TAPE_FILE, TENSORS_FILE, LABEL_FILE):
        if not has_file(path / name):
            raise Damaged(f"it has no {name}, so it is no specimen")
    label = read_label(path)
    version = label.get("gradproof", 1)
    if version != VERSION:
        raise Damaged(
            f"it was written by another gradproof (specimen format {str(version)[:20]}; this one reads {VERSION}); "
            "record the step again"
        )
    if os.stat(path / TENSORS_FILE).st_size != label.get("stored"):
        raise Damaged(f"its {TENSORS_FILE} is not as long as it was")
    try:
        tape = read_file(path / TAPE_FILE, LARGEST_TAPE)
    except NotAFile as error:
        raise Damaged(f"its {TAPE_FILE} cannot be read: {error}") from None
    if signature(tape, read_header(path / TENSORS_FILE)) != label.get("signature"):
        raise Damaged("its files are not as they were written")
    return tape


def read_label(path: Path) -> dict[str, Any]:
    try:
        label = json.loads(read_file(path / LABEL_FILE, LARGEST_LABEL))
    except (ValueError, RecursionError, NotAFile):
        label = None
    if not isinstance(label, dict):
        raise Damaged(f"its {LABEL_FILE} is no label")
    return label


def read_header(file: Path) -> bytes:
    """The JSON in front of the tensors, with its length."""
    with open_file(file) as stream:
        length = stream.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        return length + stream.read(min(size, LARGEST_TAPE))
