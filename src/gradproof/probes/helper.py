"""The examination beside a training: another process, of low priority, started before the script and no child of it.

The two talk through the run's files alone. Whatever becomes of the helper, the training does not notice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gradproof import children
from gradproof.files import open_file
from gradproof.record.door import Damaged, flag, name, parse_json, read_json, record, whole
from gradproof.record.schema import EXAMINATION_FILE, PROGRESS_FILE
from gradproof.record.shapes import clean_event


def _pid(value: Any) -> int:
    if whole(value) < 2:  # 0 and −1 would mean every process
        raise Damaged("it is nobody's number")
    return value


PROGRESS = record(
    {"pid": _pid}, {"ended": flag, "asked": whole, "left": whole, "step": whole, "question": name}
)
LIMIT = 30.0  # seconds that an examination may go on after the script has ended
TO_START = 20.0  # seconds
TO_STOP = 3.0  # seconds
PERIOD = 1.0  # seconds between two looks for something to announce

# forks, so that the training has no child that its own wait() could meet, and waits for the examination: only who has
# started a process is told which signal has ended it
LAUNCH = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
nothing = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(nothing, descriptor)
examiner = os.fork()
if examiner == 0:
    os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
_, status = os.waitpid(examiner, 0)
if os.WIFSIGNALED(status):
    import json, signal, time
    found = {"event": "examiner_lost", "time": time.time(), "signal": signal.Signals(os.WTERMSIG(status)).name}
    with open(sys.argv[1]) as stream:
        progress = json.load(stream)
    found.update((key, progress[key]) for key in ("step", "question") if key in progress)
    with open(sys.argv[2], "a") as stream:
        stream.write(json.dumps(found) + chr(10))
os._exit(0)
"""


class Helper:
    """Examines the specimens of a run while its training goes on."""

    def __init__(self, run: Path, limit: float | None = LIMIT) -> None:
        self.run, self.limit = run.absolute(), limit
        self._read = 0  # bytes of what it has found, already told
        self.next_look = 0.0
        words = ["examine", str(self.run), "--beside", str(os.getpid())]
        words += ["--within", f"{limit:g}s"] if limit is not None else []
        files = [str(self.run / PROGRESS_FILE), str(self.run / EXAMINATION_FILE)]
        launch = [sys.executable, "-I", "-S", "-c", LAUNCH, *files, *children.command(*words)[1:]]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(launch, env=children.environment(), cwd="/", timeout=TO_START, check=False)

    def progress(self) -> dict[str, Any]:
        try:
            return PROGRESS(read_json(self.run / PROGRESS_FILE))
        except (OSError, Damaged):
            return {}

    def announcements(self) -> list[str]:
        """A line for each problem that was proven since this was last asked; looks at most once a second."""
        now = time.monotonic()
        if now < self.next_look:
            return []
        self.next_look = now + PERIOD
        try:
            file = self.run / EXAMINATION_FILE
            if os.stat(file).st_size <= self._read:
                return []
            with open_file(file) as stream:
                stream.seek(self._read)
                lines, _, _ = stream.read().rpartition(b"\n")
            self._read += len(lines) + 1
            events = [clean_event(parse_json(line)) for line in lines.split(b"\n") if b'"proven"' in line]
        except (OSError, Damaged):
            return []
        return [describe(event, self.run) for event in events if event["event"] == "proven"]

    def finish(self, show: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        """Waits until everything is asked or the time is over; Ctrl-C skips the rest."""
        with ctrl_c_interrupts():
            self._wait(show)

    def _wait(self, show: Callable[[dict[str, Any]], None]) -> None:
        began = time.monotonic()
        try:
            while True:
                now = self.progress()
                waited = time.monotonic() - began
                if self._has_ended(now) or (not now and waited > TO_START):  # or it never came up
                    if now and not now.get("ended"):
                        self._wait_for_the_reason()
                    return
                if self.limit is not None and waited > self.limit + TO_START:
                    self.stop()
                    return
                show(now)
                time.sleep(0.05)
        except KeyboardInterrupt:
            self.stop()

    def _wait_for_the_reason(self) -> None:
        """Why it died is written a moment later."""
        patience = time.monotonic() + TO_STOP
        while time.monotonic() < patience:
            with suppress(OSError), open_file(self.run / EXAMINATION_FILE) as stream:
                if b'"examiner_lost"' in stream.read():
                    return
            time.sleep(0.05)

    def _has_ended(self, progress: dict[str, Any]) -> bool:
        return bool(progress) and (bool(progress.get("ended")) or not children.is_alive(progress["pid"]))

    def stop(self) -> None:
        """Asks for the end, and gives it a moment to write down what was not asked."""
        pid = self.progress().get("pid")
        if not pid:
            return
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
        patience = time.monotonic() + TO_STOP
        with suppress(KeyboardInterrupt):
            while not self._has_ended(self.progress()) and time.monotonic() < patience:
                time.sleep(0.05)


@contextmanager
def ctrl_c_interrupts() -> Iterator[None]:
    """Whatever a script has made of Ctrl-C, here it means what it says on the screen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    theirs = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, theirs if theirs is not None else signal.SIG_DFL)


def describe(event: dict[str, Any], run: Path) -> str:
    where = f" at {event['where']}" if event.get("where") else ""
    said = f": {event['evidence'][0]}" if event.get("evidence") else ""
    return f"gradproof: proven at step {event.get('step')}: {event.get('id')}{where}{said}"[:300]
