"""A worker in a process of its own: what it is asked may crash it, hang it or be too much for its memory."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradproof import children
from gradproof.record.schema import json_line

LOOKS = 0.2  # seconds between two looks at the time
CUT_OFF = "it was being asked when the examination ended"


class WorkerLost(Exception):
    """Why there is no answer: the worker died, or took too long."""


def waited_for_a_core(pid: int) -> float:
    """Seconds for which a process could have run, and others did; 0 where nobody counts them."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class WorkerProcess:
    """Starts when it is first asked, again after it was lost."""

    def __init__(
        self,
        is_over: Callable[[], bool] = lambda: False,
        module: str = "gradproof.examination.worker",
        waiting: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`is_over` says when nobody waits for an answer any more; `waiting` is told whose answer is waited for."""
        self._is_over, self._module, self._waiting = is_over, module, waiting
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        """The answer to one request; WorkerLost says why there is none."""
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write((json_line(request) + "\n").encode())
            process.stdin.flush()
            return json.loads(self._read_line(process, limit))
        except (BrokenPipeError, ValueError):
            raise WorkerLost(self._how_it_ended()) from None

    def warm_up(self) -> None:
        """Start, so that what has to be imported is there when the first question comes."""
        self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=children.environment(),
                cwd="/",
                start_new_session=True,  # Ctrl-C is for who asks, who then says what was not asked
            )
            self._rest = b""
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], limit: float) -> str:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        deadline, waited = time.monotonic() + limit, waited_for_a_core(process.pid)
        while b"\n" not in self._rest:
            self._waiting(process.pid)
            left = deadline - time.monotonic()
            if left <= 0:  # of low priority, it may have had no core for most of the time
                left += waited_for_a_core(process.pid) - waited
            if left <= 0 or self._is_over():
                self.kill()
                raise WorkerLost(f"no answer within {limit:.0f} s" if left <= 0 else CUT_OFF)
            if not select.select([descriptor], [], [], min(left, LOOKS))[0]:
                continue
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise WorkerLost(self._how_it_ended())
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _how_it_ended(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self.kill()
        if code is not None and code < 0:
            return f"the process that asked was ended by {signal.Signals(-code).name}"
        return f"the process that asked ended with exit code {code}"

    def kill(self) -> None:
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            self._process.wait()
        self.close()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        if process.poll() is None:
            process.kill()
            process.wait()
