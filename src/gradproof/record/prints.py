"""What every rank writes of each step, to be held against the other ranks' when it is read: fingerprints in fixed rows.

Each rank appends to files of its own, so that nothing of ours ever waits for another rank. `prints.bin` has one row a
step; `tensor_prints.bin` has, at landmarks, Σx² of every tensor, which `run.json` names under `prints`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.files import open_file, read_file
from gradproof.record.door import LARGEST_WHOLE

PRINTS_FILE = "prints.bin"
TENSOR_PRINTS_FILE = "tensor_prints.bin"
LARGEST_TENSOR_PRINTS = 1 << 30  # bytes

IN_TURN = 16  # tensors whose bits are added up in one step
SUM_BITS = 48  # of the sum of their bits: a float64 holds it exactly
MAGIC = 0x32725047
ROW = np.dtype(
    [
        ("magic", "<u4"),
        ("step", "<u4"),
        ("began", "<f8"),  # seconds since 1970
        ("seconds", "<f4"),
        ("own", "<f4"),  # seconds until the first backward: the part in which few wait for others
        ("loss", "<f8"),  # inf: not finite
        ("lr", "<f8"),
        # Σx² of what lies on this rank; `…_parts` of what is sharded, times the number of parts that it is cut into
        ("gradient", "<f8"),
        ("gradient_parts", "<f8"),
        ("weight", "<f8"),  # before the update
        ("weight_parts", "<f8"),
        ("buffer", "<f8"),
        ("checksum", "<f8"),  # of some weights, in turn, exact: a whole number below 2⁴⁸
        ("batch", "<f8"),  # the same of what the model was called with
        ("entries", "<f8"),  # of its first argument
        ("clip", "<f8"),  # Σx² that it was clipped by
        ("training", "<f8"),  # share of its modules in training mode
    ]
)
FIELDS = tuple(ROW.names or ())[2:]
NOT_MEASURED = (math.nan,) * len(FIELDS)
PACKED = struct.Struct("<II" + "".join(ROW[name].char for name in FIELDS))

TENSOR_HEADER = struct.Struct("<4sQII")  # magic, step, tensors, CRC
TENSOR_MAGIC = b"GPp1"


def is_landmark(step: int) -> bool:
    """Whether every rank looks closely at a step: the first 64, then 32 in each doubling; known without asking.

    >>> [step for step in range(60, 140) if is_landmark(step)][:8]
    [60, 61, 62, 63, 64, 66, 68, 70]
    """
    return step % (1 << (step // 64).bit_length()) == 0


def pack_row(**values: Any) -> bytes:
    """One row; a field that is not given was not measured."""
    return PACKED.pack(MAGIC, values["step"], *map(values.get, FIELDS, NOT_MEASURED))


def read_rows(file: Path) -> np.ndarray:
    """The whole rows of a rank, in the order of steps; empty where there are none."""
    try:
        with open_file(file) as stream:
            data = stream.read()
    except OSError:
        return np.zeros(0, ROW)
    rows = np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
    rows = rows[rows["magic"] == MAGIC]
    if len(rows) and not (np.diff(rows["step"].astype(np.int64)) > 0).all():
        _, last = np.unique(rows["step"][::-1], return_index=True)
        rows = rows[::-1][last]
    return rows


def read_last_step(file: Path) -> int | None:
    """The number of the last whole row, without reading the others; None where there is none, or it is damaged."""
    try:
        with open_file(file) as stream:
            rows = stream.seek(0, 2) // ROW.itemsize
            stream.seek(max(0, rows - 1) * ROW.itemsize)
            data = stream.read(ROW.itemsize)
    except OSError:
        return None
    row = np.frombuffer(data, ROW)[0] if len(data) == ROW.itemsize else None
    return int(row["step"]) if row is not None and row["magic"] == MAGIC else None


def pack_tensors(step: int, numbers: Sequence[int], squares: np.ndarray) -> bytes:
    """Σx² of tensors at one step, by their numbers in `prints` of run.json."""
    payload = np.asarray(numbers, "<u4").tobytes() + np.asarray(squares, "<f8").tobytes()
    return TENSOR_HEADER.pack(TENSOR_MAGIC, step, len(numbers), zlib.crc32(payload)) + payload


def read_tensors(file: Path) -> dict[int, dict[int, float]]:
    """Σx² by step and tensor number; what follows a damaged record is left out."""
    found: dict[int, dict[int, float]] = {}
    try:
        data = read_file(file, LARGEST_TENSOR_PRINTS)
    except OSError:
        return found
    offset = 0
    while (record := unpack_tensors(data, offset)) is not None:
        step, squares = record
        found.setdefault(step, {}).update(squares)
        offset += TENSOR_HEADER.size + 12 * len(squares)
    return found


def unpack_tensors(data: bytes, offset: int) -> tuple[int, dict[int, float]] | None:
    """A step and Σx² by tensor number, from a record that is whole; else None."""
    if offset + TENSOR_HEADER.size > len(data):
        return None
    magic, step, count, crc = TENSOR_HEADER.unpack_from(data, offset)
    start = offset + TENSOR_HEADER.size
    payload = data[start : start + 12 * count]
    if (
        magic != TENSOR_MAGIC
        or step > LARGEST_WHOLE
        or len(payload) != 12 * count
        or zlib.crc32(payload) != crc
    ):
        return None
    numbers = np.frombuffer(payload, "<u4", count).tolist()
    squares = np.frombuffer(payload, "<f8", count, 4 * count).tolist()
    return step, dict(zip(numbers, squares, strict=True))
