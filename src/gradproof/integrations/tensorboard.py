"""TensorBoard without TensorBoard: event files written here, as scalars and histograms, live or from a run.

A file is a list of TFRecords (length, masked CRC of it, data, masked CRC of that), each a protobuf message `Event`.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gradproof.record.schema import PERCENTILES, STATISTICS
from gradproof.record.sink import charted

NORM, MIN, MAX = (STATISTICS.index(name) for name in ("norm", "min", "max"))
LARGEST = float(np.finfo(np.float32).max)
SHARES = np.diff([0, *PERCENTILES, 100]) / 100  # of the entries, between two percentiles


class TensorBoard:
    """Hears a run: `gradproof.watch(model, optimizer, sinks=[TensorBoard()])`, then `tensorboard --logdir runs`."""

    def __init__(self, directory: str | os.PathLike | None = None) -> None:
        self.directory = Path(directory) if directory else None
        self._file: BinaryIO | None = None

    def begin(self, path: Path, info: Mapping[str, Any]) -> None:
        self.directory = self.directory or path / "tensorboard"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._began = float(info.get("began") or time.time())
        self._now = self._began
        self._info = info  # grows while a run is live
        self._ends: dict[str, tuple[float, float]] = {}
        name = f"events.out.tfevents.{int(self._began):010d}.gradproof"
        self._file = open(self.directory / name, "wb")  # noqa: SIM115
        self._write(message(1, self._now) + message(3, b"brain.Event:2"))

    def step(self, row: Mapping[str, Any]) -> None:
        self._now = self._began + float(row.get("seconds") or 0)
        self._add(int(row["step"]), [scalar(name, value) for name, value in charted(row).items()])

    def tensors(self, step: int, names: Sequence[str], values: np.ndarray) -> None:
        self._ends = {name: (row[MIN], row[MAX]) for name, row in zip(names, values, strict=True)}
        self._add(step, [scalar(f"norm/{name}", row[NORM]) for name, row in zip(names, values, strict=True)])

    def distributions(self, step: int, names: Sequence[str], values: np.ndarray) -> None:
        found = []
        sizes = {t["name"]: np.prod(t["shape"]) for t in self._known() if t.get("shape")}
        for name, row in zip(names, values, strict=True):
            if np.isfinite(row).all():
                size = float(sizes.get(name.partition("/")[2], 100))
                found.append(histogram(name, row, self._ends.get(name), size))
        self._add(step, found)

    def _known(self) -> list[dict[str, Any]]:
        return [*self._info.get("tensors", ()), *self._info.get("parameters", ())]

    def end(self) -> None:
        if self._file is not None:
            self._file.close()

    def _add(self, step: int, values: list[bytes]) -> None:
        if values:
            self._write(message(1, self._now) + message(2, step) + message(5, b"".join(values)))

    def _write(self, event: bytes) -> None:
        assert self._file is not None
        length = struct.pack("<Q", len(event))
        checked = (
            length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event))
        )
        self._file.write(checked)
        self._file.flush()  # a killed process leaves whole records


def scalar(tag: str, value: float) -> bytes:
    """Summary.value with a tag and a simple_value, a float32: a finite number stays finite."""
    if np.isfinite(value):
        value = float(np.clip(value, -LARGEST, LARGEST))
    return message(1, message(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value))


def histogram(tag: str, percentiles: np.ndarray, ends: tuple[float, float] | None, size: float) -> bytes:
    """Summary.value with a HistogramProto: how many entries lie below each percentile, and below the largest."""
    low, high = ends if ends is not None else (percentiles[0], percentiles[-1])
    limits = np.maximum.accumulate([*percentiles, high]).astype("<f8")
    counts = (SHARES * size).astype("<f8")
    middles = (np.array([low, *limits[:-1]]) + limits) / 2
    body = message(1, float(low)) + message(2, float(high)) + message(3, size)
    body += message(4, float(counts @ middles)) + message(5, float(counts @ middles**2))
    return message(
        1,
        message(1, tag.encode())
        + message(5, body + message(6, limits.tobytes()) + message(7, counts.tobytes())),
    )


def message(field: int, value: float | int | bytes) -> bytes:
    """One field of a protobuf message: a double, a whole number, or bytes with their length."""
    if isinstance(value, bytes):
        return varint(field << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(field << 3 | 1) + struct.pack("<d", value)
    return varint(field << 3) + varint(value)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # CRC32C, reflected
        table.append(byte)
    return table


TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC32C of the data, rotated and shifted as TFRecords want it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
