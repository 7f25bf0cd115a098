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
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradproof.probes import optimizer as optim
from gradproof.probes import tensors as measuring
from gradproof.probes.modules import OutputProbe, recomputing
from gradproof.probes.names import Names, find_variable, user_frames
from gradproof.probes.reading import Reading
from gradproof.probes.schedule import BARE, EVERYTHING, LIGHT, PARAMETERS, Moment, Purse, Rule
from gradproof.record.schema import DISTRIBUTION_FRAME, STATISTICS, STATISTICS_FRAME
from gradproof.record.writer import RunWriter

CLOSE_LOOK = 5  # steps measured whole after the first non-finite value
RING = 32  # light steps whose per-tensor norms are kept in case of trouble
MOST_IN_FLIGHT = 8  # steps whose numbers may still be on their way from a GPU


def guarded(method: Callable) -> Callable:
    """An event handler: never raises into training, is timed, does nothing in a forked worker."""

    @functools.wraps(method)
    def handler(self: Session, *args: Any) -> Any:
        if not self.alive or os.getpid() != self.pid:
            return None
        start = time.perf_counter()
        try:
            with torch.no_grad():
                return method(self, *args)
        except Exception as error:
            self.fail(error)
            return None
        finally:
            self.own_seconds += time.perf_counter() - start

    return handler


class OpenStep:
    """What has been gathered since the last step ended."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.order: list[str] = []
        self.row: dict[str, Any] = {}
        self.losses = 0
        self.rows: list[tuple[str, str]] = []  # (kind, name) of each measured tensor, in order
        self.norms: list[str] = []
        self.reading = Reading()
        self.own_before = 0.0

    def measure(self, kind: str, named: dict[str, Tensor], with_samples: bool) -> None:
        """Statistics of tensors into the step's reading: one call of the kernel for each device."""
        for group in measuring.group_by_device(named).values():
            start = len(self.rows)
            self.rows += [(kind, name) for name in group]
            self.reading.add(f"stats {start}", measuring.measure(list(group.values())))
            if with_samples:
                self.reading.add(f"sample {start}", measuring.sample(group.values()))


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
    ) -> None:
        self.writer = writer
        self.names = names
        self.rank = rank
        self.pid = os.getpid()
        self.alive = True
        self.failure: str | None = None
        self.own_seconds = 0.0
        self.began = time.perf_counter()
        self.purse = Purse(0.02 if budget is None else budget)
        self.compiled = False
        self.step = 0
        self.counts = {"backward": 0, "zero_grad": 0, "clip": 0, "scheduler": 0, "skipped": 0}
        self._rules = rules
        self._limited = budget is not None or not rules
        self._on_row = on_row
        self._epoch, self._batch = 0, 0
        self._nonfinite_step: int | None = None
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._copies: dict[int, optim.WeightCopy] = {}
        self._with_gradient: set[str] = set()
        self._start_values: dict[str, np.ndarray] = {}
        self._unscaled: dict[int, Tensor] = {}
        self._sampled_gradients: tuple[int, list[str], Tensor] | None = None
        self._ring: deque[tuple[int, list[str], np.ndarray]] = deque(maxlen=RING)
        self._in_flight: deque[tuple[OpenStep, int]] = deque()
        self._inside_backward = False
        self._outputs = OutputProbe(names, self._collect_output)
        self._open = OpenStep(EVERYTHING)
        self._begin_step()

    # events ------------------------------------------------------------------------------------------------

    @guarded
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters can be named, and the very first forward measured, only if the model is known by then."""
        self.names.learn(optim.parameters_of(optimizer))

    @guarded
    def epoch_begins(self) -> None:
        if self._batch:  # a loader that is only looked at does not count
            self._epoch, self._batch = self._epoch + 1, 0

    @guarded
    def zero_grad(self) -> None:
        self.counts["zero_grad"] += 1
        self._open.order.append("z")

    @guarded
    def scaled(self, unscaled: Tensor, scaled: Tensor, scale: float | None) -> None:
        self._unscaled[id(scaled)] = unscaled
        self._open.row["loss_scale"] = scale

    @guarded
    def backward_begins(self, tensors: list[Tensor], gradients: list[Tensor | None]) -> None:
        self.counts["backward"] += 1
        self._inside_backward = True
        step = self._open
        if not step.order and self._stale_gradients():
            step.order.append("g")
        step.order.append("b")
        for tensor, gradient in zip(tensors, gradients, strict=True):
            loss = self._unscaled.pop(id(tensor), tensor).detach()
            if not measuring.is_measurable(loss):
                continue
            if loss.numel() != 1:
                loss = (loss * gradient).sum() if gradient is not None else loss.sum()
            step.reading.add(f"loss {step.losses}", loss.real if loss.is_complex() else loss)
            step.losses += 1
            if loss.device.type == "cpu" and not bool(torch.isfinite(loss)):
                self._saw_nonfinite()
        self._unscaled.clear()

    @guarded
    def backward_ends(self) -> None:
        self._inside_backward = False
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
    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are as the optimizer will use them; the weights are still the old ones."""
        step = self._open
        facts = self._facts(optimizer)
        facts["steps"] += 1
        named = {self._name(p): p for p in optim.parameters_of(optimizer) if p.grad is not None}
        gradients = {
            name: measuring.local(p.grad.coalesce() if p.grad.is_sparse else p.grad)
            for name, p in named.items()
            if p.grad is not None and measuring.is_measurable(p.grad)
        }
        if gradients and step.depth >= LIGHT:
            self._measure_norms(gradients, getattr(optimizer, "grad_scale", None))
        if gradients and step.depth >= PARAMETERS:
            step.measure("gradient", gradients, with_samples=step.depth >= EVERYTHING)
            self._follow_direction(gradients)
            self._copies.setdefault(id(optimizer), optim.WeightCopy()).take(list(named.values()))
        facts["named"] = named
        if not self._with_gradient.issuperset(named):
            self._with_gradient.update(named)
            self._describe_parameters()

    @guarded
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        step = self._open
        facts = self._facts(optimizer)
        named: dict[str, Tensor] = facts.pop("named", {})
        step.order.append("s")
        step.row.update(optimizer=facts["number"], lr=optim.largest_lr(optimizer))
        if named and step.depth >= PARAMETERS and id(optimizer) in self._copies:
            weights = {name: measuring.local(p) for name, p in named.items()}
            updates = self._copies[id(optimizer)].negative_updates(list(named.values()))
            sampling = step.depth >= EVERYTHING
            step.measure("weight", weights, with_samples=sampling)
            step.measure("update", dict(zip(named, updates, strict=True)), with_samples=sampling)
            self._measure_moments(optimizer, facts)
        if recomputing():  # the optimizer steps inside backward: one step is all of these together
            step.row["inside_backward"] = True
        else:
            self._close_step()

    @guarded
    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler found inf: the optimizer's own hooks never fire, and this is the step that matters."""
        self.counts["skipped"] += 1
        step = self._open
        gradients = {
            self._name(p): measuring.local(p.grad)
            for p in optim.parameters_of(optimizer)
            if p.grad is not None and measuring.is_measurable(p.grad)
        }
        if gradients:
            self._measure_norms(gradients, None)
        step.order.append("x")
        facts = self._facts(optimizer)
        step.row.update(optimizer=facts["number"], lr=optim.largest_lr(optimizer), skipped=1)
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
    def tensors(self, kind: str, named: dict[str, Any]) -> None:
        """Tensors by hand: torch tensors, NumPy arrays, anything that torch.as_tensor takes."""
        self._open.measure(kind, {n: measuring.local(torch.as_tensor(t)) for n, t in named.items()}, True)

    def _stale_gradients(self) -> bool:
        """Whether gradients that an optimizer has used already are still there, and not zero."""
        used = [p for facts in self._optimizers.values() for p in optim.parameters_of(facts["object"])[:8]]
        held = [p.grad for p in used if p.grad is not None]
        # on a GPU a value cannot be read without waiting: there, being there is all that is asked
        return any(g.device.type != "cpu" or bool((measuring.local(g) != 0).any()) for g in held)

    # what a step measures ----------------------------------------------------------------------------------

    def _measure_norms(self, gradients: dict[str, Tensor], grad_scale: Tensor | None) -> None:
        step = self._open
        for group in measuring.group_by_device(gradients).values():
            squares = measuring.square_sums(list(group.values()))
            if grad_scale is not None:  # a fused optimizer unscales inside its own step
                squares = squares / grad_scale.double() ** 2
            step.reading.add(f"squares {len(step.norms)}", squares)
            step.norms += group
            if squares.device.type == "cpu" and not bool(torch.isfinite(squares.sum())):
                self._saw_nonfinite()

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

    def _measure_moments(self, optimizer: torch.optim.Optimizer, facts: dict[str, Any]) -> None:
        step = self._open
        found: dict[str, dict[str, Tensor]] = {"adam_m": {}, "adam_v": {}}
        for kind, parameter, moment, eps in optim.moments(optimizer):
            name = self._name(parameter)
            found[kind][name] = measuring.local(moment)
            if kind == "adam_v" and eps and step.depth >= EVERYTHING:
                beta2 = optimizer.param_groups[0].get("betas", (0, 0))[1]
                share = optim.epsilon_share(moment, eps, float(beta2), facts["steps"])
                step.reading.add(f"eps_share {name}", share)
        for kind, named in found.items():
            if named:
                step.measure(kind, named, with_samples=False)

    def _collect_output(self, kind: str, name: str, tensor: Tensor, made_by: str) -> None:
        self._collect_guarded(kind, name, tensor, made_by)

    @guarded
    def _collect_guarded(self, kind: str, name: str, tensor: Tensor, made_by: str) -> None:
        step = self._open
        tensor = measuring.local(tensor)
        if step.depth < EVERYTHING or not tensor.numel():
            return
        facts = {"shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:], "module": made_by}
        self.writer.add_tensor(kind, name, **facts)
        if kind == "output" and tensor.dim() >= 2 and tensor.shape[0] > 1:
            step.reading.add(f"dead {name}", measuring.dead_share(tensor))
        step.measure(kind, {name: tensor}, with_samples=True)

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
        step.reading.send()
        self._in_flight.append((step, self.step))
        self.step += 1
        self._batch += 1
        self._begin_step()
        self._settle(MOST_IN_FLIGHT)

    def _begin_step(self) -> None:
        self.purse.pay(self._open.depth, self.own_seconds - self._open.own_before)
        depth = self._choose_depth()
        self._open = OpenStep(depth)
        self._open.own_before = self.own_seconds
        if depth >= EVERYTHING and not self.compiled:
            self._outputs.attach()
        else:
            self._outputs.detach()

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
            for step, names, norms in self._ring:  # how it got there
                self._write_norms(step, names, norms)
        if self.step - self._nonfinite_step < CLOSE_LOOK and not self._rules:
            self._open.depth = max(self._open.depth, PARAMETERS)

    def _settle(self, most_in_flight: int) -> None:
        """Write the steps whose numbers have arrived."""
        while self._in_flight:
            step, number = self._in_flight[0]
            if len(self._in_flight) <= most_in_flight and not step.reading.ready():
                return
            self._in_flight.popleft()
            self._write(step, number, step.reading.get())

    def _write(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        row = step.row
        if step.losses:
            row["loss"] = float(sum(found[f"loss {i}"].sum() for i in range(step.losses)))
        for key in ("norm_before_clip", "cosine"):
            if key in found:
                row[key] = float(found[key].sum())
        squares = [values for key, values in found.items() if key.startswith("squares ")]
        if squares:
            norms = np.sqrt(np.concatenate(squares))
            row["grad_norm"] = float(np.sqrt(np.square(norms).sum()))
            self._ring.append((number, step.norms, norms))
        if step.rows:
            self._write_statistics(step, number, found)
        self.writer.write_step(row)
        broken = [key for key in ("loss", "grad_norm") if not math.isfinite(row.get(key, 0.0))]
        if broken and self._nonfinite_step is None:
            self._saw_nonfinite()
        if self._on_row is not None:
            self._on_row(row)

    def _write_statistics(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        raw = np.concatenate([found[f"stats {i}"] for i in _starts(found, "stats ")])
        order: dict[tuple[str, str], list[int]] = {}
        for index, key in enumerate(step.rows):
            order.setdefault(key, []).append(index)
        raw = np.stack([measuring.merge_calls(raw[places]) for places in order.values()])
        kinds = np.array([kind for kind, _ in order])
        raw[kinds == "update"] = measuring.turn_sign(raw[kinds == "update"])
        rows = measuring.to_statistics(raw)
        cosines = dict(zip(step.row.pop("cosine_names", ()), found.get("cosines", ()), strict=False))
        for index, (kind, name) in enumerate(order):
            if kind == "gradient" and name in cosines:
                rows[index, STATISTICS.index("cosine")] = cosines[name]
            elif kind == "adam_v" and f"eps_share {name}" in found:
                rows[index, STATISTICS.index("eps_share")] = found[f"eps_share {name}"].sum()
            elif kind == "output" and f"dead {name}" in found:
                rows[index, STATISTICS.index("dead")] = found[f"dead {name}"].sum()
        for kind, column in (("weight", "weight_norm"), ("update", "update_norm")):
            if (kinds == kind).any():
                step.row[column] = measuring.whole_norm(raw[kinds == kind])
        numbers = np.array([self.writer.add_tensor(kind, name) for kind, name in order])
        self.writer.write_frame(STATISTICS_FRAME, number, numbers, rows)
        self._write_distributions(step, number, found)

    def _write_distributions(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        rows: dict[int, np.ndarray] = {}
        for start in _starts(found, "sample "):
            samples = found[f"sample {start}"]
            for index, values in enumerate(measuring.distributions(samples)):
                kind, name = step.rows[start + index]
                rows.setdefault(self.writer.add_tensor(kind, name), values)  # the first call stands for all
        if rows:
            self.writer.write_frame(DISTRIBUTION_FRAME, number, np.array(list(rows)), np.stack(list(rows.values())))

    def _write_norms(self, number: int, names: list[str], norms: np.ndarray) -> None:
        rows = np.full((len(names), len(STATISTICS)), np.nan)
        rows[:, STATISTICS.index("norm")] = norms
        numbers = np.array([self.writer.add_tensor("gradient", name) for name in names])
        self.writer.write_frame(STATISTICS_FRAME, number, numbers, rows)

    # what is known about the whole -------------------------------------------------------------------------

    def _name(self, parameter: Tensor) -> str:
        name = self.names.of_parameter(parameter)
        if name is None:
            self.names.learn([parameter])
            name = self.names.of_parameter(parameter)
        return name or "?"

    def _facts(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        facts = self._optimizers.get(id(optimizer))
        if facts is None:
            self.names.learn(optim.parameters_of(optimizer))
            label = find_variable(optimizer, user_frames()) or type(optimizer).__name__
            number = len(self._optimizers)
            facts = {"number": number, "name": label, "steps": 0, "object": optimizer}
            self._optimizers[id(optimizer)] = facts  # "object" keeps the id taken
            described = [
                {"name": f["name"], **optim.describe(f["object"])} for f in self._optimizers.values()
            ]
            self.writer.set_info(optimizers=described)
            self._describe_parameters()
        return facts

    def _describe_parameters(self, changed: dict[str, bool] | None = None) -> None:
        """Every trainable parameter: who trains it, whether a gradient ever came, whether it moved."""
        owner = {
            self._name(p): facts["number"]
            for facts in self._optimizers.values()
            for p in optim.parameters_of(facts["object"])
        }
        known = dict(self.names.trainable())
        for facts in self._optimizers.values():
            known.update({self._name(p): p for p in optim.parameters_of(facts["object"])})
        fresh = {n: measuring.local(p) for n, p in known.items() if n not in self._start_values}
        for name, values in zip(fresh, _fingerprints(list(fresh.values())), strict=True):
            self._start_values[name] = values
        self.writer.set_info(
            parameters=[
                {
                    "name": name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype)[6:],
                    "trainable": p.requires_grad,
                    "optimizer": owner.get(name),
                    "gradient": name in self._with_gradient,
                    **({"changed": changed[name]} if changed else {}),
                }
                for name, p in known.items()
            ]
        )
        self._known = known

    def _which_changed(self) -> dict[str, bool]:
        known = getattr(self, "_known", {})
        now = _fingerprints([measuring.local(p) for p in known.values()])
        return {
            name: not np.array_equal(self._start_values[name], values, equal_nan=True)
            for name, values in zip(known, now, strict=True)
        }

    def cost(self) -> dict[str, Any]:
        """What watching has cost, and what the budget left out."""
        wall = time.perf_counter() - self.began
        return {
            "own_seconds": round(self.own_seconds, 4),
            "wall_seconds": round(wall, 4),
            "share": round(self.own_seconds / wall, 5) if wall else 0.0,
            "steps": self.step,
            "bare_steps": self.purse.left_out,
            "budget": self.purse.budget if self._limited else None,
        }

    def fail(self, error: Exception) -> None:
        """The one warning: gradproof broke, training goes on without it."""
        self.alive = False
        self.failure = f"{type(error).__name__}: {error}"
        self._outputs.detach()
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""
        self.writer.write_event("watching_failed", step=self.step, error=self.failure, place=place.strip())
        warnings.warn(
            f"gradproof stopped watching at step {self.step} ({self.failure}{place}); training goes on untouched",
            stacklevel=4,
        )

    def close(self) -> None:
        """The end of training, normal or not: what is still on its way is written."""
        self._outputs.detach()
        if os.getpid() != self.pid:
            return
        self._close_guarded()
        self.alive = False
        self.writer.set_info(cost=self.cost(), events_seen=self.counts, ended=time.time(), failure=self.failure)
        self.writer.close()

    @guarded
    def _close_guarded(self) -> None:
        self._settle(0)
        if self._optimizers:
            self._describe_parameters(self._which_changed())


def _starts(found: dict[str, np.ndarray], prefix: str) -> list[int]:
    return sorted(int(key[len(prefix) :]) for key in found if key.startswith(prefix))


def _fingerprints(tensors: list[Tensor]) -> list[np.ndarray]:
    """Statistics that change when a tensor changes (this waits for the device: twice in a run)."""
    out: list[np.ndarray] = [np.empty(0)] * len(tensors)
    keyed = {str(index): tensor for index, tensor in enumerate(tensors)}
    for group in measuring.group_by_device(keyed).values():
        for key, row in zip(group, measuring.measure(list(group.values())).cpu().numpy(), strict=True):
            out[int(key)] = row
    return out


def _float(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else float(value)
