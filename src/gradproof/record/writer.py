"""Writes a run while it happens: whole records only, appended at once, so that a killed process loses nothing.

Training must not suffer from the disk: the first failure to write becomes one warning, and writing ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.errors import warn
from gradproof.record.schema import (
    EVENTS_FILE,
    FORMAT,
    FRAMES_FILE,
    INFO_FILE,
    PERCENTILES,
    STATISTICS,
    STATISTICS_FRAME,
    STEP_COLUMNS,
    STEPS_FILE,
    json_line,
    pack_frame,
)
from gradproof.record.sink import Sink, Sinks


class RunWriter:
    """One run directory, made new; `add_tensor` gives the number under which frames know a tensor."""

    def __init__(self, path: str | os.PathLike, info: Mapping[str, Any], sinks: Sequence[Sink] = ()) -> None:
        self.path = Path(path)
        self.broken: str | None = None
        self._info: dict[str, Any] = {"format": FORMAT, "statistics": STATISTICS, "tensors": [], **info}
        self._numbers: dict[tuple[str, str], int] = {}
        self._files: dict[str, int] = {}
        self._info_changed = True
        try:
            self.path = new_directory(self.path)
        except OSError as error:
            self._give_up(error)
        self._append(STEPS_FILE, (",".join(STEP_COLUMNS) + "\n").encode())
        self.save_info()
        self._sinks = Sinks(sinks)
        self._sinks.tell("begin", self.path, self._info)

    def add_tensor(self, kind: str, name: str, **facts: Any) -> int:
        """The number of a tensor, given at first sight; facts such as shape and dtype are kept in run.json."""
        number = self._numbers.get((kind, name))
        if number is None:
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
        cells = (_cell(row.get(column)) for column in STEP_COLUMNS)
        self._append(STEPS_FILE, (",".join(cells) + "\n").encode())
        self._sinks.tell("step", row)

    def write_frame(self, content: int, step: int, numbers: np.ndarray, values: np.ndarray) -> None:
        """The statistics of one step; names must be on disk before the numbers that refer to them."""
        self.save_info()
        self._append(FRAMES_FILE, pack_frame(content, step, numbers, values))
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
        self._append(EVENTS_FILE, (json_line(event) + "\n").encode())

    def keep_file(self, name: str, data: bytes) -> None:
        """A file beside the record, as it is: the script that ran."""
        self._append(name, data)

    def save_info(self) -> None:
        """Replace run.json as a whole, if something in it changed."""
        if self.broken or not self._info_changed:
            return
        self._info_changed = False
        target = self.path / INFO_FILE
        draft = target.with_suffix(".tmp")
        try:
            draft.write_text(json_line(self._info), encoding="utf-8")
            draft.replace(target)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """End the run; what was written stays as it is."""
        self.save_info()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._sinks.tell("end")

    def _append(self, name: str, data: bytes) -> None:
        if self.broken:
            return
        try:
            if name not in self._files:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._files[name] = os.open(self.path / name, flags, 0o644)
            written = os.write(self._files[name], data)
            if written != len(data):
                raise OSError("only part of a record could be written")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = str(error)
        warn(
            f"gradproof cannot write to {self.path} ({error}); training goes on, the record ends here",
            stacklevel=3,
        )


def new_directory(path: Path) -> Path:
    """Make a directory that no other run has: `runs/a`, else `runs/a-2`, `runs/a-3`, …"""
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = path
    for number in range(2, 10_000):
        try:
            attempt.mkdir()
            return attempt
        except FileExistsError:
            if attempt.is_dir() and not any(attempt.iterdir()):
                claim = attempt / STEPS_FILE
                try:
                    claim.touch(exist_ok=False)  # two processes may find the same empty directory
                    return attempt
                except FileExistsError:
                    pass
            attempt = path.with_name(f"{path.name}-{number}")
    raise FileExistsError(f"{path} and 10,000 names after it are taken")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value)
