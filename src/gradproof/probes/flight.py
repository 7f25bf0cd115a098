"""Keeps a rank's flight recorder: events as they come, and from a thread of its own signs of life and where it stands.

The thread begins with the first backward of a process group, which has threads of its own by then. Of the main
thread's frames it reads the names of files and the numbers of lines, nothing else.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from gradproof.probes import guard
from gradproof.probes.names import is_installed
from gradproof.record.flight import FLIGHT_FILE, SIZE, Recorder
from gradproof.record.writer import RunWriter

BEAT = 0.05  # seconds
STILL = 1.0  # seconds without an event after which it is written down where the rank stands
MOST_LINES = 6
OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


class FlightRecorder:
    def __init__(self, writer: RunWriter, failed: Callable[[OSError], None]) -> None:
        self._recorder: Recorder | None = None
        self._writer, self._failed = writer, failed
        self._ended = threading.Event()
        self._watched = threading.get_ident()
        self._process = os.getpid()
        self._given_up = False

    def note(self, step: int, phase: int, what: str = "") -> None:
        if self._recorder is not None and self._process == guard.pid:
            self._recorder.note(step, phase, what)

    def begin(self) -> None:
        """Once there is a process group."""
        if self._recorder is not None or self._given_up or not torch.distributed.is_initialized():
            return
        try:
            self._recorder = Recorder(self._writer.open_ring(FLIGHT_FILE, SIZE))
        except OSError as error:
            self._given_up = True
            self._failed(error)
            return
        self._watched = threading.get_ident()
        threading.Thread(target=self._beat, name="gradproof flight recorder", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        recorder, written = self._recorder, -1
        assert recorder is not None
        while not self._ended.wait(BEAT):
            try:
                recorder.beat()
                if recorder.count != written and time.time() - recorder.last > STILL:
                    written = recorder.count
                    recorder.stand_at(self._lines())
            except ValueError:  # at the end of the process
                return

    def _lines(self) -> str:
        """The script's own lines that are running, the innermost first."""
        frame = sys._current_frames().get(self._watched)
        found: list[str] = []
        while frame is not None and len(found) < MOST_LINES:
            file = frame.f_code.co_filename
            if not file.startswith((OWN, "<")) and not is_installed(file):
                found.append(f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return ", ".join(found)
