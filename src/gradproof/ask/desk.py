"""Where a program's questions come in: runs below one directory only, each question a job in a process of its own.

Knows nothing of any protocol. What starts scripts is there only for the directories that were allowed.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradproof import children
from gradproof.ask.answer import cleaned
from gradproof.errors import UserError, plain
from gradproof.examination.process import WorkerLost, WorkerProcess
from gradproof.record.run import open_run
from gradproof.report.live import Runs, version_of

WORKERS = 2  # questions at a time
LIMIT = 600.0  # seconds for a question
LONGEST_SCRIPT = 1800.0  # seconds for a script, or both trainings of a patch
MOST_JOBS = 200  # that are remembered; those that have ended go first
MOST_RUNS = 200
LARGEST_PATCH = 1 << 20  # characters
RUNNING, DONE, REFUSED, CANCELLED = "running", "done", "refused", "cancelled"


class Job:
    """Something under way: `state`, and in the end `answer` or why there is none."""

    def __init__(self, what: str) -> None:
        self.id = secrets.token_hex(4)
        self.what = what
        self.began = time.monotonic()
        self.seconds = 0.0
        self.state = RUNNING
        self.answer: Any = None
        self.why = ""
        self.over = threading.Event()
        self.cancelled = threading.Event()

    def end(self, state: str, answer: Any = None, why: str = "") -> None:
        self.state, self.answer, self.why = state, answer, why
        self.seconds = time.monotonic() - self.began
        self.over.set()

    def as_data(self) -> dict[str, Any]:
        seconds = self.seconds if self.over.is_set() else time.monotonic() - self.began
        found: dict[str, Any] = {
            "job": self.id,
            "what": self.what,
            "state": self.state,
            "seconds": round(seconds, 2),
        }
        if self.answer is not None:
            found["answer"] = self.answer
        if self.why:
            found["why"] = self.why
        return found


class Desk:
    """Questions about the runs of a directory."""

    def __init__(self, directory: str | os.PathLike, allowed: Sequence[str | os.PathLike] = ()) -> None:
        self.runs = Runs(directory)
        self.allowed = [Path(path).resolve() for path in allowed]
        self._threads = ThreadPoolExecutor(WORKERS, "desk")
        self._idle = [Seat()]
        self._idle[0].process.warm_up()
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._closed = False

    # -- runs ----------------------------------------------------------------------------------------------------

    def list_runs(self) -> list[dict[str, Any]]:
        """The newest first."""
        found = self.runs.summaries()[:MOST_RUNS]
        return [
            cleaned({k: v for k, v in run.items() if isinstance(v, (str, int, float, bool))}) for run in found
        ]

    def find(self, name: str) -> Path:
        """The directory of a run, by the name that the list gives it; nothing else is known."""
        try:
            return self.runs.find(name).resolve()
        except UserError:
            known = ", ".join(list(self.runs.directories())[:8]) or "none yet"
            raise UserError(f"there is no run {cleaned(name, 80)!r}; there are {known}") from None

    # -- questions -----------------------------------------------------------------------------------------------

    def ask(self, run: str, arguments: dict[str, Any]) -> Job:
        if arguments.get("other") and arguments.get("question") == "parting":  # another run
            arguments = {**arguments, "other": str(self.find(arguments["other"]))}
        return self._answer(run, "ask", arguments, f"ask {arguments.get('question', '')}".strip())

    def brief(self, run: str) -> Job:
        return self._answer(run, "brief", {}, "brief")

    def _answer(self, run: str, what: str, arguments: dict[str, Any], words: str) -> Job:
        path = self.find(run)

        def work(job: Job) -> None:
            request = {"path": str(path), "version": version_of(path), "what": what, "arguments": arguments}
            found = self._seat(job, request)
            if "answer" in found:
                job.end(DONE, found["answer"])
            else:
                job.end(REFUSED, why=found["refused"])

        return self._start(words, work)

    def _seat(self, job: Job, request: dict[str, Any]) -> dict[str, Any]:
        """One of the workers, kept for the next question; one that was lost starts anew."""
        with self._lock:
            seat = self._idle.pop() if self._idle else Seat()
        seat.job = job
        try:
            return seat.process.ask(LIMIT, **request)
        finally:
            seat.job = None
            with self._lock:
                self._idle.append(seat)
            if self._closed:
                seat.process.kill()

    # -- what starts a script ------------------------------------------------------------------------------------

    def try_patch(self, run: str, patch: str, steps: int, begin: int | None = None) -> Job:
        """The script of a run with and without a patch; its directory has to be one of the allowed ones."""
        path = self.find(run)
        self._allow(Path(str(open_run(path).info.get("directory") or "/")))
        if len(patch) > LARGEST_PATCH:
            raise UserError(f"a patch has {LARGEST_PATCH} characters at most, not {len(patch)}")

        def work(job: Job) -> None:
            with tempfile.TemporaryDirectory(prefix="gradproof-mcp-") as folder:
                file = Path(folder) / "fix.diff"
                file.write_text(patch, encoding="utf-8")
                words = [
                    "try",
                    "--until-stdin-ends",
                    str(path),
                    "--patch",
                    str(file),
                    "--steps",
                    str(steps),
                    "--json",
                    *(["--from", str(begin)] if begin is not None else []),
                ]
                self._run(job, words, Path(folder))

        return self._start("try", work)

    def check_script(self, script: str, steps: int, arguments: Sequence[str]) -> Job:
        """A script of an allowed directory, trained for some steps and diagnosed."""
        path = Path(script)
        if not path.is_absolute() and self.allowed:
            path = self.allowed[0] / path
        self._allow(path)
        if not path.is_file():
            raise UserError(f"there is no script {cleaned(script, 200)!r}")

        def work(job: Job) -> None:
            with tempfile.TemporaryDirectory(prefix="gradproof-mcp-") as folder:
                found = Path(folder) / "found.json"
                words = ["check-run", "--until-stdin-ends", str(path.resolve()), "--until", str(steps)]
                words += ["--json", str(found), "--args", *arguments]
                self._run(job, words, path.resolve().parent, found)

        return self._start("check-run", work)

    def _allow(self, path: Path) -> None:
        if not any(path.resolve().is_relative_to(allowed) for allowed in self.allowed):
            known = ", ".join(map(str, self.allowed)) or "none"
            raise UserError(f"nothing may be run there; allowed directories: {known}")

    def _run(self, job: Job, words: list[str], directory: Path, result: Path | None = None) -> None:
        """A command of ours that may start scripts, and all its children; ended as a whole."""
        environment = {**children.environment()}
        environment.pop("GRADPROOF")
        given, held = os.pipe()  # if this process is killed `held` closes, and all that was started ends
        process = subprocess.Popen(
            children.command(*words),
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        os.close(given)
        end = time.monotonic() + LONGEST_SCRIPT
        try:
            while True:
                try:
                    out, said = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    if job.cancelled.is_set() or self._closed:
                        return job.end(CANCELLED, why="it was cancelled")
                    if time.monotonic() > end:
                        return job.end(REFUSED, why=f"it took longer than {LONGEST_SCRIPT:.0f} s")
        finally:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # a process that the script has left behind
            process.communicate()
            os.close(held)
        try:
            text = result.read_bytes() if result is not None else out
            return job.end(DONE, cleaned(json.loads(text), 1000))
        except (OSError, ValueError):
            last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            return job.end(REFUSED, why=cleaned(last, 400))

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _start(self, words: str, work: Callable[[Job], None]) -> Job:
        job = Job(plain(words))
        with self._lock:
            ended = [known.id for known in self._jobs.values() if known.over.is_set()]
            for old in ended[: max(0, len(self._jobs) + 1 - MOST_JOBS)]:
                del self._jobs[old]
            if len(self._jobs) >= MOST_JOBS:
                raise UserError(f"{MOST_JOBS} jobs are under way; wait for some of them")
            self._jobs[job.id] = job
        self._threads.submit(self._work, job, work)
        return job

    def _work(self, job: Job, work: Callable[[Job], None]) -> None:
        if job.cancelled.is_set() or self._closed:
            return job.end(CANCELLED, why="it was cancelled")
        try:
            work(job)
        except WorkerLost as error:
            if job.cancelled.is_set():
                job.end(CANCELLED, why="it was cancelled")
            else:
                job.end(REFUSED, why=str(error))
        except Exception as error:
            job.end(REFUSED, why=cleaned(f"{type(error).__name__}: {error}", 400))

    def job(self, id: str) -> Job:
        found = self._jobs.get(id)
        if found is None:
            raise UserError(f"there is no job {cleaned(id, 40)!r}")
        return found

    def jobs(self) -> list[Job]:
        """The last ones, in the order in which they were begun."""
        with self._lock:
            return list(self._jobs.values())[-50:]

    def cancel(self, id: str) -> Job:
        """Ends what is under way; what has ended stays as it is."""
        job = self.job(id)
        job.cancelled.set()
        return job

    def close(self) -> None:
        """Nobody is left to hear an answer."""
        self._closed = True
        for job in list(self._jobs.values()):
            job.cancelled.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for seat in self._idle:
            seat.process.kill()


class Seat:
    """A worker, and the job that it works at."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.process = WorkerProcess(self._is_over, "gradproof.ask.worker")

    def _is_over(self) -> bool:
        return self.job is not None and self.job.cancelled.is_set()
