"""Writes a run while it happens: whole records only, appended at once, so that a killed process loses nothing.

Training must not suffer from the disk: the first failure to write becomes one warning, and writing ends. A disk that
may keep it waiting is left to a thread.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.errors import warn
from gradproof.files import map_new_file
from gradproof.record.disk import Aside, Files, is_local
from gradproof.record.schema import (
    CUT_OFF_FILE,
    EVENTS_FILE,
    FORMAT,
    FRAMES_FILE,
    INFO_FILE,
    PERCENTILES,
    STATISTICS,
    STATISTICS_FRAME,
    STEP_COLUMNS,
    STEPS_FILE,
    TEXT_COLUMNS,
    WHOLE_COLUMNS,
    json_line,
    pack_frame,
)
from gradproof.record.sink import Sink, Sinks
from gradproof.record.thinner import FrameFile

MOST_WAITED = 10.0  # seconds that training may wait for the disk
MOST_FORMS = 64  # of rows: which columns they have
MOST_NAMED, A_TENSOR = 24 << 20, 80  # bytes of run.json that tensors may take, and one without its name
Store = Callable[[int, bytes], None]  # puts bytes in a place of a file
A_WAIT = 0.25  # seconds; what is shorter may as well be a busy processor


class RunWriter:
    """One run directory, made new; `add_tensor` gives the number under which frames know a tensor."""

    def __init__(self, path: str | os.PathLike, info: Mapping[str, Any], sinks: Sequence[Sink] = ()) -> None:
        self.path = Path(path)
        self.broken: str | None = None
        self._info: dict[str, Any] = {"format": FORMAT, "statistics": STATISTICS, "tensors": [], **info}
        self._numbers: dict[tuple[str, str], int] = {}
        self._forms: dict[tuple[str, ...], tuple[str, Callable[[Any], Any]]] = {}
        self._named = 0  # bytes
        self._info_changed = True
        self._waited = 0.0  # seconds that training has waited for the disk
        self._aside: Aside | None = None
        self._made = False  # what is not ours is not written to
        try:
            self.path = new_directory(self.path)
            self._made = True
        except OSError as error:
            self._give_up(error)
        self._files = Files(self.path)
        self._frames = FrameFile(self._files, FRAMES_FILE)
        if self._made and not is_local(self.path):
            self._aside = Aside()
        self._do(self._files.append, STEPS_FILE, (",".join(STEP_COLUMNS) + "\n").encode())
        self.save_info()
        self._sinks = Sinks(sinks)
        self._sinks.tell("begin", self.path, self._info)

    def add_tensor(self, kind: str, name: str, **facts: Any) -> int:
        """The number of a tensor, given at first sight; facts such as shape and dtype are kept in run.json.

        -1 where names take too much room already: rows with it are not written.
        """
        number = self._numbers.get((kind, name))
        if number is None:
            self._named += len(name) + A_TENSOR
            if self._named > MOST_NAMED:
                self._numbers[kind, name] = -1
                self.set_info(tensors_left_out=self._info.get("tensors_left_out", 0) + 1)
                return -1
            number = self._numbers[kind, name] = len(self._numbers)
            self._info["tensors"].append({"kind": kind, "name": name, **facts})
            self._info_changed = True
        return number

    def set_info(self, **facts: Any) -> None:
        """Facts about the whole run, found while it runs."""
        self._info.update(facts)
        self._info_changed = True

    def write_step(self, row: Mapping[str, Any]) -> None:
        """One row of steps.csv; a missing column stays empty."""
        if None in row.values():
            row = {name: value for name, value in row.items() if value is not None}
        names = tuple(row)
        form = self._forms.get(names)
        if form is None:
            form = form_of(names)
            if len(self._forms) < MOST_FORMS:
                self._forms[names] = form
        text, values_of = form
        try:
            line = text % values_of(row)
        except (TypeError, ValueError):  # no number: whoever reads it leaves it out, and says so
            line = text.replace("%.9g", "%s") % values_of(row)
        self._do(self._files.append, STEPS_FILE, line.encode())
        if self._sinks.listening:
            self._sinks.tell("step", row)

    def write_frame(self, content: int, step: int, numbers: np.ndarray, values: np.ndarray) -> None:
        """The statistics of one step; names must be on disk before the numbers that refer to them."""
        if len(numbers) and numbers.min() < 0:
            numbers, values = numbers[numbers >= 0], values[numbers >= 0]
        self.save_info()
        self._do(self._frames.append, step, pack_frame(content, step, numbers, values))
        if not self._sinks.listening:
            return
        tensors = [self._info["tensors"][number] for number in numbers]
        names = [f"{tensor['kind']}/{tensor['name']}" for tensor in tensors]
        if content == STATISTICS_FRAME:
            self._sinks.tell("tensors", step, names, values)
        else:
            self._sinks.tell("distributions", step, names, values[:, : len(PERCENTILES)])

    def write_event(self, name: str, **facts: Any) -> None:
        """Something rare: a verdict, a note, the first bad operation."""
        event = {"event": name, "time": round(time.time(), 3), **facts}
        self._do(self._files.append, EVENTS_FILE, (json_line(event) + "\n").encode())

    def append(self, name: str, data: bytes) -> None:
        """To a file beside the others, as it is: a whole record, the script that ran."""
        self._do(self._files.append, name, data)

    def open_ring(self, name: str, size: int) -> Store:
        """A file whose parts are written over. It is mapped into memory: a killed process loses nothing.

        Not so on a disk that may hang, where pages are waited for, too. OSError where there is no room.
        """
        if self._aside is not None:
            self._do(self._files.write_at, name, size - 1, b"\0")
            return functools.partial(self._do, self._files.write_at, name)
        return map_ring(self.path / name, size)

    def save_info(self) -> None:
        """Replace run.json as a whole, if something in it changed."""
        for name, value in self._frames.facts().items():
            if self._info.get(name) != value:
                self.set_info(**{name: value})
        if self.broken or not self._info_changed:
            return
        self._info_changed = False
        self._do(self._files.replace, INFO_FILE, json_line(self._info).encode())

    def close(self) -> None:
        """End the run; what was written stays as it is."""
        self._do(self._frames.close)
        self.save_info()
        self._do(self._files.close)
        if self._aside is not None and not self.broken:
            try:
                self._aside.finish(MOST_WAITED)
            except OSError as error:
                self._give_up(error)
        self._sinks.tell("end")

    @property
    def may_hang(self) -> bool:
        """Whether whoever looks at its files risks to wait for ever."""
        return self._aside is not None

    def _do(self, work: Callable[..., None], *args: Any) -> None:
        """Something with the disk: here, or by the thread that waits for it in our stead."""
        if self.broken:
            return
        before = time.monotonic()
        try:
            self._aside.put(work, *args) if self._aside is not None else work(*args)
        except OSError as error:
            self._give_up(error)
        if (waited := time.monotonic() - before) > A_WAIT:
            self._waited += waited
            if self._waited > MOST_WAITED and self._aside is None:
                self._aside = Aside()

    def _give_up(self, error: OSError) -> None:
        if self.broken:
            return
        self.broken = str(error)
        if self._made:
            self._mark_end()
        warn(
            f"gradproof cannot write to {self.path} ({error}); training goes on, the record ends here",
            stacklevel=3,
        )

    def _mark_end(self) -> None:
        """Whoever reads what is left has to know that it is not all: a full disk still takes a file without bytes."""
        self._info["failure"] = f"the record could not be written: {self.broken}"
        if self._aside is not None:
            self._aside.leave()
            return  # it may never answer again; a run that has no end says so
        try:
            self._files.replace(INFO_FILE, json_line(self._info).encode())
        except OSError:
            with suppress(OSError):
                self._files.make_empty(CUT_OFF_FILE)


def form_of(names: Sequence[str]) -> tuple[str, Callable[[Any], Any]]:
    """The text of a row that has these columns, and what picks their values.

    >>> text, values_of = form_of(("loss", "step", "remark"))
    >>> text % values_of({"loss": 0.125, "step": 4, "remark": "none of the columns"})
    '4,,,,,0.125,,,,,,,,,,,,\\n'
    """
    known = [name for name in STEP_COLUMNS if name in names]
    plain = (*WHOLE_COLUMNS, *TEXT_COLUMNS)
    cells = {name: "%s" if name in plain else "%.9g" for name in known}
    text = ",".join(cells.get(name, "") for name in STEP_COLUMNS) + "\n"
    return text, itemgetter(*known) if known else lambda row: ()


def map_ring(file: Path, size: int) -> Store:
    mapped = map_new_file(file, size)

    def store(place: int, data: bytes) -> None:
        mapped[place : place + len(data)] = data

    return store


def new_directory(path: Path) -> Path:
    """Make a directory that no other run has: `runs/a`, else `runs/a-2`, `runs/a-3`, …"""
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = path
    for number in range(2, 10_000):
        with suppress(FileExistsError):
            attempt.mkdir()
        with suppress(FileExistsError):
            if attempt.is_dir() and not any(attempt.iterdir()):
                (attempt / STEPS_FILE).touch(
                    exist_ok=False
                )  # two processes may find the same empty directory
                return attempt
        attempt = path.with_name(f"{path.name}-{number}")
    raise FileExistsError(f"{path} and 10,000 names after it are taken")
