"""Reads a run: finished, growing, killed in mid-write, or copied from another machine. Needs no torch."""

from __future__ import annotations

import csv
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradproof.errors import UserError
from gradproof.record.schema import (
    DISTRIBUTION_FRAME,
    EVENTS_FILE,
    FORMAT,
    FRAME_COLUMNS,
    FRAME_HEADER,
    FRAME_MAGIC,
    FRAMES_FILE,
    INFO_FILE,
    PERCENTILES,
    STATISTICS,
    STATISTICS_FRAME,
    STEP_COLUMNS,
    STEPS_FILE,
    TEXT_COLUMNS,
)


class Frame(NamedTuple):
    """Statistics of one step: row i belongs to the tensor numbered `numbers[i]`, in the order of execution."""

    step: int
    numbers: np.ndarray  # (rows,)
    values: np.ndarray  # (rows, columns)


class Table(NamedTuple):
    """One statistic of all tensors of a kind: `values[i, j]` at `steps[i]` of `names[j]`; nan: not measured."""

    steps: np.ndarray
    names: list[str]
    values: np.ndarray


@dataclass
class Run:
    """A run directory in memory; `notes` says what could not be read.

    `steps` has one array a column of steps.csv. A cell that was empty and a NaN are both nan there: `seen` tells
    which cells were measured.
    """

    path: Path
    info: dict[str, Any]
    steps: dict[str, np.ndarray]
    seen: dict[str, np.ndarray]
    events: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """Every tensor that was measured, by number: kind, name, shape, dtype."""
        return self.info.get("tensors", [])

    def __len__(self) -> int:
        return len(self.steps["step"])

    @cached_property
    def frames(self) -> list[Frame]:
        """The statistics frames, in the order of steps."""
        return [frame for content, frame in self._frames if content == STATISTICS_FRAME]

    @cached_property
    def distributions(self) -> list[Frame]:
        """Percentiles, then exponent counts, of sampled steps."""
        return [frame for content, frame in self._frames if content == DISTRIBUTION_FRAME]

    @cached_property
    def _frames(self) -> list[tuple[int, Frame]]:
        return list(_read_frames(self.path / FRAMES_FILE, self.notes))

    def numbers(self, kind: str) -> list[int]:
        """The numbers of all tensors of a kind, in the order in which they were first seen."""
        return [number for number, tensor in enumerate(self.tensors) if tensor["kind"] == kind]

    def table(self, kind: str, statistic: str) -> Table:
        """One statistic of every tensor of a kind over the measured steps.

        >>> run.table("gradient", "norm").values.shape  # doctest: +SKIP
        (200, 51)
        """
        numbers = self.numbers(kind)
        column_of = np.full(len(self.tensors), -1)
        column_of[numbers] = np.arange(len(numbers))
        column = STATISTICS.index(statistic)
        steps, rows = [], []
        for frame in self.frames:
            place = column_of[frame.numbers]
            here = place >= 0
            if not here.any():
                continue
            row = np.full(len(numbers), np.nan, dtype=np.float32)
            row[place[here]] = frame.values[here, column]
            steps.append(frame.step)
            rows.append(row)
        values = np.stack(rows) if rows else np.empty((0, len(numbers)), dtype=np.float32)
        return Table(np.array(steps, dtype=np.int64), [self.tensors[n]["name"] for n in numbers], values)

    def series(self, kind: str, name: str, statistic: str) -> tuple[np.ndarray, np.ndarray]:
        """One statistic of one tensor: steps and values where it was measured."""
        names = {self.tensors[number]["name"]: number for number in self.numbers(kind)}
        if name not in names:
            some = ", ".join(list(names)[:8]) or "none"
            raise UserError(f"{self.path} has no {kind} of {name!r}; it has {some}")
        column = STATISTICS.index(statistic)
        found = [(f.step, f.values[f.numbers == names[name], column]) for f in self.frames]
        steps = [step for step, value in found if len(value) and not np.isnan(value[0])]
        values = [value[0] for _, value in found if len(value) and not np.isnan(value[0])]
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float32)

    def percentiles(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one tensor on sampled steps: steps, percentiles (see PERCENTILES) and exponent counts."""
        found = [
            (f.step, f.values[f.numbers == number][0]) for f in self.distributions if number in f.numbers
        ]
        steps = np.array([step for step, _ in found], dtype=np.int64)
        values = (
            np.stack([v for _, v in found]) if found else np.empty((0, FRAME_COLUMNS[DISTRIBUTION_FRAME]))
        )
        return steps, values[:, : len(PERCENTILES)], values[:, len(PERCENTILES) :]


def open_run(path: str | os.PathLike) -> Run:
    """Read a run directory; raises UserError with one sentence where there is no run to read."""
    path = Path(path)
    info = _read_info(path)
    notes: list[str] = []
    steps, seen = _read_steps(path / STEPS_FILE, notes)
    events = _read_events(path / EVENTS_FILE, notes)
    return Run(path, info, steps, seen, events, notes)


def _read_info(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"there is no run at {path}; `gradproof run train.py` makes one under runs/")
    file = path / INFO_FILE
    if not path.is_dir() or not file.exists():
        others = sorted(p.parent.name for p in path.glob(f"*/{INFO_FILE}")) if path.is_dir() else []
        hint = f"; it holds the runs {', '.join(others[:8])}" if others else ""
        raise UserError(f"{path} is not a run directory: it has no {INFO_FILE}{hint}")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
        version = info["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file} is damaged ({error}); the steps in {STEPS_FILE} may still be readable"
        ) from None
    if not isinstance(version, int) or version > FORMAT:
        raise UserError(
            f"{path} was written by a newer gradproof (format {version}; this one reads up to {FORMAT}): "
            "pip install --upgrade gradproof"
        )
    return info


def _read_steps(file: Path, notes: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    header, rows = list(STEP_COLUMNS), []
    if file.exists():
        whole, _, rest = file.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        if rest:
            notes.append(f"{file.name}: the last row was cut off and is left out")
        lines = list(csv.reader(io.StringIO(whole)))
        header = lines[0] if lines else header
        rows = [line for line in lines[1:] if len(line) == len(header)]
        if lines and len(rows) != len(lines) - 1:
            notes.append(f"{file.name}: {len(lines) - 1 - len(rows)} damaged rows are left out")
    else:
        notes.append(f"{file.name} is missing: the run has no steps to show")
    columns, seen = {}, {}
    for name in STEP_COLUMNS:
        place = header.index(name) if name in header else None
        cells = ["" if place is None else row[place] for row in rows]
        seen[name] = np.array([cell != "" for cell in cells], dtype=bool)
        if name in TEXT_COLUMNS:
            columns[name] = np.array(cells, dtype=object)
        else:
            columns[name] = np.array([_number(cell) for cell in cells], dtype=np.float64)
    return columns, seen


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _read_events(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    events, damaged = [], 0
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                damaged += 1
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged lines are left out")
    return events


def _read_frames(file: Path, notes: list[str]) -> Iterator[tuple[int, Frame]]:
    if not file.exists() or file.stat().st_size == 0:
        return
    data = np.memmap(file, dtype=np.uint8, mode="r")
    offset, damaged = 0, 0
    while offset + FRAME_HEADER.size <= len(data):
        magic, content, step, rows, size, crc = FRAME_HEADER.unpack(
            data[offset : offset + FRAME_HEADER.size].tobytes()
        )
        start, end = offset + FRAME_HEADER.size, offset + FRAME_HEADER.size + size
        columns = FRAME_COLUMNS.get(content)
        if magic != FRAME_MAGIC or end > len(data):
            break
        payload = data[start:end]
        if zlib.crc32(payload.data) != crc or columns is None or size != rows * 4 * (1 + columns):
            damaged += 1
        else:
            numbers = payload[: 4 * rows].view("<u4").astype(np.int64)
            values = payload[4 * rows :].view("<f4").reshape(rows, columns)
            yield content, Frame(step, numbers, values)
        offset = end
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged frames are left out")
    if offset != len(data):
        notes.append(f"{file.name}: the last {len(data) - offset} bytes are no whole frame and are left out")
