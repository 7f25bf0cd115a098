"""Decides which steps are taped, and hands each tape to whoever examines it.

While the allowance lasts (a few seconds at the start) every step is taped, so that a NaN in the early steps is
caught in the act. After that a step is taped at each power of √10, and whenever trouble is brewing, as long as the
budget affords it. A compiled model is left alone: an active tape would run it operation by operation.

A step that turns out bad while its weights are still good is examined at once, before the update is written: from
its tape or, where it has none, from the model's calls, made again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch

from gradproof.probes.again import Again, Calls
from gradproof.probes.names import Names
from gradproof.tape.operations import Tape
from gradproof.tape.record import Recorder

ALLOWANCE = 6.0  # seconds that taping and examining may add before the budget counts
SHARE = 0.02  # of the wall time, after that
MOST_OPERATIONS = 300_000  # a validation epoch between two steps would make a tape without end
LANDMARKS = frozenset(round(10 ** (k / 2)) for k in range(20))  # 1, 3, 10, 32, 100, …
LONG_BEFORE_TRAINING = (
    10.0  # seconds between the making of an optimizer and its first step that are still taped
)
NEW_STAGE_AFTER = 30  # steps: optimizers made earlier belong together
MOST_STAGES = 3
STAGE_ALLOWANCE = 2.0  # seconds for each
PLAIN_STEPS = (2, 5, 9)  # left untaped, to know what a step takes without a tape

EXAMINER = "gradproof.experiments.examination"  # named, not imported: experiments stand above probes
MOST_LOOKS = 3  # bad steps that are looked into before their update


class Examine(Protocol):
    """Who is given the tapes."""

    def __call__(self, tape: Tape, step: int, thorough: bool) -> None:
        """A whole step; thorough at landmarks and in trouble."""

    def locate(self, tape: Tape, step: int, again: Again | None = None) -> bool:
        """A step that is bad before its update: True once the place is known."""


def begin_taping(session: Any, budget: float | None = None, only: int | None = None) -> None:
    """Tape steps of a session from here on, and have the experiments look at them."""
    examine: Examine = import_module(EXAMINER).Examination(session)
    session.taping = Taping(session.names, examine, session.fail, only=only, budget=budget)


_recording: list[Taping] = []  # the one that records now: two tapes at a time would undo each other


def has_room_for_tape() -> bool:
    """Whether the GPU, if one is used, has memory left for a tape beside the step itself: half of what it holds now."""
    if not torch.cuda.is_initialized():
        return True
    held = torch.cuda.memory_allocated()
    spare = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - held
    of_a_step = torch.cuda.max_memory_allocated() - held
    return spare - of_a_step > held / 2


class Taping:
    """Starts and stops the recorder at the turn of each step."""

    def __init__(
        self,
        names: Names,
        examine: Examine,
        fail: Callable[[Exception], None],
        only: int | None = None,
        budget: float | None = None,
    ) -> None:
        self.calls = Calls(fail)
        self.only = only  # the one step that was asked for
        # a budget that was asked for knows no allowance: landmarks only, each when it has been earned
        self._allowance, self._share = (ALLOWANCE, SHARE) if budget is None else (0.0, budget)
        self._names = names
        self._examine = examine
        self._on_cpu: list[bool] = []  # of each model
        self._recorder: Recorder | None = None
        self._step = -1
        self._began = time.perf_counter()
        self._turned = time.process_time()
        self._first = 0  # step of the stage of training that is under way
        self._stages = 0
        self._plain = float("inf")  # seconds of the shortest untaped step
        self._looks = 0
        self._recent: dict[tuple[Any, str], deque[float]] = {}  # (optimizer, column) -> values
        self.trouble = False  # look at the coming steps whatever the landmarks say
        self.spent = 0.0
        self.taped = 0
        self.broken: str | None = None

    @property
    def active(self) -> bool:
        return self._recorder is not None

    def begin(self, step: int, compiled: bool) -> None:
        """A step begins: tape it or not."""
        self._turned = time.process_time()  # of this process: a busy machine must not eat the allowance
        self._step = step
        left_alone = compiled and self.only is None
        if self.broken or left_alone or _recording or not self._affords(step):
            return
        if any(hasattr(parameter, "to_local") for parameter in self._names.by_parameter()):
            return  # sharded: a look at a value is a conversation with the other ranks
        self._recorder = Recorder(names=self._names.by_parameter())
        _recording.append(self)
        try:
            self._recorder.start(inside_optimizer_hook=True)
        except Exception as error:
            self._give_up(error)

    def long_wait(self) -> None:
        """Something else than training goes on before the first step: it is not worth a tape."""
        if self._step == 0 and time.process_time() - self._turned > LONG_BEFORE_TRAINING:
            self.stop()

    def training_starts_anew(self) -> None:
        """An optimizer is made in mid-training (a second stage, a fine-tuning): its first steps deserve a look, too."""
        if self._step < NEW_STAGE_AFTER or self._stages >= MOST_STAGES:
            return
        self._stages += 1
        self._first = self._step
        if self._allowance:
            self._allowance = max(self._allowance, self.spent) + STAGE_ALLOWANCE

    def row_written(self, row: dict[str, Any]) -> None:
        """Trouble is brewing where the loss or the gradient is far above what it was in the last steps."""
        self.trouble = False
        for column, factor in (("loss", 4.0), ("grad_norm", 20.0)):
            value = row.get(column)
            if value is None:
                continue
            recent = self._recent.setdefault((row.get("optimizer"), column), deque(maxlen=20))
            usual = float(np.median(recent)) if len(recent) >= 5 else math.inf
            self.trouble |= not math.isfinite(value) or abs(value) > factor * abs(usual) + 1e-12
            if math.isfinite(value):
                recent.append(value)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._recorder is not None:
            self._recorder.enter_optimizer(optimizer)

    def optimizer_ends(self) -> None:
        if self._recorder is not None:
            self._recorder.leave_optimizer()

    def listen(self, step: int, seen: bool) -> None:
        """Calls are kept where a bad step shows before its update: on a CPU, and at the one step that was asked for."""
        if not seen:
            self.calls.detach()
            return
        models = list(self._names.roots.values())
        if len(models) != len(self._on_cpu):
            self._on_cpu = [all(p.device.type == "cpu" for p in model.parameters()) for model in models]
        if self.only == step or (self.calls.steady and all(self._on_cpu)):
            self.calls.attach(models)
        else:
            self.calls.detach()

    def before_update(self, bad: bool) -> None:
        """The weights are still good. A bad step: where was it born? The one asked for: is it so when compiled, too?"""
        if self.broken or self._looks >= MOST_LOOKS:
            return
        self._looks += 1
        start = time.process_time()
        try:
            with _same_random_numbers():
                if self._recorder is None:
                    self._locate_again()
                else:
                    with self._recorder.interrupted() as tape:
                        again = None if bad else Again(tape, "", self.calls.differ_when_compiled())
                        self._examine.locate(tape, self._step, again)
        except Exception as error:
            self._give_up(error)
        self.spent += time.process_time() - start

    def _locate_again(self) -> None:
        for again in self.calls.make_again(self._names.by_parameter()):
            if not again.tape.broken and self._examine.locate(again.tape, self._step, again):
                return

    def end(self) -> None:
        """A step has ended: the tape, if there is one, goes to the examination."""
        duration = time.process_time() - self._turned
        if self._recorder is None:
            if self._step > 0:
                self._plain = min(self._plain, duration)
            return
        recorder = self._take_recorder()
        start = time.process_time()
        try:
            tape = recorder.stop()
            if not tape.broken and len(tape.operations) < MOST_OPERATIONS:
                self.taped += 1
                self._look(tape)
        except Exception as error:
            self._give_up(error)
        plain = self._plain if self._plain < duration else duration / 2
        self.spent += duration - plain + time.process_time() - start

    def stop(self) -> None:
        """Training is over, perhaps in mid-step."""
        if self._recorder is not None:
            recorder = self._take_recorder()
            with suppress(Exception):
                recorder.stop()

    def _take_recorder(self) -> Recorder:
        recorder, self._recorder = self._recorder, None
        _recording.clear()
        assert recorder is not None
        return recorder

    def _look(self, tape: Tape) -> None:
        thorough = self._step - self._first in LANDMARKS or self.trouble or self._step == self.only
        with _same_random_numbers():
            self._examine(tape, self._step, thorough)

    def _affords(self, step: int) -> bool:
        if self.only is not None:
            return step == self.only
        if not has_room_for_tape():
            return False
        if step in PLAIN_STEPS and not self.trouble:
            return False
        elapsed = time.perf_counter() - self._began
        if self.spent < self._allowance:
            return True
        earned = self._allowance + self._share * elapsed
        return (step - self._first in LANDMARKS or self.trouble) and self.spent < earned

    def _give_up(self, error: Exception) -> None:
        self.broken = f"{type(error).__name__}: {error}"
        self.stop()


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Examinations replay; whatever they do, training's random numbers stay."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
