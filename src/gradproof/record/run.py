"""Reads a run: finished, growing, killed in mid-write, or copied from another machine. Needs no torch."""

from __future__ import annotations

import csv
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
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

MOST_LAYOUTS = 64  # kept at a time; a run usually has as many as there are depths


class Frame(NamedTuple):
    """Statistics of one step: row i belongs to the tensor numbered `numbers[i]`, in the order of execution."""

    step: int
    numbers: np.ndarray  # (rows,)
    values: np.ndarray  # (rows, columns)


class Frames(Sequence[Frame]):
    """Frames of one content, read from disk when they are asked for: a long run's do not fit into memory."""

    def __init__(self, file: Path, columns: int) -> None:
        self._file = file
        self._columns = columns
        self._places: list[tuple[int, int, int]] = []  # step, offset of the payload, rows
        self._layouts: dict[bytes, np.ndarray] = {}  # most frames have the same tensors: one array for all

    def add(self, step: int, offset: int, rows: int) -> None:
        self._places.append((step, offset, rows))

    @property
    def steps(self) -> np.ndarray:
        return np.array([step for step, _, _ in self._places], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Frame]:
        if not self._places:
            return
        with open(self._file, "rb") as stream:
            for place in self._places:
                yield self._read(stream, *place)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with open(self._file, "rb") as stream:
            return self._read(stream, *self._places[index])

    def _read(self, stream: io.BufferedReader, step: int, offset: int, rows: int) -> Frame:
        stream.seek(offset)
        layout = stream.read(4 * rows)
        if layout not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout] = np.frombuffer(layout, "<u4").astype(np.int64)
        values = np.frombuffer(stream.read(4 * rows * self._columns), "<f4").reshape(rows, self._columns)
        return Frame(step, self._layouts[layout], values)


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

    @property
    def frames(self) -> Frames:
        """The statistics frames, in the order of steps."""
        return self._frames[STATISTICS_FRAME]

    @property
    def distributions(self) -> Frames:
        """Percentiles, then exponent counts, of sampled steps."""
        return self._frames[DISTRIBUTION_FRAME]

    @cached_property
    def _frames(self) -> dict[int, Frames]:
        return _find_frames(self.path / FRAMES_FILE, self.notes)

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
        text = file.read_text(encoding="utf-8", errors="replace")
        for line in text.removesuffix("\n").split("\n"):  # splitlines would cut at U+2028, too
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                events.append(event)
            else:
                damaged += 1
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged lines are left out")
    return events


def _find_frames(file: Path, notes: list[str]) -> dict[int, Frames]:
    """Where the whole frames of a file are, by content; each is read once, and checked."""
    found = {content: Frames(file, columns) for content, columns in FRAME_COLUMNS.items()}
    if not file.exists() or file.stat().st_size == 0:
        return found
    offset, damaged, end = 0, 0, file.stat().st_size
    with open(file, "rb") as stream:
        while offset + FRAME_HEADER.size <= end:
            magic, content, step, rows, size, crc = FRAME_HEADER.unpack(stream.read(FRAME_HEADER.size))
            start = offset + FRAME_HEADER.size
            if magic != FRAME_MAGIC or start + size > end:
                break
            columns = FRAME_COLUMNS.get(content)
            if zlib.crc32(stream.read(size)) != crc or columns is None or size != rows * 4 * (1 + columns):
                damaged += 1
            else:
                found[content].add(step, start, rows)
            offset = start + size
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged frames are left out")
    if offset != end:
        notes.append(f"{file.name}: the last {end - offset} bytes are no whole frame and are left out")
    return found
