"""Packs arrays of numbers for the page: one block of bytes, compressed, as text that JSON can carry.

page/data.js is the other side. Types: `f4` float32, `h2` the upper half of a float32 (8 significant bits, for
histories that are only drawn), `d4` differences of int32, `u1` bytes. The bytes of one significance lie together,
which is what makes them compress.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

Reference = tuple[int, int, str]  # where in the block, how many values, of what type


class Columns:
    """Collects arrays; `add` gives the reference under which the page finds one again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, values: np.ndarray, kind: str) -> Reference:
        data = _encode(np.ascontiguousarray(values).reshape(-1), kind)
        reference = (self._size, int(np.size(values)), kind)
        self._parts.append(data)
        self._size += len(data)
        return reference

    def packed(self) -> str:
        """Everything, deflated, in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), 9)).decode("ascii")


def _encode(values: np.ndarray, kind: str) -> bytes:
    if kind == "u1":
        return values.astype(np.uint8).tobytes()
    if kind == "d4":
        return _by_significance(np.diff(values.astype(np.int32), prepend=np.int32(0)).astype("<i4"))
    with np.errstate(over="ignore"):
        floats = values.astype("<f4")
    return _by_significance(floats if kind == "f4" else upper_half(floats))


def upper_half(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits of float32 values, rounded; NaN and Inf stay what they are."""
    bits = values.view("<u4")
    rounded = (bits + np.uint32(0x8000)) >> np.uint32(16)
    special = ~np.isfinite(values)
    quiet = np.isnan(values).astype(np.uint32) << np.uint32(
        6
    )  # a NaN must not lose its last bit and be an Inf
    return np.where(special, (bits >> np.uint32(16)) | quiet, rounded).astype("<u2")


def _by_significance(values: np.ndarray) -> bytes:
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()
