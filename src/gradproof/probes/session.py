"""One watched training: events come in from the hooks, rows and frames go out to the run.

A step ends when an optimizer has stepped, when a GradScaler skipped the step, or, for optimizers that step
inside backward, when that backward has ended. An error in here becomes one warning and ends the watching, never
the training.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradproof.errors import warn
from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.again import Calls
from gradproof.probes.ledger import Ledger
from gradproof.probes.lines import Lines
from gradproof.probes.modules import OutputProbe, recomputing
from gradproof.probes.names import Names, user_line
from gradproof.probes.parameters import Parameters
from gradproof.probes.schedule import BARE, EVERYTHING, LIGHT, OPTIMIZER, PARAMETERS, Moment, Purse, Rule
from gradproof.probes.step import OpenStep
from gradproof.probes.taping import Taping
from gradproof.record.writer import RunWriter

CLOSE_LOOK = 5  # steps measured whole after the first non-finite value
BETWEEN_SAMPLES = 1.0  # seconds between two steps whose distributions are taken


# what a step that is passed over does not look at; the last two end it
STEP_EVENTS = frozenset(
    (
        *("zero_grad", "scaled", "backward_begins", "backward_ends", "unscaled", "clipped"),
        *("optimizer_begins", "before_update", "scheduler_stepped", "after_update", "skipped"),
    )
)


def guarded(method: Callable) -> Callable:
    """An event handler: never raises into training, is timed, does nothing in a forked worker."""

    @functools.wraps(method)
    def handler(self: Session, *args: Any) -> Any:
        if not self.alive or self._examining or os.getpid() != self.pid:
            return None
        if self._unseen and method.__name__ in STEP_EVENTS:
            return self._pass_over(method.__name__)
        start = time.perf_counter()
        try:
            if self.taping is None or not self.taping.active:
                return method(self, *args)
            with _disable_current_modes():  # what gradproof computes is no part of the step that is taped
                return method(self, *args)
        except Exception as error:
            self.fail(error)
            return None
        finally:
            self.own_seconds += time.perf_counter() - start
            if self._afterwards:
                self._do_what_is_left()

    return handler


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
        self.rank = rank
        self._compiled = False
        self.pid = os.getpid()
        self.alive = True
        self.failure: str | None = None
        self.own_seconds = 0.0
        self.began = time.perf_counter()
        self.purse = Purse(0.02) if budget is None else Purse(budget, grace=0.0)
        self.step = 0
        self.counts = {"backward": 0, "zero_grad": 0, "clip": 0, "scheduler": 0, "skipped": 0}
        self._rules = rules
        self._limited = budget is not None or not rules
        self._strict = budget is not None  # a budget that was asked for is kept, if need be by not looking
        self._unseen = False
        self._passed_over = 0
        self._paid = 0.0  # of own_seconds, what the purse knows of
        self._on_row = on_row
        self._epoch, self._batch = 0, 0
        self._nonfinite_step: int | None = None
        self._parameters = Parameters(writer, names)
        self._ledger = Ledger(writer, self._row_written)
        self._copies: dict[int, optim.WeightCopy] = {}
        self._unscaled: dict[int, Tensor] = {}
        self._sampled_gradients: tuple[int, list[str], Tensor] | None = None
        self._last_sampled = 0.0
        self.losses: deque[float] = deque(maxlen=2000)
        self.lines = lines or Lines()
        # plain data that listeners gather; what begins with _ is for the experiments, not for the run
        self.facts: dict[str, Any] = {"lines": self.lines.sites, "_initialised": self.lines.initialised}
        self.taping: Taping | None = None
        self.stop_after: int | None = None  # steps after which a trial has shown enough
        # what a handler leaves to be done outside of what is measured: a tape can only be cut where it runs
        self._afterwards: list[Callable[[], None]] = []
        self._examining = False  # a model that is called meanwhile is not training
        self._calls = Calls(self.fail)
        self._on_cpu: list[bool] = []  # of each model
        self._recent: dict[tuple[Any, str], deque[float]] = {}
        self._outputs = OutputProbe(names, self.lines, self._output_seen, self.fail)
        self._open = OpenStep(EVERYTHING)
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
            self._afterwards.append(self._turn_tape)

    @guarded
    def something_compiled(self, made: Any) -> None:
        """Hooks on modules would break a compiled graph, or warn: outputs are left alone from here on."""
        self._compiled = True
        self._outputs.detach()
        self._calls.something_compiled(made)
        self._listen_to_calls()
        if self.taping is not None:
            self._afterwards.append(self.taping.stop)

    @guarded
    def epoch_begins(self) -> None:
        if self.taping is not None:
            self._afterwards.append(self.taping.long_wait)
        if self._batch:  # a loader that is only looked at does not count
            self._epoch, self._batch = self._epoch + 1, 0

    @guarded
    def zero_grad(self) -> None:
        self.counts["zero_grad"] += 1
        self._open.order.append("z")

    @guarded
    def scaled(self, unscaled: Tensor, scaled: Tensor, scale: Tensor | None) -> None:
        self._unscaled[id(scaled)] = unscaled
        if scale is not None:
            self._open.reading.add("loss_scale", scale.clone())

    @guarded
    def backward_begins(self, tensors: list[Tensor], gradients: list[Tensor | None]) -> None:
        self.counts["backward"] += 1
        step = self._open
        if not {"z", "b"} & set(step.order):
            self._look_for_stale_gradients()
        step.order.append("b")
        for tensor, gradient in zip(tensors, gradients, strict=True):
            loss = self._unscaled.pop(id(tensor), tensor).detach()
            if not measuring.is_measurable(loss):
                continue
            if loss.numel() != 1:
                loss = (loss * gradient.detach()).sum() if gradient is not None else loss.sum()
            self._add_loss(loss.real if loss.is_complex() else loss)
        self._unscaled.clear()

    def _add_loss(self, loss: Tensor) -> None:
        """A CPU's number can be read at once; a GPU's travels with the step's other numbers."""
        step = self._open
        if loss.device.type != "cpu":
            step.reading.add(f"loss {step.losses}", loss)
            step.losses += 1
            return
        value = loss.item()
        step.row["loss"] = step.row.get("loss", 0.0) + value
        if not math.isfinite(value):
            self._saw_nonfinite()

    @guarded
    def backward_ends(self) -> None:
        if self._open.row.get("inside_backward"):
            self._close_step()

    @guarded
    def unscaled(self) -> None:
        self._open.order.append("u")

    @guarded
    def clipped(self, how: str, limit: float, before: Tensor | None) -> None:
        self.counts["clip"] += 1
        step = self._open
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
        """The gradients are as the optimizer will use them; the weights are still the old ones."""
        step = self._open
        facts = self._parameters.of_optimizer(optimizer)
        facts["steps"] += 1
        if step.depth < LIGHT and not step.waits:
            return
        step.measure_kept()  # outputs come before gradients
        named = {self._parameters.name(p): p for p in optim.parameters_of(optimizer) if p.grad is not None}
        gradients = {
            name: measuring.local(p.grad.coalesce() if p.grad.is_sparse else p.grad)
            for name, p in named.items()
            if p.grad is not None and measuring.is_measurable(p.grad)
        }
        # a fused optimizer unscales, and skips, inside its own step
        for key in ("grad_scale", "found_inf"):
            if isinstance(value := getattr(optimizer, key, None), Tensor):
                step.reading.add(key, value.clone())
        bad = not math.isfinite(step.row.get("loss", 0.0))
        if gradients and step.depth < PARAMETERS:
            bad |= not step.measure_norms(gradients)
        if gradients and step.depth >= PARAMETERS:
            bad |= not step.measure("gradient", gradients)
            self._follow_direction(gradients)
            self._copies.setdefault(id(optimizer), optim.WeightCopy()).take(list(named.values()))
        if bad:
            self._saw_nonfinite()
        self._look_before_update(bad)
        facts["named"] = named
        self._parameters.got_gradients(named)

    @guarded
    @torch.no_grad()
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        step = self._open
        if self.taping is not None:
            self.taping.optimizer_ends()
        facts = self._parameters.of_optimizer(optimizer)
        named: dict[str, Tensor] = facts.pop("named", {})
        step.order.append("s")
        self._note_optimizer(optimizer, facts)
        if named and step.depth >= PARAMETERS and id(optimizer) in self._copies:
            weights = {name: measuring.local(p) for name, p in named.items()}
            step.measure_changes(weights, self._copies[id(optimizer)].before)
            if step.depth >= OPTIMIZER:
                step.measure_rows(self._moments(optimizer, facts))
        if recomputing():  # the optimizer steps inside backward: one step is all of these together
            step.row["inside_backward"] = True
        else:
            self._close_step()

    @guarded
    @torch.no_grad()
    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler found inf: the optimizer's own hooks never fire, and this is the step that matters."""
        self.counts["skipped"] += 1
        step = self._open
        gradients = {
            self._parameters.name(p): measuring.local(p.grad)
            for p in optim.parameters_of(optimizer)
            if p.grad is not None and measuring.is_measurable(p.grad)
        }
        if gradients:
            step.measure_norms(gradients)
        if self._nonfinite_step == self.step:  # no weight has seen it: go on looking for the one that matters
            self._nonfinite_step = None
        loss = step.row.get("loss", 0.0)
        if self.taping is not None and not math.isfinite(loss):  # no loss scale makes that
            self._afterwards.append(functools.partial(self.taping.before_update, self._calls, True))
        step.order.append("x")
        step.row["skipped"] = 1
        self._note_optimizer(optimizer, self._parameters.of_optimizer(optimizer))
        self._close_step()

    @guarded
    def scheduler_stepped(self) -> None:
        self.counts["scheduler"] += 1
        self._open.order.append("l")

    @guarded
    def log(self, values: dict[str, Any]) -> None:
        """A row by hand, for training code that has neither modules nor optimizers."""
        self._open.row.update({key: _float(value) for key, value in values.items()})
        self._close_step()

    @guarded
    def note(self, values: dict[str, float]) -> None:
        """Columns of the step that is under way."""
        self._open.row.update(values)

    @guarded
    @torch.no_grad()
    def tensors(self, kind: str, named: dict[str, Any]) -> None:
        """Tensors by hand: torch tensors, NumPy arrays, anything that torch.as_tensor takes."""
        self._open.measure(kind, {n: measuring.local(torch.as_tensor(t)) for n, t in named.items()})

    @torch.no_grad()
    def _look_for_stale_gradients(self) -> None:
        """Gradients that an optimizer has used already, still there, and not zero: known when the step is written."""
        used = [p for optimizer in self.optimizers for p in optim.parameters_of(optimizer)[:8]]
        held = [measuring.local(p.grad) for p in used if p.grad is not None]
        for index, group in enumerate(measuring.group_by_device(dict(enumerate(held))).values()):
            self._open.reading.add(f"stale {index}", measuring.square_sums(list(group.values())).sum())

    # what a step measures ----------------------------------------------------------------------------------

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
        rate = optim.largest_lr(optimizer)
        self._open.row["optimizer"] = facts["number"]
        if isinstance(rate, Tensor):  # on a GPU: it travels with the other numbers
            self._open.reading.add("lr", rate)
        else:
            self._open.row["lr"] = rate

    def _follow_direction(self, gradients: dict[str, Tensor]) -> None:
        if len({g.device for g in gradients.values()}) != 1:
            return
        now, names = measuring.sample(gradients.values()), list(gradients)
        if self._sampled_gradients is not None:
            when, before_names, before = self._sampled_gradients
            if when == self.step - 1 and before_names == names:
                rows, whole = measuring.cosines(before, now)
                self._open.reading.add("cosines", rows)
                self._open.reading.add("cosine", whole)
                self._open.row["cosine_names"] = names
        self._sampled_gradients = (self.step, names, now)

    def _moments(
        self, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
    ) -> list[tuple[str, str, Tensor]]:
        """Adam's m and v as rows to measure; the share of v that ε outweighs goes into the reading."""
        step, rows = self._open, []
        squares: dict[str, Tensor] = {}
        limits: list[float] = []
        for kind, parameter, moment, limit in optim.moments(optimizer, facts["steps"]):
            name, moment = self._parameters.name(parameter), measuring.local(moment)
            rows.append((kind, name, moment))
            if kind == "adam_v" and limit > 0:
                squares[name] = moment
                limits.append(limit)
        if len({v.device for v in squares.values()}) == 1:
            step.row["eps_names"] = list(squares)
            step.reading.add("eps_share", optim.share_below(list(squares.values()), limits))
        return rows

    @guarded
    @torch.no_grad()
    def _output_seen(self, kind: str, name: str, tensor: Tensor, made_by: str) -> None:
        step = self._open
        tensor = measuring.local(tensor)
        if step.depth < EVERYTHING or not tensor.numel():
            return
        facts = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:], "module": made_by}
        self.writer.add_tensor(kind, name, **facts)
        if kind == "output" and tensor.dim() >= 2 and tensor.shape[0] > 1:
            step.reading.add(f"dead {name}", measuring.dead_share(tensor))
        step.measure_soon(kind, name, tensor)

    # the turn of a step ------------------------------------------------------------------------------------

    def _close_step(self) -> None:
        step = self._open
        step.row.update(
            step=self.step,
            seconds=time.perf_counter() - self.began,
            epoch=self._epoch,
            batch=self._batch,
            backwards=step.order.count("b"),
            order="".join(step.order),
            depth=step.depth,
        )
        number = self.step
        self.step += 1
        self._batch += 1
        self._begin_step()
        self._ledger.add(step, number)
        self._afterwards.append(self._turn_tape)

    def _do_what_is_left(self) -> None:
        self._examining = True
        try:
            while self._afterwards:
                self._afterwards.pop(0)()
        finally:
            self._examining = False

    def _turn_tape(self) -> None:
        """The last step's tape is examined, the next one's begun."""
        if self.taping is not None and self.alive:
            self.taping.end()
            self.taping.begin(self.step, self._compiled)
            self._open.waits = self.taping.active
        if self.stop_after is not None and self.step >= self.stop_after:
            raise SystemExit(0)

    def _look_before_update(self, bad: bool) -> None:
        """The weights are as they were: what can be found out about a bad step now is found before it is written."""
        if self.taping is None:
            return
        asked_for = self._compiled and self.taping.only == self.step
        if asked_for or (bad and self._nonfinite_step == self.step):
            self._afterwards.append(functools.partial(self.taping.before_update, self._calls, bad))

    def _listen_to_calls(self) -> None:
        """Calls are kept where a bad step shows before its update: on a CPU, and at the one step that was asked for."""
        if self.taping is None or self._unseen or self._open.depth < LIGHT:
            self._calls.detach()
            return
        roots = list(self.names.roots.values())
        if len(roots) != len(self._on_cpu):
            self._on_cpu = [all(p.device.type == "cpu" for p in root.parameters()) for root in roots]
        if self.taping.only == self.step or (self._calls.steady and all(self._on_cpu)):
            self._calls.attach(roots)
        else:
            self._calls.detach()

    def _begin_step(self) -> None:
        self.own_seconds += 2 * self._calls.seconds  # PyTorch's hooks take as long again
        self._calls.seconds = 0.0
        if self.step > Purse.FIRST or self._strict:  # by default, what is measured in any case is not charged
            self.purse.pay(self._open.depth, self.own_seconds - self._paid)
        self._paid = self.own_seconds
        self._unseen = self._must_pass_over()
        self._open_step(BARE if self._unseen else self._choose_depth())

    def _open_step(self, depth: int) -> None:
        now = time.perf_counter()
        sampled = depth >= EVERYTHING and (
            self.step < Purse.FIRST or now - self._last_sampled > BETWEEN_SAMPLES
        )
        if sampled:
            self._last_sampled = now
        self._open = OpenStep(depth, sampled)
        self._calls.step_ended()
        self._listen_to_calls()
        if depth >= EVERYTHING and not self._compiled:
            self._outputs.attach()
        else:
            self._outputs.detach()

    def _must_pass_over(self) -> bool:
        """A step that even its own row would make too dear, under a budget that was asked for."""
        taped = self.taping is not None and self.taping.active
        if not self._strict or taped or self.step < Purse.FIRST:
            return False
        return self.purse.overdrawn(time.perf_counter() - self.began)

    def _pass_over(self, event: str) -> None:
        if event in ("after_update", "skipped") and not recomputing():
            self.step += 1
            self._batch += 1
            self._passed_over += 1
            self._unseen = self._must_pass_over()
            if not self._unseen:
                self._open_step(self._choose_depth())

    def _choose_depth(self) -> int:
        since = None if self._nonfinite_step is None else self.step - self._nonfinite_step
        now = Moment(self.step, self._epoch, self._batch, self.rank, since)
        wanted = max((rule.depth for rule in self._rules if rule.applies(now)), default=LIGHT)
        if since is not None and since < CLOSE_LOOK and not self._rules:
            return EVERYTHING
        if not self._limited:
            return wanted
        affordable = self.purse.choose(self.step, time.perf_counter() - self.began)
        return min(affordable, wanted) if self._rules else affordable

    def _saw_nonfinite(self) -> None:
        """Look closely from here on, at this step already."""
        if self._nonfinite_step is None:
            self._nonfinite_step = self.step
            self.writer.write_event("first_nonfinite", step=self.step)
            self._ledger.write_ring()
        if self.step - self._nonfinite_step < CLOSE_LOOK and not self._rules:
            self._open.depth = max(self._open.depth, PARAMETERS)

    def _row_written(self, row: dict[str, Any]) -> None:
        if "loss" in row:
            self.losses.append(row["loss"])
        broken = [key for key in ("loss", "grad_norm") if not math.isfinite(row.get(key, 0.0))]
        if broken and self._nonfinite_step is None and not row.get("skipped"):
            self._saw_nonfinite()
        if self.taping is not None:
            self.taping.trouble = self._trouble_is_brewing(row)
        if self._on_row is not None:
            self._on_row(row)

    def _trouble_is_brewing(self, row: dict[str, Any]) -> bool:
        """The loss or the gradient is far above what it was in the last steps: the next steps are worth a tape."""
        brewing = False
        for column, factor in (("loss", 4.0), ("grad_norm", 20.0)):
            value = row.get(column)
            if value is None:
                continue
            recent = self._recent.setdefault((row.get("optimizer"), column), deque(maxlen=20))
            usual = float(np.median(recent)) if len(recent) >= 5 else math.inf
            brewing |= not math.isfinite(value) or abs(value) > factor * abs(usual) + 1e-12
            if math.isfinite(value):
                recent.append(value)
        return brewing

    # the end -----------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Every optimizer that has stepped."""
        return self._parameters.optimizers

    def cost(self) -> dict[str, Any]:
        """What watching has cost, and what the budget left out."""
        wall = time.perf_counter() - self.began
        return {
            "own_seconds": round(self.own_seconds, 4),
            "wall_seconds": round(wall, 4),
            "share": round(self.own_seconds / wall, 5) if wall else 0.0,
            "steps": self.step,
            "experiment_seconds": round(self.taping.spent, 4) if self.taping else 0.0,
            "taped_steps": self.taping.taped if self.taping else 0,
            "bare_steps": self.purse.left_out,
            "unseen_steps": self._passed_over,
            "budget": self.purse.budget if self._limited else None,
        }

    def fail(self, error: Exception) -> None:
        """The one warning: gradproof broke, training goes on without it."""
        self.alive = False
        self.failure = f"{type(error).__name__}: {error}"
        self._outputs.detach()
        self._calls.detach()
        if self.taping is not None:
            self.taping.stop()
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (
            f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
        )
        self.writer.write_event("watching_failed", step=self.step, error=self.failure, place=place.strip())
        warn(
            f"gradproof stopped watching at step {self.step} ({self.failure}{place}); training goes on untouched",
            stacklevel=4,
        )

    def close(self) -> None:
        """The end of training, normal or not: what is still on its way is written."""
        self._outputs.detach()
        self._calls.detach()
        if os.getpid() != self.pid:
            return
        if self.taping is not None:
            self.taping.stop()
        self._close_guarded()
        self.alive = False
        self.writer.set_info(
            cost=self.cost(),
            events_seen=self.counts,
            facts={name: value for name, value in self.facts.items() if not name.startswith("_")},
            ended=time.time(),
            failure=self.failure,
        )
        self.writer.close()

    @guarded
    @torch.no_grad()
    def _close_guarded(self) -> None:
        self._ledger.settle(0)
        self._parameters.describe_end()
        self.lines.read_source(accumulates=self.counts["backward"] > 1.2 * self.step)


def _float(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else float(value)
