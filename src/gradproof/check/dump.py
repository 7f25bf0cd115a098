"""One training step of any program as a file: what it had, what it computed, and the gradients it found.

A safetensors file whose tensors are named weights/…, batch/…, activations/…, activation_gradients/…, gradients/…, in
the order of the computation, with the step, the loss and the learning rate in its metadata. A C program writes it with
`gp_dump` of gradproof.h, a Python program with `dump_step`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from gradproof.errors import UserError

FORMAT = "gradproof-dump-1"
KINDS = ("weights", "batch", "activations", "activation_gradients", "gradients")
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
UNSIGNED = {
    "U16": numpy.uint16,
    "U32": numpy.uint32,
    "U64": numpy.uint64,
}  # torch can hardly do anything with them


@dataclass(frozen=True)
class Dump:
    """A step as another program saw it."""

    path: Path
    step: int | None
    loss: float | None
    weights: dict[str, Tensor] = field(default_factory=dict)
    batch: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Tensor] = field(default_factory=dict)
    activation_gradients: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# ---- writing


def dump_step(
    path: str | Path,
    *,
    weights: Mapping[str, Any],
    batch: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
    activation_gradients: Mapping[str, Any] | None = None,
    gradients: Mapping[str, Any] | None = None,
    loss: float | None = None,
    step: int | None = None,
    lr: float | None = None,
) -> Path:
    """Writes one step for `gradproof check-dump`; into a directory as step-000012.safetensors. Returns the file.

    dump_step("step-000012.safetensors", weights=w, batch={"x": x, "y": y}, gradients=g, loss=2.5, step=12)
    """
    path = Path(path)
    if path.is_dir():
        path = path / f"step-{step or 0:06d}.safetensors"
    kinds = (weights, batch, activations, activation_gradients, gradients)
    tensors = {
        f"{kind}/{name}": _as_tensor(value, f"{kind}/{name}")
        for kind, named in zip(KINDS, kinds, strict=True)
        for name, value in (named or {}).items()
    }
    numbers = {"step": step, "loss": loss, "lr": lr}
    metadata = {"format": FORMAT, "byte_order": "little"}
    metadata |= {
        key: repr(float(x) if key != "step" else int(x)) for key, x in numbers.items() if x is not None
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    names = {dtype: name for name, dtype in DTYPES.items()}
    start = 0
    for name, x in tensors.items():
        stop = start + x.numel() * x.element_size()
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return path


def _as_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, numpy.ndarray | numpy.generic | float | int | list):
        value = torch.from_numpy(numpy.array(value))
    if not isinstance(value, Tensor) or value.dtype not in DTYPES.values():
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"{name} is a {kind}, which a dump cannot hold; give an array or a tensor of numbers")
    return value.detach().cpu().contiguous()


# ---- reading


def read_dump(path: str | Path) -> Dump:
    """The step in a file, or one sentence that says why it is none."""
    path = Path(path)
    header, data = _read_file(path)
    metadata = header.pop("__metadata__", {})
    _check_metadata(path, metadata)
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    strays = []
    by_place = sorted(header.items(), key=lambda item: _offsets(path, *item)[0])
    for name, entry in by_place:
        kind, _, rest = name.partition("/")
        if kind in found and rest:
            found[kind][rest] = _read_tensor(path, name, entry, data)
        else:
            strays.append(name)
    if not found["weights"]:
        have = ", ".join(list(header)[:6]) or "nothing"
        raise UserError(
            f"{path} has no weights/NAME to run a reference from; it has {have}; a dump's tensors are "
            f"called {', '.join(f'{kind}/…' for kind in KINDS)}"
        )
    for kind in ("weights", "batch"):
        _refuse_not_finite(path, kind, found[kind])
    notes = [f"{', '.join(strays[:6])}: none of {', '.join(KINDS)}, left out"] if strays else []
    step, loss = _number(path, metadata, "step"), _number(path, metadata, "loss")
    return Dump(path, None if step is None else int(step), loss, **found, notes=tuple(notes))


def _read_file(path: Path) -> tuple[dict[str, Any], bytearray]:
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.safetensors"))
        raise UserError(
            f"{path} is a directory; name one of its files: {', '.join(inside[:4]) or 'it has none'}"
        )
    if not path.is_file():
        raise UserError(f"there is no file {path}; gradproof.dump_step or gp_dump writes one")
    content = bytearray(path.read_bytes())
    if len(content) < 8:
        raise UserError(f"{path} is cut off: it has {len(content)} bytes, not even the length of its header")
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise UserError(f"{path} {_why_too_long(content, length)}")
    try:
        header = json.loads(content[8 : 8 + length])
    except ValueError as error:
        raise UserError(f"{path} is no safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise UserError(f"{path} is no safetensors file: its header is not an object")
    return header, content[8 + length :]


def _why_too_long(content: bytearray, length: int) -> str:
    (swapped,) = struct.unpack(">Q", content[:8])
    if swapped <= len(content) - 8 and content[8:9] == b"{":
        return "was written in another byte order: safetensors are little-endian, swap the bytes when writing"
    if content[8:9] == b"{":
        return f"is cut off: its header has {length} bytes, the whole file {len(content)}"
    if content[:2] == b"PK":
        return "is a file of torch.save, no safetensors file; write it with gradproof.dump_step or gp_dump"
    return "is no safetensors file; write it with gradproof.dump_step or gp_dump"


def _check_metadata(path: Path, metadata: dict[str, Any]) -> None:
    order, version = metadata.get("byte_order", "little"), metadata.get("format", FORMAT)
    if order != "little":
        raise UserError(
            f"{path} says byte_order {order!r}: safetensors are little-endian, swap the bytes when writing"
        )
    if version != FORMAT:
        raise UserError(f"{path} is of format {version!r}; this gradproof reads {FORMAT!r}")


def _number(path: Path, metadata: dict[str, Any], key: str) -> float | None:
    if key not in metadata:
        return None
    try:
        return float(metadata[key])
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} says {key} {metadata[key]!r}, which is no number") from error


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        start, stop = (int(n) for n in entry["data_offsets"])
        return start, stop
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} is no safetensors file: {name} has no data_offsets") from error


def _read_tensor(path: Path, name: str, entry: dict[str, Any], data: bytearray) -> Tensor:
    start, stop = _offsets(path, name, entry)
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if dtype not in DTYPES and dtype not in UNSIGNED:
        known = ", ".join((*DTYPES, *UNSIGNED))
        raise UserError(f"{path}: {name} is of dtype {dtype!r}, none of {known}")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise UserError(f"{path}: {name} has the shape {shape!r}")
    each = DTYPES[dtype].itemsize if dtype in DTYPES else numpy.dtype(UNSIGNED[dtype]).itemsize
    needed = math.prod(shape) * each
    if stop - start != needed:
        raise UserError(
            f"{path}: {name} has {stop - start} bytes, but {needed} are needed for {dtype} of shape {tuple(shape)}"
        )
    if not 0 <= start <= stop <= len(data):
        raise UserError(
            f"{path} is cut off: {name} ends at byte {stop} of the data, and there are {len(data)}"
        )
    if dtype in UNSIGNED:
        wide = numpy.frombuffer(data, UNSIGNED[dtype], math.prod(shape), start).astype(numpy.int64)
        return torch.from_numpy(wide).reshape(shape)
    if not needed:
        return torch.empty(shape, dtype=DTYPES[dtype])
    part = torch.frombuffer(data, dtype=torch.uint8, count=needed, offset=start)
    return part.clone().view(DTYPES[dtype]).reshape(shape)


def _refuse_not_finite(path: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    for name, x in tensors.items():
        bad = ~torch.isfinite(x.double()) if x.is_floating_point() else torch.zeros((), dtype=torch.bool)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            raise UserError(
                f"{path}: {kind}/{name} is {float(x[place])} at {place} ({int(bad.sum())} of {x.numel()} entries are "
                "not finite), and nothing can be run from that; dump a step before it"
            )
