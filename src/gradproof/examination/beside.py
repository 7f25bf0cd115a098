"""The examination of a run that is still being written, and of one that has ended: the same questions, other manners.

While the training lives, one thread of low priority; a GPU, if the step was on one, as long as the training loses no
more than a hundredth of its time by that. Once it has ended, everything that the machine has, with the priority of any
other process, up to the limit given.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from gradproof import children
from gradproof.examination.examiner import ALL, Examiner, Locked, read_shelf
from gradproof.examination.parted import do_again
from gradproof.examination.process import WorkerProcess
from gradproof.examination.pulse import Pulse
from gradproof.examination.turned import swap_around_the_turn
from gradproof.examination.worker import come_forward, stand_back
from gradproof.experiments.table import COSTS, Question
from gradproof.record.door import Damaged, read_json
from gradproof.record.schema import INFO_FILE

GPU_SHARE = 0.01  # of its time that a training may lose
GPU_MEMORY = 0.25  # of what is free there, meanwhile
GPU_CREDIT = 1.0  # seconds that it may lose at once
USUAL = dict(zip(COSTS, (0.5, 1.0, 5.0, 5.0), strict=True))  # seconds of a question, by its cost
GPU_REST = 0.1  # of the time that an answer took: steps that nothing disturbs, to compare with
MOST_LANES = 4  # workers at a time
# of so many cores some are idle while a training starts: workers import what they need before the first step
MANY_CORES = 8
EVERY = 0.2  # seconds between two looks for new specimens


class Stopped(BaseException):
    """Somebody asked for the end: what is known is kept."""


def examine_beside(run: Path, training: int, limit: float | None) -> None:
    """From the first specimen to the end of the training, and then for as long as was given."""
    priority = stand_back()
    clock = Clock(run, training, limit)

    def stop(*_: object) -> None:
        clock.stopped = True
        raise Stopped

    def hurry(worker: int) -> None:
        """Somebody waits once the training has ended: at low priority a busy machine would give them no answer."""
        if clock.has_ended():
            come_forward(os.getpid(), priority)
            come_forward(worker, priority)

    signal.signal(signal.SIGTERM, stop)
    with Locked(run):
        cores = len(os.sched_getaffinity(0))
        lanes = min(MOST_LANES, max(1, cores // 2))
        workers = [WorkerProcess(clock.is_over, waiting=hurry) for _ in range(lanes)]
        examiner = Examiner(run, workers, threads=1)
        examiner.share, examiner.complete = GPU_MEMORY, False
        examiner.show_start()
        left = 0
        try:
            while True:
                ended = clock.has_ended()
                shelf = read_shelf(run)
                if shelf or cores >= MANY_CORES:
                    examiner.warm_up()
                if ended and not examiner.complete:
                    examiner.share, examiner.complete = ALL, True
                    examiner.ask_again_what_had_to_wait()
                    swap_around_the_turn(run, examiner.workers[0])
                examiner.threads = 1 if not ended else max(1, cores // lanes)
                shared = not ended and any(shelved.device != "cpu" for shelved in shelf)
                left = examiner.ask_all(
                    until=clock.is_over if ended else clock.has_ended,
                    guest=GpuGuest(clock) if shared else None,
                )
                if ended and (not left or clock.is_over()):
                    do_again(run, examiner.workers[0])
                    break
                if not left:
                    time.sleep(EVERY)
        except Stopped:
            left = len(examiner.jobs())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
        examiner.end(None if clock.stopped else limit, left)


class Clock:
    """When the training ended, and how long one may go on after that."""

    def __init__(self, run: Path, training: int, limit: float | None) -> None:
        self._run, self._training, self._limit = run, training, limit
        self._ended: float | None = None
        self.stopped = False  # somebody asked for the end
        self._began = time.monotonic()
        self.pulse = Pulse(run)
        self._looked = 0.0

    def has_ended(self) -> bool:
        """Whether the training has; looked up now and then."""
        now = time.monotonic()
        if self._ended is None and now - self._looked > EVERY:
            self._looked = now
            if not trains(self._run, self._training):
                self._ended = now
        return self._ended is not None

    def affords(self, seconds: float) -> bool:
        """Whether the training may lose what a question of so many seconds would take from it."""
        earned = GPU_CREDIT + GPU_SHARE * (time.monotonic() - self._began)
        return self.pulse.lost() + self.pulse.share * seconds < earned

    def is_over(self) -> bool:
        late = self.has_ended() and self._limit is not None and time.monotonic() - self._ended > self._limit  # type: ignore[operator]
        return self.stopped or late


class GpuGuest:
    """On a GPU that a training uses: a rest until what the training lost, and would lose next, has been earned."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait_for(self, question: Question) -> None:
        while not self._clock.has_ended() and not self._clock.affords(USUAL[question.cost]):
            time.sleep(EVERY)

    def was_asked(self, seconds: float) -> None:
        self._clock.pulse.was_asked(time.time() - seconds, time.time())
        rested = time.monotonic() + GPU_REST * seconds
        while not self._clock.has_ended() and time.monotonic() < rested:
            time.sleep(EVERY)


def trains(run: Path, pid: int) -> bool:
    """Whether the process is there and has not written the end of its run."""
    if not children.is_alive(pid):
        return False
    try:
        info = read_json(run / INFO_FILE)
    except (OSError, Damaged):
        return True
    return not isinstance(info, dict) or "ended" not in info
