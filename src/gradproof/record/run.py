"""Reads a run: finished, growing, killed in mid-write, or copied from another machine. Needs no torch."""

from __future__ import annotations

import math
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gradproof.errors import UserError, plain
from gradproof.files import open_file, read_file
from gradproof.record.door import LARGEST_WHOLE, Damaged, parse_json, read_json
from gradproof.record.schema import (
    CUT_OFF_FILE,
    DISTRIBUTION_FRAME,
    EVENTS_FILE,
    EXAMINATION_FILE,
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
    WHOLE_COLUMNS,
)
from gradproof.record.shapes import clean_event, clean_info
from gradproof.record.source import LARGEST_COPY, SCRIPT_COPY

ROWS_AT_ONCE = 20_000
LONGEST_ROW = 1 << 20  # bytes; a step of a million calls
MOST_ROWS = 10_000_000
MOST_OPTIMIZERS = 100_000
LARGEST_EVENTS = 256 << 20  # bytes of a file of events
MOST_AT_ONCE = 16 << 20  # bytes of a read
LARGEST_FRAME = 1 << 29  # bytes: the distributions of 1.8 million tensors
MOST_LAYOUTS = 64  # kept at a time; a run usually has as many as there are depths


class Frame(NamedTuple):
    """Statistics of one step: row i belongs to the tensor numbered `numbers[i]`, in the order of execution."""

    step: int
    numbers: np.ndarray  # (rows,)
    values: np.ndarray  # (rows, columns)


class Frames(Sequence[Frame]):
    """Frames of one content, read from disk when they are asked for: a long run's do not fit into memory."""

    def __init__(self, file: OpenFile | None, columns: int, tensors: int | None) -> None:
        self._file = file
        self._columns = columns
        # that have a name: a growing run may measure what its run.json does not name yet; None: all
        self._tensors = tensors
        self._places: list[tuple[int, int, int]] = []  # step, offset of the payload, rows
        # most frames have the same tensors: one array for all, and which of its rows have a name
        self._layouts: dict[bytes, tuple[np.ndarray, np.ndarray | None]] = {}

    def add(self, step: int, offset: int, rows: int) -> None:
        self._places.append((step, offset, rows))

    def sort(self) -> None:
        """By step: the last light steps before trouble are written after it."""
        self._places.sort(key=lambda place: place[0])

    @property
    def steps(self) -> np.ndarray:
        return np.array([step for step, _, _ in self._places], dtype=np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """How many tensors each frame has."""
        return np.array([rows for _, _, rows in self._places], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Frame]:
        return (self._read(*place) for place in self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._read(*self._places[index])

    def _read(self, step: int, offset: int, rows: int) -> Frame:
        assert self._file is not None
        data = self._file.read(offset, 4 * rows * (1 + self._columns))
        layout = data[: 4 * rows]
        if layout not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout] = self._named(np.frombuffer(layout, "<u4").astype(np.int64))
        numbers, named = self._layouts[layout]
        values = np.frombuffer(data, "<f4", offset=4 * rows).reshape(rows, self._columns)
        return Frame(step, numbers, values if named is None else values[named])

    def _named(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        if self._tensors is None or (numbers < self._tensors).all():
            return numbers, None
        named = numbers < self._tensors
        return numbers[named], named


class OpenFile:
    """A file as it was when it was opened: one that takes its place later, under the same name, is another file."""

    def __init__(self, path: Path) -> None:
        with open_file(path) as stream:
            self._descriptor = os.dup(stream.fileno())
        self.size = os.fstat(self._descriptor).st_size
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """So many bytes from there; what is missing at the end, because somebody has cut the file, is zero."""
        parts = []
        while size and (part := os.pread(self._descriptor, min(size, MOST_AT_ONCE), offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts) + bytes(size)


class Table(NamedTuple):
    """One statistic of all tensors of a kind: `values[i, j]` at `steps[i]` of `names[j]`; nan: not measured."""

    steps: np.ndarray
    names: list[str]
    values: np.ndarray


@dataclass
class Run:
    """A run directory in memory; `notes` says what could not be read. Events of examinations follow the training's.

    `steps` has one array a column of steps.csv. A cell that was empty and a NaN are both nan there: `seen` tells
    which cells were measured.
    """

    path: Path
    info: dict[str, Any]
    steps: dict[str, np.ndarray]
    seen: dict[str, np.ndarray]
    events: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    ranks: Any = None  # of a training of several, where they were read (record/ranks)

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """Every tensor that was measured, by number: kind, name, shape, dtype."""
        return self.info.get("tensors", [])

    @property
    def by_hand(self) -> bool:
        """Whether a program wrote it through gradproof.h: gradients and updates are its own, and nothing is taped."""
        return self.info.get("written_by") == "gradproof.h"

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
        return find_frames(self.path / FRAMES_FILE, len(self.tensors), self.notes)

    def script(self) -> list[str] | None:
        """The lines of the script as it was when it ran; None where it was not kept, or cannot be read."""
        try:
            text = read_file(self.path / SCRIPT_COPY, LARGEST_COPY).decode("utf-8", "replace")
        except OSError:
            return None
        return [plain(line, lines=True) for line in text.splitlines()]

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
    notes: list[str] = []
    info = _read_info(path, notes)
    steps, seen = _read_steps(path / STEPS_FILE, notes)
    events = read_events(path / EVENTS_FILE, notes)
    examined = read_events(path / EXAMINATION_FILE, notes)
    _add_facts(info, examined)
    events += examined
    return Run(path, info, steps, seen, events, notes)


def _read_info(path: Path, notes: list[str]) -> dict[str, Any]:
    shown = plain(str(path))
    if not os.path.exists(path):
        raise UserError(f"there is no run at {shown}; `gradproof run train.py` makes one under runs/")
    file = path / INFO_FILE
    if not path.is_dir() or not os.path.lexists(file):
        others = sorted(plain(p.parent.name) for p in path.glob(f"*/{INFO_FILE}")) if path.is_dir() else []
        hint = f"; it holds the runs {', '.join(others[:8])}" if others else ""
        raise UserError(f"{shown} is not a run directory: it has no {INFO_FILE}{hint}")
    try:
        data = read_json(file)
        if not isinstance(data, dict) or "format" not in data:
            raise Damaged("it does not say its format")
    except (Damaged, OSError) as error:
        raise UserError(
            f"{shown}/{INFO_FILE} is damaged ({error}); the steps in {STEPS_FILE} may still be readable"
        ) from None
    version = data["format"]
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= FORMAT:
        raise UserError(
            f"{shown} was written by a newer gradproof (format {plain(str(version))[:20]}; this one reads up to "
            f"{FORMAT}): pip install --upgrade gradproof"
        )
    info = clean_info(data, lambda what: notes.append(f"{INFO_FILE}: {what} is damaged and left out"))
    if not info.get("failure") and os.path.lexists(path / CUT_OFF_FILE):
        info["failure"] = "the disk took no more of the record"
    return info


def _read_steps(file: Path, notes: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The columns of all whole rows, and which cells were filled; rows become numbers piece by piece."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in STEP_COLUMNS}
    seen: dict[str, list[np.ndarray]] = {name: [] for name in STEP_COLUMNS}
    damaged = 0
    try:
        stream = open_file(file)
    except FileNotFoundError:
        notes.append(f"{file.name} is missing: the run has no steps to show")
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error}): the run has no steps to show")
    else:
        with stream:
            lines = _whole_lines(stream, file.name, notes)
            header = (next(lines, b"") or b"").decode("utf-8", "replace").split(",")
            places = _places_of_columns(header, file.name, notes)
            read = 0
            while places and read < MOST_ROWS and (piece := list(islice(lines, ROWS_AT_ONCE))):
                read += len(piece)
                rows = [line.decode("utf-8", "replace").split(",") for line in piece if line is not None]
                rows = [row for row in rows if len(row) == len(header)]
                made, filled, bad = _columns_of(rows, places)
                damaged += len(piece) - len(rows) + bad
                for name in STEP_COLUMNS:
                    columns[name].append(made[name])
                    seen[name].append(filled[name])
            if read >= MOST_ROWS:
                notes.append(f"{file.name}: only the first {MOST_ROWS:,} rows are read")
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged rows are left out")
    empty = {name: np.array([], object if name in TEXT_COLUMNS else np.float64) for name in STEP_COLUMNS}
    return (
        {name: np.concatenate(parts) if parts else empty[name] for name, parts in columns.items()},
        {name: np.concatenate(parts) if parts else np.array([], bool) for name, parts in seen.items()},
    )


def _places_of_columns(header: list[str], file: str, notes: list[str]) -> dict[str, int]:
    """Where each column stands; empty if this is no header of a table of steps."""
    if header == [""]:
        return {}
    places = {name: header.index(name) for name in STEP_COLUMNS if header.count(name) == 1}
    if "step" not in places:
        notes.append(f"{file}: its first line is damaged, so that the run has no steps to show")
        return {}
    missing = [name for name in STEP_COLUMNS if name not in places and name not in LATER_COLUMNS]
    if missing:
        notes.append(f"{file}: its first line is damaged; {', '.join(missing)} is left out")
    return places


LATER_COLUMNS = ()  # that an older gradproof did not write


def _columns_of(
    rows: list[list[str]], places: dict[str, int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Whole rows as columns, which cells were filled, and how many rows hold what does not belong there."""
    cells = list(zip(*rows, strict=True)) if rows else []
    made: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    good = np.ones(len(rows), dtype=bool)
    for name in STEP_COLUMNS:
        column = cells[places[name]] if name in places and cells else ("",) * len(rows)
        filled[name] = np.array([cell != "" for cell in column], dtype=bool)
        if name in TEXT_COLUMNS:
            kinds = {cell: cell for cell in column}  # a few, and one object for each
            made[name] = np.array([kinds[cell] for cell in column], dtype=object)
            strange = {cell for cell in kinds if cell and not (cell.isascii() and cell.isalpha())}
            if strange:
                good &= np.array([cell not in strange for cell in column], dtype=bool)
            continue
        made[name], known = _numbers(column)
        good &= known
        if name in WHOLE_COLUMNS:
            most = MOST_OPTIMIZERS if name == "optimizer" else LARGEST_WHOLE
            with np.errstate(invalid="ignore"):
                fits = (made[name] >= 0) & (made[name] <= most) & (made[name] == np.floor(made[name]))
            good &= fits if name == "step" else fits | ~filled[name]
    if good.all():
        return made, filled, 0
    return (
        {name: column[good] for name, column in made.items()},
        {name: column[good] for name, column in filled.items()},
        int((~good).sum()),
    )


def _whole_lines(stream: BinaryIO, name: str, notes: list[str]) -> Iterator[bytes | None]:
    """Lines without their ends; None for one that is far too long."""
    while line := stream.readline(LONGEST_ROW):
        if line.endswith(b"\n"):
            yield line.rstrip(b"\r\n")
        elif len(line) < LONGEST_ROW:
            notes.append(f"{name}: the last row was cut off and is left out")
        else:
            while line and not line.endswith(b"\n"):
                line = stream.readline(LONGEST_ROW)
            yield None


def _numbers(cells: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Cells as numbers, and which of them are numbers or empty."""
    try:
        values = np.array([float(cell) if cell else math.nan for cell in cells], dtype=np.float64)
        return values, np.ones(len(cells), dtype=bool)
    except ValueError:
        found = [_number(cell) for cell in cells]
        values = np.array([math.nan if value is None else value for value in found], dtype=np.float64)
        return values, np.array([value is not None for value in found], dtype=bool)


def _number(cell: str) -> float | None:
    try:
        return float(cell) if cell else math.nan
    except ValueError:
        return None


def read_events(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The whole and sound events of a file, one a line; `notes` says what was left out."""
    events, damaged = [], 0
    try:
        data = read_file(file, LARGEST_EVENTS)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error}) and is left out")
        return []
    for line in data.removesuffix(b"\n").split(b"\n") if data else ():
        try:
            events.append(clean_event(parse_json(line)))
        except Damaged:
            damaged += 1
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged lines are left out")
    return events


def _add_facts(info: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """What an examination found out about a training stands beside what its listeners noted; the later one counts."""
    found = {event["name"]: event["value"] for event in events if event["event"] == "fact"}
    if found:
        info["facts"] = {**info.get("facts", {}), **found}


def find_frames(file: Path, tensors: int | None, notes: list[str]) -> dict[int, Frames]:
    """Where the whole frames of a file are, by content; each is read once, and checked."""
    opened, damaged, lost = None, 0, 0
    try:
        opened = OpenFile(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error}) and is left out")
    found = {content: Frames(opened, columns, tensors) for content, columns in FRAME_COLUMNS.items()}
    if opened is not None:
        damaged, lost = _index_frames(opened, found)
    for frames in found.values():
        frames.sort()
    if damaged:
        notes.append(f"{file.name}: {damaged} damaged frames are left out")
    if lost:
        notes.append(f"{file.name}: the last {lost} bytes are no whole frame and are left out")
    return found


def _index_frames(file: OpenFile, found: dict[int, Frames]) -> tuple[int, int]:
    """Notes where each whole frame is; how many are damaged, and how many bytes at the end belong to none."""
    offset, damaged, end = 0, 0, file.size
    while offset + FRAME_HEADER.size <= end:
        header = file.read(offset, FRAME_HEADER.size)
        magic, content, step, rows, size, crc = FRAME_HEADER.unpack(header)
        start = offset + FRAME_HEADER.size
        columns = FRAME_COLUMNS.get(content)
        fits = magic == FRAME_MAGIC and columns is not None and size == rows * 4 * (1 + columns)
        if fits and size <= LARGEST_FRAME and start + size <= end and step <= LARGEST_WHOLE:
            if zlib.crc32(file.read(start, size)) == crc:
                found[content].add(step, start, rows)
            else:
                damaged += 1
            offset = start + size
            continue
        again = _find_magic(file, offset + 1)  # a damaged header says nothing about its length
        if again is None:
            break
        damaged += 1
        offset = again
    return damaged, end - offset


def _find_magic(file: OpenFile, offset: int) -> int | None:
    """The next place at which a frame may begin."""
    while offset < file.size:
        block = file.read(offset, min(MOST_AT_ONCE, file.size - offset))
        place = block.find(FRAME_MAGIC)
        if place >= 0:
            return offset + place
        offset += max(1, len(block) - len(FRAME_MAGIC) + 1)
    return None
