"""Keeps the statistics of a long run under a size: old frames are thinned, and of each two the louder one stays.

A gigabyte takes seconds to read. It is thinned in slices, a few frames with each one that comes, into a draft that
takes the file's place when it has caught up.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from gradproof.files import open_file, open_to_append
from gradproof.record.disk import Files
from gradproof.record.run import Frame
from gradproof.record.schema import FRAME_COLUMNS, FRAME_HEADER, FRAME_MAGIC, STATISTICS, STATISTICS_FRAME

LIMIT = 1 << 30  # bytes of tensors.bin
BEGIN = 0.8  # of the limit, at which thinning begins
SLICE = 8  # bytes that are read for one that comes
RECENT = 0.25  # of the file, which stays as it is
ENOUGH = 0.9  # of its size: a file that cannot be thinned below it is full
NAN, INF, NORM = (STATISTICS.index(name) for name in ("nan", "inf", "norm"))


class FrameFile:
    """The file to which frames are appended, within the limit."""

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name = files, name
        self._size = 0
        self._thinning: Thinning | None = None
        self.thinned = 0  # times
        self.ended: int | None = None  # the step at which it was full

    def append(self, step: int, frame: bytes) -> None:
        if self.ended is None and self._size + len(frame) > BEGIN * LIMIT:
            self._thin(step, SLICE * len(frame))
        if self.ended is None and self._size + len(frame) > LIMIT:
            self.ended = step
        if self.ended is None:
            self._files.append(self._name, frame)
            self._size += len(frame)

    def close(self) -> None:
        if self._thinning is not None:
            self._thinning.drop()

    def facts(self) -> dict[str, int]:
        """What whoever reads it has to know."""
        thinned = {"thinned": self.thinned} if self.thinned else {}
        return thinned | ({"frames_ended": self.ended} if self.ended is not None else {})

    def _thin(self, step: int, most: int) -> None:
        if self._thinning is None:
            self._thinning = Thinning(self._files.path / self._name)
        try:
            if not self._thinning.go_on(most):
                return
        except OSError:  # there is no room for half of it
            self._thinning.drop()
            self.ended = step
            return
        self._files.close_file(self._name)  # it is another one now
        size, self._size = self._size, self._thinning.written
        self._thinning = None
        if self._size > ENOUGH * size:  # frames of which no two are alike
            self.ended = step
        else:
            self.thinned += 1


class Thinning:
    """A draft of a file of frames with half of the older ones. Readers keep the file that they have open."""

    def __init__(self, file: Path) -> None:
        self._file, self._draft = file, file.with_name(f"{file.name}.tmp{os.getpid()}")
        self._old = (1 - RECENT) * file.stat().st_size
        self._read = 0
        self.written = 0
        self._waiting: dict[bytes, bytes] = {}  # frames without a neighbour so far, by what they measured
        self._begun: set[int] = set()  # contents of which the first frame has come
        self._finite = True
        with suppress(FileNotFoundError):
            self._draft.unlink()  # of a process that was killed

    def go_on(self, most: int) -> bool:
        """Reads so many bytes more; True when the draft was whole and has taken the file's place."""
        kept: list[bytes] = []
        ended = False
        with open_file(self._file) as source:
            source.seek(self._read)
            until = self._read + most
            while self._read < until and not ended:
                header = source.read(FRAME_HEADER.size)
                ended = not header
                kept += self._take(b"") if ended else self._take(header + source.read(_payload(header)))
        self._write(b"".join(kept))
        if ended:
            self._draft.replace(self._file)
        return ended

    def drop(self) -> None:
        with suppress(OSError):
            self._draft.unlink()

    def _take(self, frame: bytes) -> Iterator[bytes]:
        """What is written of the next frame, or of the end: the first frame, the first with a NaN or Inf, and the
        recent ones; of the others, the louder one of each two neighbours that measured the same tensors."""
        place, self._read = self._read, self._read + len(frame)
        if not frame or place >= self._old:
            yield from self._waiting.values()
            self._waiting.clear()
            yield frame
            return
        content, decoded = decode(frame)
        loud = content == STATISTICS_FRAME
        odd = self._finite and loud and not_finite(decoded)
        self._finite = self._finite and not odd
        if odd or content not in self._begun:
            self._begun.add(content)
            yield frame
            return
        layout = bytes([content]) + decoded.numbers.tobytes()
        before = self._waiting.pop(layout, None)
        if before is None:
            self._waiting[layout] = frame
        else:
            yield frame if loud and louder(decode(before)[1], decoded) is decoded else before

    def _write(self, data: bytes) -> None:
        descriptor = open_to_append(self._draft)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError("only part of it could be written")
        finally:
            os.close(descriptor)
        self.written += len(data)


def _payload(header: bytes) -> int:
    """How many bytes follow; OSError where this is no header of ours."""
    if len(header) == FRAME_HEADER.size:
        magic, content, _, rows, size, _ = FRAME_HEADER.unpack(header)
        if (
            magic == FRAME_MAGIC
            and content in FRAME_COLUMNS
            and size == rows * 4 * (1 + FRAME_COLUMNS[content])
        ):
            return size
    raise OSError("it is damaged")


def decode(frame: bytes) -> tuple[int, Frame]:
    """What a whole frame holds, and the frame; OSError if it is damaged."""
    _, content, step, rows, size, crc = FRAME_HEADER.unpack_from(frame)
    payload = memoryview(frame)[FRAME_HEADER.size :]
    if len(payload) != size or zlib.crc32(payload) != crc:
        raise OSError("it is damaged")
    values = np.frombuffer(payload, "<f4", offset=4 * rows).reshape(rows, -1)
    return content, Frame(step, np.frombuffer(payload, "<u4", count=rows), values)


def louder(one: Frame, other: Frame) -> Frame:
    """Of two frames of the same tensors, the one that holds a NaN or Inf, else the one with the largest norm.

    >>> quiet, loud = (Frame(step, np.array([0]), np.full((1, 13), size)) for step, size in ((3, 1.0), (4, 9.0)))
    >>> louder(quiet, loud).step, louder(loud, quiet).step
    (4, 4)
    """
    odd = [not_finite(frame) for frame in (one, other)]
    if any(odd):
        return one if odd[0] else other  # the first of them is where it began
    with np.errstate(all="ignore"):
        ratio = np.abs(one.values[:, NORM]) / np.abs(other.values[:, NORM])
    known = ratio[np.isfinite(ratio) & (ratio > 0)]
    return one if not len(known) or known.max() >= 1 / known.min() else other


def not_finite(frame: Frame) -> bool:
    values = frame.values
    counted = (values[:, NAN] > 0) | (values[:, INF] > 0)
    light = np.isnan(values[:, NAN]) & ~np.isfinite(values[:, NORM])  # measured by its norm alone
    return bool((counted | light).any())
