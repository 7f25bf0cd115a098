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

from gradproof.errors import warn
from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.guard import guarded
from gradproof.probes.ledger import Ledger
from gradproof.probes.lines import Lines
from gradproof.probes.modules import OutputProbe, recomputing
from gradproof.probes.names import Names, user_line
from gradproof.probes.pace import Pace
from gradproof.probes.parameters import Parameters
from gradproof.probes.schedule import BARE, EVERYTHING, LIGHT, PARAMETERS, Rule
from gradproof.probes.step import OpenStep
from gradproof.probes.taping import Taping
from gradproof.probes.updates import UpdateProbe
from gradproof.record.writer import RunWriter


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
        on_row: Callable[[dict[str, Any]], None] | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.writer = writer
        self.names = names
        self.lines = lines or Lines()
        self.rank = rank
        self.pid = os.getpid()
        # plain data that listeners gather; what begins with _ is for the experiments, not for the run
        self.facts: dict[str, Any] = {"lines": self.lines.sites, "_initialised": self.lines.initialised}
        self.counts = {"backward": 0, "zero_grad": 0, "clip": 0, "scheduler": 0, "skipped": 0}
        self.losses: deque[float] = deque(maxlen=2000)
        self.own_seconds = 0.0
        self.alive = True
        self.failure: str | None = None

        self.taping: Taping | None = None
        self.compiled = False
        self.stop_after: int | None = None  # steps after which a trial has shown enough
        self.afterwards: list[Callable[[], None]] = []  # what the handler that runs leaves to be done
        self.examining = False  # a model that is called meanwhile is not training

        self.parameters = Parameters(writer, names)
        self._updates = UpdateProbe(self.parameters)
        self._outputs = OutputProbe(names, self.lines, self._output_seen, self.fail)
        self._ledger = Ledger(writer, self._row_written)
        self._on_row = on_row

        self.pace = Pace(rules, budget, rank)
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
        line = user_line()
        optim.remember(optimizer, line)
        self.facts.setdefault("_optimizers_made", {})[id(optimizer)] = line
        self.names.learn(optim.parameters_of(optimizer))
        self._listen_to_calls()
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
            self.taping.calls.something_compiled(made)
            self._listen_to_calls()
            self.afterwards.append(self.taping.stop)

    @guarded
    def epoch_begins(self) -> None:
        if self.taping is not None:
            self.afterwards.append(self.taping.long_wait)
        if self._batch:  # a loader that is only looked at does not count
            self._epoch, self._batch = self._epoch + 1, 0

    @guarded
    def zero_grad(self) -> None:
        self.counts["zero_grad"] += 1
        self.current.order.append("z")

    @guarded
    def scaled(self, unscaled: Tensor, scaled: Tensor, scale: Tensor | None) -> None:
        self._unscaled[id(scaled)] = unscaled
        if scale is not None:
            self.current.reading.add("loss_scale", scale.clone())

    @guarded
    def backward_begins(self, tensors: list[Tensor], gradients: list[Tensor | None]) -> None:
        self.counts["backward"] += 1
        step = self.current
        if not {"z", "b"} & set(step.order):
            self._updates.find_stale(step)
        step.order.append("b")
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if not step.add_loss(self._unscaled.pop(id(tensor), tensor).detach(), gradient):
                self._saw_nonfinite()
        self._unscaled.clear()

    @guarded
    def backward_ends(self) -> None:
        if self.current.row.get("inside_backward"):
            self.close_step()

    @guarded
    def unscaled(self) -> None:
        self.current.order.append("u")

    @guarded
    def clipped(self, how: str, limit: float, before: Tensor | None) -> None:
        self.counts["clip"] += 1
        step = self.current
        step.order.append("c" if how == "norm" else "v")
        step.row["clip_limit"] = float(limit)
        if before is not None:
            step.reading.add("norm_before_clip", measuring.local(before))

    @guarded
    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self.taping is not None:
            self.taping.optimizer_begins(optimizer)

    @guarded
    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters.of_optimizer(optimizer)["steps"] += 1
        step = self.current
        if step.depth < LIGHT and not step.waits:
            return
        bad = not self._updates.before(step, self.step, optimizer)
        if bad:
            self._saw_nonfinite()
        first_bad = bad and self.pace.nonfinite_step == self.step
        if self.taping is not None and (first_bad or (self.compiled and self.taping.only == self.step)):
            self._look_before_update(bad)

    @guarded
    @torch.no_grad()
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.current
        if self.taping is not None:
            self.taping.optimizer_ends()
        step.order.append("s")
        self._updates.after(step, optimizer)
        if recomputing():  # the optimizer steps inside backward: one step is all of these together
            step.row["inside_backward"] = True
        else:
            self.close_step()

    @guarded
    @torch.no_grad()
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
    def scheduler_stepped(self) -> None:
        self.counts["scheduler"] += 1
        self.current.order.append("l")

    @guarded
    @torch.no_grad()
    def _output_seen(self, kind: str, name: str, tensor: Tensor, made_by: str) -> None:
        tensor = measuring.local(tensor)
        if self.current.depth >= EVERYTHING and tensor.numel():
            dtype = str(tensor.dtype)[6:]
            self.writer.add_tensor(kind, name, shape=list(tensor.shape), dtype=dtype, module=made_by)
            self.current.measure_output(kind, name, tensor)

    # the turn of a step ------------------------------------------------------------------------------------

    def close_step(self) -> None:
        step, number = self.current, self.step
        step.close(step=number, seconds=self.pace.elapsed(), epoch=self._epoch, batch=self._batch)
        self.step += 1
        self._batch += 1
        self._begin_step()
        self._ledger.add(step, number)
        self.afterwards.append(self._turn_tape)

    def _turn_tape(self) -> None:
        """The last step's tape is examined, the next one's begun."""
        if self.taping is not None and self.alive:
            self.taping.end()
            self.taping.begin(self.step, self.compiled)
            self.current.waits = self.taping.active
        if self.stop_after is not None and self.step >= self.stop_after:
            raise SystemExit(0)

    def _look_before_update(self, bad: bool) -> None:
        """The weights are as they were: what can be found out about a bad step now is found before it is written."""
        if self.taping is not None:
            self.afterwards.append(functools.partial(self.taping.before_update, bad))

    def _begin_step(self) -> None:
        if self.taping is not None:
            self.own_seconds += self.taping.calls.take_seconds()
        self.pace.pay(self.step, self.current.depth, self.own_seconds)
        self.unseen = self._must_pass_over()
        self._open_step()

    def _open_step(self) -> None:
        if self.unseen:
            self.current = OpenStep(BARE)
        else:
            self.current = self.pace.open_step(self.step, self._epoch, self._batch)
        if self.taping is not None:
            self.taping.calls.step_ended()
        self._listen_to_calls()
        if self.current.depth >= EVERYTHING and not self.compiled:
            self._outputs.attach()
        else:
            self._outputs.detach()

    def _listen_to_calls(self) -> None:
        if self.taping is not None:
            self.taping.listen(self.step, seen=not self.unseen and self.current.depth >= LIGHT)

    def _must_pass_over(self) -> bool:
        taped = self.taping is not None and self.taping.active
        return not taped and self.pace.must_pass_over(self.step)

    def pass_over(self, event: str) -> None:
        """An event of a step that is too dear: only its end counts."""
        if event in ("after_update", "skipped") and not recomputing():
            self.step += 1
            self._batch += 1
            self.pace.passed_over += 1
            self.unseen = self._must_pass_over()
            if not self.unseen:
                self._open_step()

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
        broken = [key for key in ("loss", "grad_norm") if not math.isfinite(row.get(key, 0.0))]
        if broken and self.pace.nonfinite_step is None and not row.get("skipped"):
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

    def close(self) -> None:
        """The end of training, normal or not: what is still on its way is written."""
        self._stop_listening()
        if os.getpid() != self.pid:
            return
        if self.taping is not None:
            self.taping.stop()
        self._close_guarded()
        self.alive = False
        self.writer.set_info(
            cost={
                **self.pace.cost(self.own_seconds),
                "steps": self.step,
                "experiment_seconds": round(self.taping.spent, 4) if self.taping else 0.0,
                "taped_steps": self.taping.taped if self.taping else 0,
            },
            events_seen=self.counts,
            facts={name: value for name, value in self.facts.items() if not name.startswith("_")},
            ended=time.time(),
            failure=self.failure,
        )
        self.writer.close()

    def _stop_listening(self) -> None:
        self._outputs.detach()
        if self.taping is not None:
            self.taping.calls.detach()

    @guarded
    @torch.no_grad()
    def _close_guarded(self) -> None:
        self._ledger.settle(0)
        self.parameters.describe_end()
        self.lines.read_source(accumulates=self.counts["backward"] > 1.2 * self.step)
