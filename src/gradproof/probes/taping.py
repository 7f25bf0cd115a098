"""Decides which steps are taped, and makes a specimen of each. Nothing is examined here: that is no work of a training.

While the allowance lasts (a second of wall time at the start) every step is taped, so that a NaN in the early steps is
caught in the act. After that a step is taped at each landmark, and whenever trouble is brewing, as long as a small
share of the wall time affords it. The first landmark is always taped.

A step that turns out bad while its weights are still good and that is not taped is recorded all the same: from the
model's calls, made again.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import torch

from gradproof.probes.again import Again, Calls
from gradproof.probes.capture import capture, handed_over
from gradproof.probes.guard import raised_by_signal
from gradproof.probes.shelf import Shelf, available_memory
from gradproof.tape.arrays import content_of
from gradproof.tape.aside import SMALL, Room, ahead_of
from gradproof.tape.collector import rare_full_collections
from gradproof.tape.modes import unseen_by_modes
from gradproof.tape.operations import Tape
from gradproof.tape.record import Recorder
from gradproof.tape.shards import is_flat, is_sharded
from gradproof.tape.specimen import Specimen
from gradproof.tape.tensors import nbytes

ALLOWANCE = 1.0  # seconds of wall time that recording may add before its share counts
IN_A_ROW_AT_MOST = 0.6  # of that, for steps one after the other; the rest is for landmarks
SHARE = 0.01  # of the wall time, after that
MOST_OPERATIONS = 300_000  # of one step
EARLY = [round(10 ** (k / 2)) for k in range(6)]  # 1, 3, 10, 32, 100, 316
# then each an eighth further on: whatever happens, the last step that was recorded is not long ago
LANDMARKS = frozenset(EARLY + [round(EARLY[-1] * 1.125**k) for k in range(1, 160)])
FIRST_LANDMARK, SECOND_LANDMARK = 1, 3
TWO_LANDMARKS = 3.0  # seconds that the first two may add together
NEW_STAGE_AFTER = 30  # steps: optimizers made earlier belong together
MOST_STAGES = 3
STAGE_ALLOWANCE = 0.5  # seconds for each
PLAIN_STEPS = (2, 5, 9)  # left untaped, to know what a step takes without a tape
MOST_TROUBLED = 12  # steps between two landmarks that are taped because of trouble
SPREADS = 4.0  # from the third smallest of 20 values to the third largest: ten times what chance moves one
CREPT = 2.0  # of that spread: what chance does to the middle one of 20 is an eighth of it
IN_A_ROW = 5  # values above all others of 20: chance orders them so once in 15,000 steps
RISEN = 0.05  # of the middle one
HARDLY = 0.1  # of the middle one: less is no trouble, however calm the others are
MOST_LOOKS = 3  # bad steps that are made again
BETWEEN_LOOKS = 32  # steps, of which one is timed
LARGE = 64 << 20  # bytes
HURRIED = 1 << 30  # bytes that are copied into fresh pages where there is no time to make some: 0.7 s
MOST_IN_A_ROW = 56  # steps, one after the other: who looks at every step has seen enough then
HOST_SHARE = 0.4  # of the memory that the host could still give, for one specimen


class Shelves(Protocol):
    """Who is given the specimens."""

    @property
    def has_room(self) -> bool: ...

    def put(self, specimen: Specimen) -> None: ...

    def describe(self) -> dict[str, Any]: ...

    def close(self) -> None: ...

    def clear_away(self) -> None: ...


def begin_taping(
    session: Any, budget: float | None = None, only: int | None = None, limit: int | None = None
) -> Taping:
    """Tape steps of a session from here on, and put them on the shelf of its run."""
    session.taping = Taping(session, Shelf(session.writer.path, limit), only=only, budget=budget)
    return session.taping


_recording: list[Taping] = []  # the one that records now: two tapes at a time would undo each other


class Recent:
    """The last values of a column, and whether a new one is far above them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=20)
        # the middle one of 20 is at least what the seventh smallest was, until four others have come
        self._at_least, self._holds = 0.0, 0
        self._least = math.inf  # middle one of 20 so far

    def stands_out(self, value: float, factor: float) -> bool:
        """Whether it is not finite, some times the middle one, as far above it as chance does not take it, the fifth in
        a row that is above all others, or one of many that have crept up.

        >>> recent = Recent()
        >>> [recent.stands_out(loss, 4.0) for loss in (1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 5.0, 1.0)]
        [False, False, False, False, False, False, True, False]
        >>> [recent.stands_out(1 + number % 3 / 50, 4.0) for number in range(20)][-1], recent.stands_out(1.5, 4.0)
        (False, True)
        """
        if self._holds and -self._at_least < value < self._at_least:
            self._holds -= 1
            self._values.append(value)
            return False
        if not math.isfinite(value):
            return True
        ordered = sorted(self._values)
        usual, chance = ordered[len(ordered) // 2] if len(ordered) >= 5 else math.inf, math.inf
        if len(ordered) == 20:
            chance = max(SPREADS * (ordered[17] - ordered[2]), HARDLY * abs(usual))
            self._at_least, self._holds = (1 + HARDLY) * ordered[6], 3
        self._values.append(value)
        far = abs(value) > factor * abs(usual) + 1e-12 or value > usual + chance
        return far or (len(ordered) == 20 and (self._have_risen(usual) or self._have_crept(ordered)))

    def _have_risen(self, usual: float) -> bool:
        """One leap is seen once: of those that come five later, the first are among the others."""
        lowest = min(self._values[place] for place in range(-IN_A_ROW, 0))
        return lowest > usual + RISEN * abs(usual) and lowest > max(list(self._values)[:-IN_A_ROW])

    def _have_crept(self, ordered: list[float]) -> bool:
        """The middle one is far above the least that it has been: seen once, and again when it is as far above that."""
        usual = ordered[10]
        if usual - self._least > max(CREPT * (ordered[17] - ordered[2]), HARDLY * abs(usual)):
            self._least = usual
            return True
        self._least = min(self._least, usual)
        return False


class Taping:
    """Starts and stops the recorder at the turn of each step."""

    def __init__(
        self, session: Any, shelf: Shelves, *, only: int | None = None, budget: float | None = None
    ) -> None:
        self.calls = Calls(session.fail)
        self.only = only  # the one step that was asked for
        # a budget that was asked for knows no allowance: landmarks only, each when it has been earned
        self._allowance, self._share = (ALLOWANCE, SHARE) if budget is None else (0.0, budget)
        self._for_ordinary = IN_A_ROW_AT_MOST * self._allowance  # steps that are no landmark: seconds left
        self.shelf = shelf
        self._session = session
        self._on_cpu: list[bool] = []  # of each model
        self.recorder: Recorder | None = None  # of the step that is taped
        self._step = -1
        self._began, self._turned = time.perf_counter(), seconds_of_training()
        self._first = 0  # step of the stage of training that is under way
        self._stages = 0
        self._plain: deque[float] = deque(maxlen=9)  # seconds of some of the last untaped steps
        self._timed = False  # the step under way is one of them
        self._cost = 0.0  # of the last tape
        self._room = Room()
        self._at_landmark = False
        self._overdue: int | None = None  # the landmark that waits for room on the host
        self._looks = 0
        self._again: dict[str, str] | None = None  # of the step that was asked for, by compiled code
        self._arrays: list[Any] = []  # arrays that steps have put together
        self._recent: dict[tuple[Any, str], Recent] = {}  # (optimizer, column) -> values
        self.trouble = False  # look at the coming steps whatever the landmarks say
        self._troubled = 0  # steps that were taped for that
        self._differentiates = False  # a tape had a backward
        self._calm = True  # nothing stood out in the last row
        self.spent = 0.0
        self.taped = 0
        self.broken: str | None = None
        self.refused = ""  # why no step is taped
        self.unrecorded: dict[int, str] = {}  # steps whose recording did not come to its end, and why

    @property
    def active(self) -> bool:
        return self.recorder is not None

    # the turn of a step -----------------------------------------------------------------------------------

    def begin(self, step: int, compiled: bool, by_hand: bool = False) -> None:
        """A step begins: tape it or not."""
        if by_hand or not self._timed:  # where it ends is not where the last one has
            self._turned, self._timed = seconds_of_training(), True
        self._step = step
        self._room.tend()
        landmark = step if self._overdue is None else self._overdue
        if not self._affords(landmark) or self.broken or self.refused or _recording:
            return
        hurry = is_warming_up()
        if self._room.busy and not hurry:
            return
        with unseen_by_modes():
            names = self._session.names.parameters
            if is_flat(names, self._session.names.roots.values()):
                self.refused = (
                    "FullyShardedDataParallel takes the memory of parameters away while a step runs"
                )
                return
            if not fits_in_memory(names):
                return
            memories = {} if is_sharded(names) else ahead_of(self._to_be_overwritten())
            hurry = hurry and sum(map(nbytes, memories.values())) < HURRIED
            if self.only is None and not hurry and not self._has_room_for(memories.values()):
                self._overdue = landmark
                return
        self._at_landmark = self._is_landmark(step)
        if self._at_landmark and self._calm:
            self._troubled = 0
        self._overdue = None
        self.recorder = Recorder(names=names, waits=True, compiled=compiled)
        _recording.append(self)
        try:
            self.recorder.start(inside_optimizer_hook=True)
            self.recorder.state.by_hand = by_hand
            self.recorder.copy_ahead(memories, self._room)
        except Exception as error:
            self._give_up(error)

    def end(self) -> None:
        """A step has ended: what was taped of it becomes a specimen."""
        now, timed = seconds_of_training(), self._timed
        duration, self._turned, self._timed = now - self._turned, now, True
        if self.recorder is None:
            if self._step > 0 and timed:
                self._plain.append(duration)
            return
        recorder = self._take_recorder()
        try:
            tape = recorder.stop()
            whole = not recorder.state.idle and not tape.broken and tape.operations
            if tape.broken and len(self.unrecorded) < MOST_LOOKS:
                self.unrecorded[self._step] = tape.broken
            if whole and self._is_the_rest_of_a_step(tape):
                self._overdue = self._step if self._at_landmark else None
            elif whole and len(tape.operations) < MOST_OPERATIONS:
                with same_random_numbers(), unseen_by_modes(), rare_full_collections():
                    self._shelve(recorder, again=self._again)
        except Exception as error:
            self._give_up(error)
        self._again = None
        plain = statistics.median(self._plain) if self._plain else duration / 2
        self._turned = seconds_of_training()
        self._cost = max(0.0, duration - plain) + self._turned - now
        self.spent += self._cost
        if not self._at_landmark and self.taped > 1:  # the first one is dear, whichever it is
            self._for_ordinary -= self._cost

    def _is_the_rest_of_a_step(self, tape: Tape) -> bool:
        """Of two optimizers that follow each other on one backward, the second's update: there is little to ask of it,
        and the next step is taped in its place."""
        if len(self._session.parameters.optimizers) < 2 or self._step == self.only:
            return False
        phases = {operation.phase for operation in tape.operations}
        self._differentiates = self._differentiates or "backward" in phases
        return phases == {"optimizer"} or (self._differentiates and "backward" not in phases)

    def stays_away(self, step: int) -> bool:
        """Whether the step that begins is one of the many between two landmarks, at whose turn nothing is to be done.

        What a step takes without a tape is looked at now and then: to ask for it is a call of the system.
        """
        if self.recorder is not None or self.trouble or self._overdue is not None:
            return False
        if self.taped < MOST_IN_A_ROW and self._has_allowance(ordinary=True):
            return False
        if torch.cuda._initialized and self._room.has_work:
            return False
        number = step - self._first
        if number < BETWEEN_LOOKS or number % BETWEEN_LOOKS < 2 or number in LANDMARKS or step == self.only:
            return False
        self._step, self._timed = step, False
        return True

    def _shelve(self, recorder: Recorder, **details: Any) -> None:
        """The specimen of what a recorder has taped goes to the shelf."""
        session = self._session
        landmark = self._at_landmark or self.trouble or self._step == self.only
        self._troubled += self.trouble
        landmark = landmark or bool(details.get("before_update"))
        session.facts["_arrays_changed"] = any(map(has_changed, self._arrays))
        self._arrays = [*self._arrays, *recorder.tape.one_arrays.values()][-8:]
        specimen = capture(
            recorder.state,
            self._step,
            dict(session.names.roots),
            session.parameters.optimizers,
            session.losses,
            handed_over(session.facts, landmark),
            landmark=landmark,
            **details,
        )
        self.taped += 1
        self.shelf.put(specimen)

    def will_tape(self, step: int) -> bool:
        """Whether a step that begins soon would be taped."""
        busy = bool(_recording) and not self.active
        return not self.broken and not self.refused and not busy and self._affords(step)

    def step_went_untaped(self) -> None:
        """For the pace: a step of updates by hand that no tape was made of."""
        now = seconds_of_training()
        self._plain.append(now - self._turned)
        self._turned = now

    def own_update_begins(self, update: Any) -> None:
        """What follows, up to the end of the step, is an update by hand."""
        if self.recorder is not None:
            self.recorder.enter_optimizer(update)
            self.recorder.state.updating = True

    def own_update_ends(self, renewals: list[tuple[torch.Tensor, int]]) -> None:
        """(parameter, address of the tensor that takes its place) of those that are not changed in place."""
        for parameter, address in renewals if self.recorder is not None else ():
            self.recorder.state.renew(parameter, address)  # type: ignore[union-attr]

    def name_parameters(self, named: dict[str, torch.Tensor]) -> None:
        """Tensors that are parameters, as was found out after the tape began."""
        for name, parameter in named.items() if self.recorder is not None else ():
            self.recorder.state.name_parameter(parameter, name)  # type: ignore[union-attr]

    def something_compiled(self, made: Any) -> None:
        """A compiled module is taped by its eager twin; a compiled function would run eagerly under a tape."""
        self.calls.something_compiled(made)
        is_function = made is not None and not isinstance(made, torch.nn.Module)
        if is_function and self.only is None:
            self.refused = (
                "a function was compiled: a tape would run it operation by operation, with other roundings"
            )

    def describe(self) -> dict[str, Any]:
        """For the run: what was kept, what was not, and why."""
        return {
            "broken": self.broken,
            "refused": self.refused,
            "unrecorded": self.unrecorded,
            "specimens": self.shelf.describe(),
        }

    def stop(self) -> None:
        """Training is over, perhaps in mid-step."""
        if self._session.own is not None:
            self._session.own.leave_watch()
        if self.recorder is not None:
            recorder = self._take_recorder()
            with suppress(Exception):
                recorder.stop()

    def capture_begins(self) -> None:
        """A CUDA graph is made: no tape may run while it is captured, and none would see what it replays."""
        self.broken = self.broken or "a CUDA graph is captured"
        self.stop()
        self._room.clear()

    def leave_to_parent(self) -> None:
        """In a forked process: the tape is the parent's; its threads are not here, and nothing waits for them."""
        if self.recorder is not None:
            self._take_recorder().leave()

    def close(self) -> None:
        """Training is over: what was taped is on disk when this returns."""
        self.stop()
        self._room.clear()
        self.shelf.close()

    def _take_recorder(self) -> Recorder:
        recorder, self.recorder = self.recorder, None
        _recording.clear()
        assert recorder is not None
        return recorder

    def _to_be_overwritten(self) -> Iterator[torch.Tensor]:
        for optimizer in self._session.parameters.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    state = optimizer.state.get(parameter, {})
                    yield from (v for v in state.values() if isinstance(v, torch.Tensor))

    def _has_room_for(self, memories: Iterable[torch.Tensor]) -> bool:
        """Whether the host's memory is ready for them: what is small finds some at once."""
        sizes = [size for memory in memories if (size := nbytes(memory)) >= SMALL]
        return sum(sizes) < LARGE or self._room.ready(sizes)

    # which steps ------------------------------------------------------------------------------------------

    def _affords(self, step: int) -> bool:
        if self.only is not None:
            return step == self.only
        ordinary = not self.trouble and not self._is_landmark(step)
        if ordinary and (self.taped >= MOST_IN_A_ROW or not self._has_allowance(ordinary=True)):
            return False  # as most steps are: nothing more is asked of them
        if not self.shelf.has_room or (step in PLAIN_STEPS and not self.trouble):
            return False
        if ordinary:
            return not self._weighs_much()
        if step == FIRST_LANDMARK and self._allowance:
            return True
        if step == SECOND_LANDMARK and self._allowance and self.spent + self._cost < TWO_LANDMARKS:
            return True  # much of what is asked wants to be seen twice
        if self._has_allowance() and (self.taped < MOST_IN_A_ROW or self._is_landmark(step)):
            return True
        elapsed = time.perf_counter() - self._began
        return self.spent + self._cost < self._allowance + self._share * elapsed

    def _has_allowance(self, ordinary: bool = False) -> bool:
        enough = not ordinary or self._cost < self._for_ordinary
        return enough and self.spent + self._cost < self._allowance

    def _weighs_much(self) -> bool:
        """Of a large model only the landmarks are taped: what is asked of every step is asked of those."""
        with unseen_by_modes():
            names = self._session.names.parameters
            return sum(p.numel() * p.element_size() for p in names) > LARGE

    def _is_landmark(self, step: int) -> bool:
        return self._overdue is not None or step - self._first in LANDMARKS

    def training_starts_anew(self) -> None:
        """An optimizer is made in mid-training (a second stage, a fine-tuning): its first steps deserve a look, too."""
        if self._step < NEW_STAGE_AFTER or self._stages >= MOST_STAGES:
            return
        self._stages += 1
        self._first = self._step
        if self._allowance:
            self._for_ordinary = IN_A_ROW_AT_MOST * STAGE_ALLOWANCE
            self._allowance = max(self._allowance, self.spent) + STAGE_ALLOWANCE

    def row_written(self, row: dict[str, Any]) -> None:
        """Trouble is brewing where the loss or the gradient is far above what it was in the last steps."""
        self._calm = True
        for column, factor in (("loss", 4.0), ("grad_norm", 20.0)):
            value = row.get(column)
            if value is None:
                continue
            recent = self._recent.setdefault((row.get("optimizer"), column), Recent())
            self._calm &= not recent.stands_out(value, factor)
        # a training that stays non-finite has nothing more to show
        self.trouble = not self._calm and self._troubled < MOST_TROUBLED

    # what happens in a step -------------------------------------------------------------------------------

    def listen(self, step: int, seen: bool) -> None:
        """Calls are kept where a bad step shows before its update: on a CPU, and at the one step that was asked for."""
        if not seen:
            self.calls.detach()
            return
        models = list(self._session.names.roots.values())
        if len(models) != len(self._on_cpu):
            self._on_cpu = [all(p.device.type == "cpu" for p in model.parameters()) for model in models]
        if self.only == step or (self.calls.steady and all(self._on_cpu)):
            self.calls.attach(models)
        else:
            self.calls.detach()

    def before_update(self, bad: bool) -> None:
        """The weights are still good. A bad step without a tape is made again; the one asked for, by compiled code."""
        if self.broken or self._looks >= MOST_LOOKS:
            return
        self._looks += 1
        start = seconds_of_training()
        try:
            with same_random_numbers():
                if self.recorder is None:
                    self._make_again()
                elif self._session.compiled:
                    with self.recorder.interrupted():
                        self._again = {"eager": "", "compiled": self.calls.differ_when_compiled()}
        except Exception as error:
            self._give_up(error)
        self.spent += seconds_of_training() - start

    def _make_again(self) -> None:
        for again in self.calls.make_again(self._session.names.parameters):
            if not again.recorder.tape.broken and (again.eager or again.compiled):
                self._shelve(again.recorder, before_update=True, again=describe(again))
                return

    def _give_up(self, error: Exception) -> None:
        """Taping ends; what the script's own signal handler raised meanwhile is the script's."""
        if raised_by_signal(error):
            raise error
        self.broken = f"{type(error).__name__}: {error}"
        self.stop()
        self._room.clear()


def is_warming_up() -> bool:
    """Whether steps run on a side stream, as before a CUDA graph is captured: there will be two or three of them, and
    none that a tape can see afterwards."""
    return torch.cuda.is_initialized() and torch.cuda.current_stream() != torch.cuda.default_stream()


def seconds_of_training() -> float:
    """What a training that has the machine to itself waits for: on a GPU the wall clock, else its own thread's time."""
    return time.perf_counter() if torch.cuda._initialized else time.thread_time()


def describe(again: Again) -> dict[str, str]:
    return {"eager": again.eager, "compiled": again.compiled}


def has_changed(array: Any) -> bool:
    """Whether a tensor that still lives holds something else than it did when it was put together with others."""
    member = array.member() if array.member is not None else None
    return member is not None and content_of(member) != array.content


def fits_in_memory(parameters: Collection[torch.Tensor]) -> bool:
    """Whether the host has room for the weights, two states of the optimizer and what goes with them."""
    size = sum(p.numel() * p.element_size() for p in parameters)
    if is_sharded(parameters):  # every rank of this machine gathers the whole model
        size *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return 3.3 * size < HOST_SHARE * available_memory()


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Whatever is done meanwhile, training's random numbers stay."""
    state, python, array = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(array)
