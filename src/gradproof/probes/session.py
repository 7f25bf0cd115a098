"""One watched training: events come in from the hooks, rows and frames go out to the run.

A step ends when an optimizer has stepped, when a GradScaler skipped the step, or, for optimizers that step
inside backward, when that backward has ended. On its way through here a step is opened as deep as the pace allows,
filled by the events, closed, handed to the ledger, and its tape, if it has one, to the experiments.
"""

from __future__ import annotations

import functools
import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradproof.errors import print_instead, warn
from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.flight import FlightRecorder
from gradproof.probes.graphs import Captured, Graphs
from gradproof.probes.guard import guarded, noted
from gradproof.probes.helper import Helper
from gradproof.probes.ledger import Ledger
from gradproof.probes.lines import Lines
from gradproof.probes.modules import OutputProbe, recomputing
from gradproof.probes.names import Names, user_line
from gradproof.probes.own_updates import OwnUpdates
from gradproof.probes.pace import Pace
from gradproof.probes.parameters import Parameters
from gradproof.probes.prints import Prints
from gradproof.probes.schedule import BARE, EVERYTHING, LIGHT, PARAMETERS, Rule
from gradproof.probes.step import OpenStep
from gradproof.probes.taping import Taping
from gradproof.probes.threads import Owner
from gradproof.probes.updates import UpdateProbe
from gradproof.record.flight import BACKWARD, FORWARD, UPDATE
from gradproof.record.prints import is_landmark
from gradproof.record.source import rename_cells
from gradproof.record.writer import RunWriter
from gradproof.tape.living import Living

_graph_task = torch._C._current_graph_task_id
MOST_MICRO_BATCHES = 4  # of a step whose outputs are measured, as long as all is finite: they are alike
ONE_THREAD = "two threads train; only the first is watched"


class Session:
    """The watching of one training process; see the methods under "events" for what it reacts to."""

    def __init__(
        self,
        writer: RunWriter,
        names: Names,
        *,
        rules: tuple[Rule, ...] = (),
        budget: float | None = None,
        rank: int = 0,
        world: int = 1,
        on_row: Callable[[dict[str, Any]], None] | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.writer = writer
        self.names = names
        self.lines = lines or Lines()
        self.rank = rank
        self.pid = os.getpid()
        # plain data that listeners gather; what begins with _ is for the experiments, not for the run
        self.facts: dict[str, Any] = {
            "lines": self.lines.sites,
            "_initialised": self.lines.initialised,
            "_optimizers_made": Living(),  # each with the line
            "_cleared": Living(),  # optimizers whose zero_grad was called
        }
        self.counts = {"backward": 0, "zero_grad": 0, "clip": 0, "scheduler": 0, "skipped": 0}
        self.losses: deque[float] = deque(maxlen=2000)
        self.own_seconds = 0.0
        self._rings = True  # there is room for them, as far as is known
        self.alive = True
        self.failure: str | None = None

        self.taping: Taping | None = None
        self.helper: Helper | None = None  # who examines, beside the training
        self.compiled = False
        self.stop_after: int | None = None  # steps after which a trial has shown enough
        self.afterwards: list[Callable[[], None]] = []  # what the handler that runs leaves to be done
        # looks that are taken once, before and after an optimizer steps; each says whether it was that step
        self.looks_before: list[Callable[[Any], bool]] = []
        self.looks_after: list[Callable[[Any], bool]] = []
        self.look_at_clip: Callable[[Any], bool] | None = (
            None  # the one before that is taken where a clip was
        )
        self.examining = False  # a model that is called meanwhile is not training
        self.stepping = ""  # the optimizer whose step has begun and not ended

        self.parameters = Parameters(writer, names)
        self._updates = UpdateProbe(self.parameters)
        self._outputs = OutputProbe(names, self.lines, self._output_seen, self.fail)
        # of several ranks: what is to be alike on all of them
        self.prints: Prints | None = Prints(self, world) if world > 1 else None
        self.flight = FlightRecorder(writer, self.ring_failed) if world > 1 else None
        self._ledger = Ledger(writer, self._row_written, self.prints.write if self.prints else None)
        self._on_row = on_row
        self.owner = Owner()
        self.graphs = Graphs(lambda: all(p.grad is None for _, p in names.trainable()))

        self.own: OwnUpdates | None = None  # set where no optimizer was made so far
        self.cells: dict[str, str] = {}  # of a notebook: the file name of a cell's code -> what it is called
        self.printed: Any = None  # set where a script's own printing is listened to
        self.returns: Any = None  # set where weights are compared with what the last step left

        self.pace = Pace(rules, budget, rank, world)
        self.step = 0
        self._epoch, self._batch = 0, 0
        self._unscaled: dict[int, Tensor] = {}  # id of a scaled loss -> the loss
        self.current = OpenStep(EVERYTHING)  # the step under way
        self.unseen = False  # whether it is passed over
        self._begin_step()

    # events ------------------------------------------------------------------------------------------------

    @guarded
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters can be named, and the very first forward measured, only if the model is known by then."""
        self._leave_own_updates()
        line = user_line()
        optim.remember(optimizer, line)
        self.facts["_optimizers_made"][optimizer] = line
        self.names.learn(optim.parameters_of(optimizer))
        self.listen_to_calls()
        if self.taping is not None and self.step > 0:
            self.taping.training_starts_anew()
        elif self.taping is not None and not self.taping.active:
            self.afterwards.append(self._turn_tape)

    @guarded
    def something_compiled(self, made: Any) -> None:
        """Hooks on modules would break a compiled graph, or warn: outputs are left alone from here on."""
        self.compiled = True
        self._outputs.detach()
        if self.taping is not None:
            self.taping.something_compiled(made)
            self.listen_to_calls()
            self.afterwards.append(self.taping.stop)

    @guarded
    def epoch_begins(self) -> None:
        if self._batch:  # a loader that is only looked at does not count
            self._epoch, self._batch = self._epoch + 1, 0

    @noted
    def zero_grad(self) -> None:
        if self.own is not None:
            self._settle_own()
        self.counts["zero_grad"] += 1
        self.current.order.append("z")
        self.current.is_fresh = False

    @guarded
    def _settle_own(self) -> None:
        if self.own is not None:
            self.own.settle(at_backward=False)

    @guarded
    def scaled(self, unscaled: Tensor, scaled: Tensor, scale: Tensor | None) -> None:
        self._unscaled[id(scaled)] = unscaled
        if scale is not None and not self.current.is_scaled:  # the same for all backwards of a step
            self.current.is_scaled = True
            self.current.reading.add("loss_scale", scale.clone())

    @guarded
    def backward_begins(
        self, roots: list[Any], gradients: list[Tensor | None], wanted: list[Tensor] | None = None
    ) -> None:
        self.counts["backward"] += 1
        if self.own is not None:
            self.own.backward_begins(roots, wanted)
        step = self.current
        if step.is_fresh:
            self._updates.find_stale(step)
        step.is_fresh = False
        step.order.append("b")
        step.backwards += 1
        if self.prints is not None:
            self.prints.backward_begins(roots)
        if self.flight is not None:
            self.flight.begin()
            self.flight.note(self.step, BACKWARD)
        for root, gradient in zip(roots, gradients, strict=True):
            loss = self._unscaled.pop(id(root), root) if self._unscaled else root
            if isinstance(loss, Tensor) and not step.add_loss(loss, gradient):  # no edge of a graph
                self._saw_nonfinite()
        self._unscaled.clear()

    @guarded
    def backward_ends(self) -> None:
        """Of a backward in which optimizers have stepped."""
        self.close_step()

    @guarded
    def gradients_arrived(
        self, given: list[tuple[Tensor, Tensor]] | None = None, loss: Tensor | None = None
    ) -> None:
        """Of a script without an optimizer: `given` where it has asked for gradients, and .grad holds none."""
        if loss is not None and not self.current.add_loss(loss, None):
            self._saw_nonfinite()
        if self.own is not None:
            self.own.gradients_arrived(given)

    @guarded
    def line_printed(self, text: str, source: str) -> None:
        """Of a script that has neither made an optimizer nor called backward so far."""
        if self.printed is not None:
            self.printed.look(text, source)

    @guarded
    def own_update_made(self) -> None:
        """The last operation of an update by hand, as far as is known, has run."""
        if self.own is not None:
            if not self.own.replaces:  # else the script has yet to put the new tensors into their places
                self.own.settle(at_backward=False)
            self.afterwards.append(self._turn_own_tape)

    @guarded
    def own_model_died(self, names: frozenset[str]) -> None:
        """A model that was trained by hand is dropped by the script: its last step ends, and nothing of it stays."""
        if self.own is not None:
            self.own.drop(names)
            self.afterwards.append(self.own.leave_watch)
            if self.taping is not None:
                self.afterwards.append(self.taping.stop)

    @guarded
    def own_update_goes_on(self) -> None:
        """A parameter was written, perhaps the last one: a tape begins here, and again if there are more."""
        self.afterwards.append(self._begin_own_tape)

    @noted
    def unscaled(self) -> None:
        self.current.order.append("u")

    @guarded
    def clipped(self, how: str, limit: float, before: Tensor | None) -> None:
        self.counts["clip"] += 1
        step = self.current if self.own is None else self.own.clipped() or self.current
        step.order.append("c" if how == "norm" else "v")
        step.row["clip_limit"] = float(limit)
        # of sharded gradients a rank knows only the norm of its own part
        if before is not None and measuring.is_measurable(before) and not hasattr(before, "to_local"):
            step.reading.add("norm_before_clip", measuring.local(before))

    @guarded
    def optimizer_begins(self, optimizer: torch.optim.Optimizer, has_gradients: bool) -> None:
        """A step; with a closure, the gradients come when that has run."""
        self.stepping = type(optimizer).__name__
        if self.own is not None:
            self._give_way()
        if self.flight is not None:
            self.flight.note(self.step, UPDATE)
        if self.taping is not None and self.taping.recorder is not None:
            self.taping.recorder.enter_optimizer(optimizer)
        if self.returns is not None and not self.returns.over:
            self.returns.before(optimizer)
        if has_gradients:
            self.update_follows(optimizer)

    @guarded
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.update_follows(optimizer)

    def update_follows(self, optimizer: Any) -> None:
        """The gradients are whole, the weights still the old ones."""
        self.parameters.of_optimizer(optimizer)["steps"] += 1
        step = self.current
        if self.prints is not None:
            self.prints.before_update(step, self.step, optimizer)
        if step.depth < LIGHT and not step.waits:
            return
        bad = not self._updates.before(step, self.step, optimizer)
        if bad:
            self._saw_nonfinite()
        first_bad = bad and self.pace.nonfinite_step == self.step
        if self.taping is not None and (first_bad or (self.compiled and self.taping.only == self.step)):
            self._look_before_update(bad)

    @guarded
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        step, self.stepping = self.current, ""
        if self.taping is not None and self.taping.recorder is not None:
            self.taping.recorder.leave_optimizer()
        step.order.append("s")
        if self.returns is not None and not self.returns.over:
            self.returns.after(optimizer)
        self._updates.after(step, optimizer)
        if _graph_task() != -1:  # the optimizer steps inside backward: one step is all of these together
            step.row["inside_backward"] = True
        else:
            self.close_step()

    @guarded
    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler found inf: the optimizer's own hooks never fire, and this is the step that matters."""
        self.counts["skipped"] += 1
        step = self.current
        self._updates.skipped(step, optimizer)
        if self.pace.nonfinite_step == self.step:
            self.pace.nonfinite_step = None  # no weight has seen it: go on looking for the one that matters
        if not math.isfinite(step.row.get("loss", 0.0)):  # no loss scale makes that
            self._look_before_update(bad=True)
        step.order.append("x")
        step.row["skipped"] = 1
        self.close_step()

    @guarded
    def capture_begins(self) -> None:
        self.graphs.begin()
        if self.taping is not None:
            self.afterwards.append(self.taping.capture_begins)

    @guarded
    def replay_begins(self, captured: Captured) -> None:
        if self.current.depth >= PARAMETERS:
            for optimizer in captured.optimizers:
                self._updates.copy_weights(optimizer, optim.parameters_of(optimizer))

    @guarded
    def replay_ends(self, captured: Captured) -> None:
        """A graph that holds a backward has run it again; one that holds an optimizer's step, too, is a whole step."""
        step = self.current
        step.add_captured(captured)
        for name, letter in (("backward", "b"), ("zero_grad", "z"), ("clip", "c"), ("scheduler", "l")):
            self.counts[name] += captured.order.count(letter)
        for optimizer, rate in captured.optimizers.items():
            self.parameters.of_optimizer(optimizer)["steps"] += 1
            if captured.leaves_gradients and not self._updates.measure_gradients(step, self.step, optimizer):
                self._saw_nonfinite()
            self._updates.after(step, optimizer)
            if rate is not None:
                step.row["lr"] = rate
        if captured.optimizers:
            self.close_step()

    @noted
    def scheduler_stepped(self) -> None:
        self.counts["scheduler"] += 1
        self.current.order.append("l")

    @guarded
    def _output_seen(self, kind: str, name: str, tensor: Tensor, made_by: str) -> bool:
        step = self.current
        if step.backwards >= MOST_MICRO_BATCHES and kind == "output" and self.pace.nonfinite_step is None:
            return False
        tensor = measuring.local(tensor)
        if step.depth >= EVERYTHING and tensor.numel():
            dtype = str(tensor.dtype)[6:]
            self.writer.add_tensor(kind, name, shape=list(tensor.shape), dtype=dtype, module=made_by)
            step.measure_output(kind, name, tensor)
        return True

    # the turn of a step ------------------------------------------------------------------------------------

    def hold_step(self) -> tuple[OpenStep, int, dict[str, int]]:
        """The step under way waits for its update; the next one is open meanwhile. Where it was, to end it later."""
        held = (self.current, self.step, {"epoch": self._epoch, "batch": self._batch})
        self.step += 1
        self._batch += 1
        self._begin_step()
        return held

    def take_back(self, step: OpenStep, number: int, where: dict[str, int]) -> None:
        """There was no update: the step that waited goes on."""
        self.current, self.step = step, number
        self._epoch, self._batch = where["epoch"], where["batch"]

    def finish_own_step(self, step: OpenStep, number: int, where: dict[str, int], update: Any) -> None:
        """The step that waited has got its update."""
        step.order.append("s")
        self._updates.after(step, update)
        if self.taping is not None and not self.taping.active:
            self.taping.step_went_untaped()
        step.close(step=number, seconds=self.pace.elapsed(), **where)
        self._ledger.add(step, number)
        self.facts["_own_updates"] = self.own.facts() if self.own is not None else {}
        self.afterwards.append(self._end_if_enough)

    def begin_handed_step(self, update: Any) -> None:
        """A loop without hooks: its parameters as they are before the step."""
        self.parameters.of_optimizer(update)
        if self.current.depth >= PARAMETERS:
            self._updates.copy_weights(update, optim.parameters_of(update))

    def end_handed_step(self, update: Any, row: dict[str, Any]) -> None:
        """A loop without hooks has ended its step, and handed in what it is made of."""
        step = self.current
        step.row.update(row)
        step.order += ["b", "s"]
        self.parameters.of_optimizer(update)["steps"] += 1
        if step.depth >= LIGHT and not self._updates.measure_gradients(step, self.step, update):
            self._saw_nonfinite()
        self._updates.after(step, update)
        step.row.update(row)  # a rate that was handed in is better than one that was worked out
        self.close_step()

    def own_parameters_replaced(self, update: Any, tensors: dict[str, Tensor]) -> None:
        update.param_groups[0]["params"] = list(tensors.values())
        self._updates.replaced(update, tensors)

    def _write_printed(self) -> None:
        """A row for each loss that a script without backward has printed."""
        for loss in self.printed.losses:
            step = OpenStep(BARE)
            step.row["loss"] = loss
            step.close(step=self.step, seconds=self.pace.elapsed(), epoch=0, batch=self.step)
            self._ledger.add(step, self.step)
            self.step += 1
        self.facts["printed"] = {"losses": len(self.printed.losses), "changed": self.printed.names}

    def _leave_own_updates(self) -> None:
        """An optimizer is made: it is what trains."""
        if self.own is not None:
            self.own.close()
            self.own = None

    def _give_way(self) -> None:
        """An optimizer steps that was made before anybody watched: nothing was updated by hand."""
        assert self.own is not None
        self.own.give_way()
        self.parameters.forget(self.own.stand_in)
        self._updates.forget()
        self.own = None

    def close_step(self) -> None:
        step, number = self.current, self.step
        if self.prints is not None:
            self.prints.step_closes(step)
        now = self.pace.elapsed()
        step.close(step=number, seconds=now, epoch=self._epoch, batch=self._batch)
        self.step += 1
        self._batch += 1
        if self.flight is not None:
            self.flight.note(self.step, FORWARD)
        self._begin_step(now)
        self._ledger.add(step, number)
        if self.taping is None or not self.taping.stays_away(self.step):
            self.afterwards.append(self._turn_tape)
        elif self.stop_after is not None or (
            self.helper is not None and time.monotonic() >= self.helper.next_look
        ):
            self.afterwards.append(self._end_if_enough)

    def _turn_tape(self) -> None:
        """The last step's tape becomes a specimen, the next one's begins."""
        if self.taping is not None and self.alive:
            self.taping.end()
            self.taping.begin(self.step, self.compiled)
            self.current.waits = self.taping.active
        self._end_if_enough()

    def _turn_own_tape(self) -> None:
        if self.taping is not None and self.alive and self.own is not None:
            self.taping.own_update_ends(self.own.renewals())
            self.taping.end()
            self._begin_own_tape()

    def _begin_own_tape(self) -> None:
        if self.taping is not None and self.alive:
            self.taping.stop()
            self.taping.begin(self.step, self.compiled, by_hand=True)
            self.current.waits = self.taping.active

    def _end_if_enough(self) -> None:
        if self.helper is not None and not self.writer.may_hang:
            for line in self.helper.announcements():
                print_instead(rename_cells(line, self.cells))
        if self.stop_after is not None and self.step >= self.stop_after:
            self.writer.set_info(stopped_after=self.step)
            raise SystemExit(0)

    def _look_before_update(self, bad: bool) -> None:
        """The weights are as they were: what can be found out about a bad step now is found before it is written."""
        if self.taping is not None:
            self.afterwards.append(functools.partial(self.taping.before_update, bad))

    def _begin_step(self, now: float | None = None) -> None:
        if self.taping is not None and self.taping.calls.listens:
            self.own_seconds += self.taping.calls.take_seconds()
        depth = self.current.depth
        if self.prints is not None and is_landmark(self.step - 1):
            depth = max(depth, PARAMETERS)  # all of them were looked at: it comes out of what deep steps have
        self.pace.pay(self.step, depth, self.own_seconds)
        self.unseen = self.pace.strict and self._must_pass_over()
        self._open_step(now)

    def _open_step(self, now: float | None = None) -> None:
        if self.unseen or (now is not None and self.pace.stays_bare(now)):
            self.current = OpenStep(BARE)
        else:
            self.current = self.pace.open_step(self.step, self._epoch, self._batch)
        if self.taping is not None and self.taping.calls.kept:
            self.afterwards.append(self.taping.calls.kept.clear)  # after what was left to be done with them
        if self.taping is not None and (self.taping.calls.listens or self.current.depth > BARE):
            self.listen_to_calls()
        if self.prints is not None:
            self.prints.step_opens(self.step)
        if self.current.depth >= EVERYTHING and not self.compiled:
            self._outputs.attach()
        elif self._outputs.handle is not None:
            self._outputs.detach()

    def listen_to_calls(self) -> None:
        if self.taping is not None:
            self.taping.listen(self.step, seen=not self.unseen and self.current.depth >= LIGHT)

    def _must_pass_over(self) -> bool:
        if self.own is not None and self.own.tensors:
            return False  # a step that nobody looks at would not be noticed
        taped = self.taping is not None and self.taping.active
        return not taped and self.pace.must_pass_over(self.step)

    def pass_over(self, event: str) -> None:
        """An event of a step that is too dear: only its end counts."""
        if event in ("after_update", "skipped", "replay_ends") and not recomputing():
            self.step += 1
            self._batch += 1
            self.pace.passed_over += 1
            if self.returns is not None:  # what is written around such a step is not known
                self.returns.left.clear()
            self.unseen = self.pace.strict and self._must_pass_over()
            if not self.unseen:
                self._open_step()

    def drop_step(self) -> None:
        """An exception of the script's, or another thread's step, came in the middle: what was begun is not whole."""
        self.current = OpenStep(BARE)
        self.facts.pop("_clipped", None)
        self._updates.forget()

    def another_thread_trains(self) -> None:
        """Said once, when it has taken a step."""
        if self.owner.others and "threads" not in self.facts:
            self.facts["threads"] = 2
            self.writer.write_event("second_thread", step=self.step, text=ONE_THREAD)

    def _saw_nonfinite(self) -> None:
        """Look closely from here on, at this step already."""
        if self.pace.nonfinite_step is None:
            self.pace.nonfinite_step = self.step
            self.writer.write_event("first_nonfinite", step=self.step)
            self._ledger.write_ring()
        if self.pace.looks_closely(self.step):
            self.current.depth = max(self.current.depth, PARAMETERS)

    def _row_written(self, row: dict[str, Any]) -> None:
        if "loss" in row:
            self.losses.append(row["loss"])
        finite = math.isfinite(row.get("loss", 0.0)) and math.isfinite(row.get("grad_norm", 0.0))
        if not finite and self.pace.nonfinite_step is None and not row.get("skipped"):
            self._saw_nonfinite()
        if self.taping is not None:
            self.taping.row_written(row)
        if self._on_row is not None:
            self._on_row(row)

    # the end -----------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """The one warning: gradproof broke, training goes on without it."""
        self.alive = False
        self.failure = f"{type(error).__name__}: {error}"
        self._stop_listening()
        if self.taping is not None:
            self.taping.stop()
        last = traceback.extract_tb(error.__traceback__, limit=-1)
        place = f" at {os.path.basename(last[0].filename)}:{last[0].lineno}" if last else ""
        self.writer.write_event("watching_failed", step=self.step, error=self.failure, place=place.strip())
        warn(
            f"gradproof stopped watching at step {self.step} ({self.failure}{place}); training goes on untouched",
            stacklevel=4,
        )

    def ring_failed(self, error: OSError) -> None:
        """The disk has no room for what a rank did last; where it takes nothing at all, that is said already."""
        if self._rings and not self.writer.broken:
            warn(
                f"gradproof keeps no last events of rank {self.rank} in {self.writer.path} ({error}); training goes "
                "on, but if this rank is lost, little will be known of why",
                stacklevel=4,
            )
        self._rings = False

    def close(self) -> None:
        """The end of training, normal or not: what is still on its way is written."""
        self._stop_listening()
        if self.own is not None:
            self.own.leave_watch()
        if os.getpid() != self.pid:
            return
        if self.taping is not None:
            self.taping.close()
        self._close_guarded()
        self.alive = False
        self.writer.set_info(
            cost={
                **self.pace.cost(self.own_seconds),
                "steps": self.step,
                "taping_seconds": round(self.taping.spent, 4) if self.taping else 0.0,
                "taped_steps": self.taping.taped if self.taping else 0,
            },
            **({"taping": self.taping.describe()} if self.taping else {}),
            events_seen=self.counts,
            facts={name: value for name, value in self.facts.items() if not name.startswith("_")},
            ended=time.time(),
            failure=self.failure,
            threads=1 + self.owner.others,  # that train; the first is watched
        )
        self.writer.close()

    def finish_examination(self, show: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        """Waits for whoever examines; the run is closed, and nothing of the training is asked any more."""
        if self.writer.broken and self.writer.may_hang:
            return  # whoever examines waits for the same disk, and ends with this process
        if self.helper is not None and (self.taping is None or not self.taping.taped or self.writer.broken):
            self.helper.stop()  # there is nothing to examine
        elif self.helper is not None:
            release_cached_memory()
            self.helper.finish(show)
        if self.taping is not None:
            self.taping.shelf.clear_away()

    def leave_to_parent(self) -> None:
        """This is a process that the watched one has forked: whatever is under way goes on there, not here."""
        self.alive = False
        self.helper = None
        self._stop_listening()
        self.flight = None  # its memory is the parent's, too
        if self.taping is not None:
            self.taping.leave_to_parent()
        if self.own is not None:
            self.own.leave_watch()

    def _stop_listening(self) -> None:
        self._outputs.detach()
        if self.prints is not None:
            self.prints.close()
        if self.flight is not None:
            self.flight.close()
        if self.taping is not None:
            self.taping.calls.detach()

    @guarded
    def _close_guarded(self) -> None:
        if self.own is not None:
            self.own.close()
        if self.printed is not None and not self.step and self.printed.trains:
            self._write_printed()
        self._ledger.settle(0)
        self.parameters.describe_end()
        if self.own is None:
            self.facts["backwards_after_the_last_step"] = self.current.backwards
        self.lines.read_source(self.counts["backward"] > 1.2 * self.step, self.own is not None)


def release_cached_memory() -> None:
    """What PyTorch keeps for later on a GPU is of no use to a script that has ended."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
