"""The right gradients of a loss: by autograd in float64, through PyTorch's NumPy layer, or by differences.

Also how far a right computation in fewer digits may be from them: the same operations with a rounding on each.
"""

from __future__ import annotations

import functools
import math
import os
import time
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradproof.check.culprit import Claim, scale_of
from gradproof.check.graph import Graph, Recorder, jitter
from gradproof.check.path import Backward
from gradproof.check.slip import Allowance
from gradproof.check.slope import Slope, measure_once
from gradproof.check.subject import Subject, describe, name_of
from gradproof.errors import UserError

DRAWS = 2
ROUNDINGS = 10  # times what one draw of roundings does
SECONDS = 20.0  # that differences entry by entry may take
FINEST = 2.0**-46  # relative: float64 results this near are the same


@dataclass(frozen=True)
class Truth:
    """A loss in float64, its right gradients, and what was computed on the way."""

    loss: float
    gradients: dict[str, Tensor]
    method: str
    graph: Graph | None = None  # None: measured by differences, nothing is known of the inside
    slots: Mapping[str, int] | None = None  # of the parameters
    loss_slot: int = -1
    activations: Mapping[str, int] | None = None  # names that the reference gave, in its order
    uncertainty: Mapping[str, float] | None = None  # of differences, at the worst entry
    notes: tuple[str, ...] = ()
    held: Mapping[int, Tensor] = field(
        default_factory=dict
    )  # gradients of slots that are taken as a program has them
    nearby: Callable[[float], dict[str, Tensor]] | None = None  # the gradients at weights that are so far off

    @cached_property
    def backward(self) -> Backward | None:
        """Gradients use by use; None where they do not add up to autograd's."""
        if self.graph is None or self.slots is None or self.graph.aliased:
            return None
        try:
            ones = torch.ones_like(self.graph.values[self.loss_slot])
            total, uses = self.graph.gradients({self.loss_slot: ones}, held=self.held)
        except (RuntimeError, TypeError, ValueError):  # an operation that cannot be repeated alone
            return None
        for name, slot in self.slots.items():
            right = self.gradients[name]
            found = total.get(slot, torch.zeros_like(right))
            if not bool((found - right).norm() <= 1e-8 * right.norm() + 1e-14):
                return None
        names = {slot: name for name, slot in self.slots.items()}
        names |= {slot: name for name, slot in (self.activations or {}).items()}
        return Backward(self.graph, total, uses, names, self.held)

    def allowances(self, eps: float) -> dict[str, Allowance]:
        """What rounding to `eps` may do to the gradient of each parameter."""
        if self.backward is None or self.slots is None:
            return {name: self._plain_allowance(name, eps) for name in self.gradients}
        of_gradients, _ = self.slot_allowances(eps)
        return {name: of_gradients[slot] for name, slot in self.slots.items()}

    def slot_allowances(self, eps: float) -> tuple[dict[int, Allowance], dict[int, Allowance]]:
        """The same for the gradient and for the value of every slot."""
        assert self.backward is not None and self.graph is not None
        if eps not in self._drawn:
            self._drawn[eps] = self._draw(eps, self.graph, self.backward)
        return self._drawn[eps]

    @cached_property
    def _drawn(self) -> dict[float, tuple[dict[int, Allowance], dict[int, Allowance]]]:
        return {}

    def _draw(
        self, eps: float, graph: Graph, backward: Backward
    ) -> tuple[dict[int, Allowance], dict[int, Allowance]]:
        drawn = max(eps, 2.0**-24)  # finer roundings drown in float64's own: scaled down from those
        share = max(eps, FINEST / 16) / drawn
        known = sorted(graph.roots.union(graph.makers))
        spread: dict[tuple[str, int], Allowance] = {}
        for seed in range(DRAWS if eps < 1e-4 else 3 * DRAWS):  # coarse roundings tip a softmax now and then
            generator = torch.Generator().manual_seed(100 + seed)
            twin = graph.rounded(drawn, seed)
            total, _ = twin.gradients(
                {self.loss_slot: torch.ones_like(twin.values[self.loss_slot])},
                round_=lambda x, summed, generator=generator: jitter(x, drawn, summed, generator),  # type: ignore[misc]
                held=self.held,
            )
            for slot in known:
                if slot in graph.live:
                    key = ("value", slot)
                    spread[key] = _wider(spread.get(key), _size_of(twin.values[slot] - graph.values[slot]))
                if slot in total and slot in backward.total:
                    key = ("gradient", slot)
                    spread[key] = _wider(spread.get(key), _size_of(total[slot] - backward.total[slot]))
        values = {slot: graph.values[slot] for slot in known if graph.values[slot].is_floating_point()}
        of_values = {s: _allow(spread.get(("value", s)), x, eps, share) for s, x in values.items()}
        none = torch.zeros(())
        of_gradients = {
            s: _allow(spread.get(("gradient", s)), backward.total.get(s, none), eps, share) for s in values
        }
        return of_gradients, of_values

    def _plain_allowance(self, name: str, eps: float) -> Allowance:
        right = self.gradients[name]
        size = 64 * max(eps, FINEST) * scale_of(right) if right.any() else 0.0
        bar = (self.uncertainty or {}).get(name, 0.0)
        if self.nearby is not None:
            bar += 2 * ROUNDINGS * float((self.nearby(max(eps, FINEST))[name] - right).abs().max())
        entries = math.sqrt(max(right.numel(), 1))
        return Allowance(16 * size + bar, (size + bar) * entries + 1e-300)


def _size_of(x: Tensor) -> Allowance:
    """Its largest entry and its norm; what is not finite says nothing."""
    if not x.numel():
        return Allowance(0.0, 0.0)
    norm = float(torch.linalg.vector_norm(x))
    if not math.isfinite(norm):
        x = x.nan_to_num(0.0, 0.0, 0.0)
        norm = float(torch.linalg.vector_norm(x))
    return Allowance(float(torch.linalg.vector_norm(x, math.inf)), norm)


def _allow(spread: Allowance | None, right: Tensor, eps: float, share: float) -> Allowance:
    spread, own = spread or Allowance(0.0, 0.0), _size_of(right)
    floor = 4 * max(eps, FINEST / 4)
    return Allowance(
        ROUNDINGS * share * spread.largest + floor * own.largest + 1e-300,
        ROUNDINGS * share * spread.norm + floor * own.norm + 1e-300,
    )


def _wider(first: Allowance | None, second: Allowance) -> Allowance:
    if first is None:
        return second
    return Allowance(max(first.largest, second.largest), max(first.norm, second.norm))


def to_tensor(x: Any) -> Any:
    """Arrays and numbers as tensors; floating-point ones stay in their precision."""
    if isinstance(x, numpy.ndarray | numpy.generic):
        return torch.from_numpy(numpy.array(x))
    return x.detach() if isinstance(x, Tensor) else x


def wide(x: Any) -> Any:
    """A tensor in float64, or in int64 where it is of integers."""
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():
        return x.detach().to(torch.float64, copy=True)
    return x.detach().clone() if x.dtype == torch.bool else x.detach().to(torch.int64, copy=True)


# ---- torch


def differentiate(
    loss: Callable, weights: Mapping[str, Tensor], batch: Any, named: str | None = None
) -> Truth:
    """`loss(weights, batch)` in float64, recorded; it may return the loss, or (loss, activations by name)."""
    name = named or name_of(loss)
    leaves = {key: wide(x).requires_grad_(x.is_floating_point()) for key, x in weights.items()}
    data = tree_map(wide, tree_map(to_tensor, batch))
    plain, _ = _outcome(_called(loss, leaves, data, name), name)
    recorder = Recorder()
    for x in leaves.values():
        recorder.name_slot(x)
    with recorder:
        result = _called(loss, leaves, data, name)
    value, activations = _outcome(result, name)
    _refuse_chance(float(plain.detach()), float(value.detach()), name)
    truth = _truth_of(recorder, leaves, value, activations, name, "autograd in float64")

    @functools.cache
    def nearby(eps: float) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        keys = list(truth.gradients)
        away = {k: jitter(leaves[k].detach(), 4 * eps, 1, generator).requires_grad_() for k in keys}
        value, _ = _outcome(_called(loss, leaves | away, data, name), name)
        found = torch.autograd.grad(value, [away[k] for k in keys], allow_unused=True)
        return {k: truth.gradients[k] if g is None else g for k, g in zip(keys, found, strict=True)}

    return replace(truth, nearby=nearby)


def _truth_of(
    recorder: Recorder,
    leaves: Mapping[str, Tensor],
    value: Tensor,
    activations: Mapping[str, Tensor],
    name: str,
    method: str,
) -> Truth:
    if not math.isfinite(float(value.detach())):
        raise UserError(
            f"{name} itself gives a loss of {float(value.detach())} from these weights and this batch: "
            "check it there before anything is held against it"
        )
    if not value.requires_grad:
        raise UserError(
            f"the loss that {name} returned is not connected to its weights: look for detach(), .data, .item(), "
            "torch.no_grad() or weights of its own"
        )
    asked = {key: x for key, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(value, list(asked.values()), allow_unused=True)
    gradients = {
        key: torch.zeros_like(x, requires_grad=False) if g is None else g.detach()
        for (key, x), g in zip(asked.items(), found, strict=True)
    }
    slots = {key: recorder.name_slot(x) for key, x in asked.items()}
    named = {}
    for key, x in activations.items():
        slot = recorder.slot_of(x)
        named[key] = slot if slot is not None else recorder.name_slot(x)
    loss_slot = recorder.name_slot(value)
    recorder.trim([loss_slot, *named.values()], slots.values())
    return Truth(float(value.detach()), gradients, method, recorder.graph, slots, loss_slot, named)


def _called(loss: Callable, weights: Any, batch: Any, name: str) -> Any:
    try:
        return loss(weights, batch)
    except UserError:
        raise
    except KeyError as error:
        have = ", ".join(list(weights)[:8]) if isinstance(weights, Mapping) else ""
        data = ", ".join(list(batch)[:8]) if isinstance(batch, Mapping) else ""
        raise UserError(
            f"{name} asks for {error.args[0]!r}{_where(error)}, which is not there; weights: {have or 'none'}"
            + (f"; batch: {data}" if data else "")
        ) from error
    except Exception as error:
        raise UserError(f"{name} raised {type(error).__name__}{_where(error)}: {error}") from error


def _where(error: BaseException) -> str:
    """The line of the reference that raised, not of a library below it."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [f for f in frames if "site-packages" not in f[0] and "/gradproof/" not in f[0] and f[0][0] != "<"]
    return f" at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _outcome(result: Any, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    value, activations = result, {}
    if isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping):
        value, activations = result[0], dict(result[1])
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise UserError(
            f"{name} returned {describe(result)}; return the loss as one number (a tensor), or (loss, activations)"
        )
    strange = next((k for k, x in activations.items() if not isinstance(x, Tensor)), None)
    if strange is not None:
        raise UserError(
            f"{name} returned {describe(activations[strange])} as activation {strange!r}, not a tensor"
        )
    return value, activations


def _refuse_chance(first: float, second: float, name: str) -> None:
    if first == second or not (math.isfinite(first) and math.isfinite(second)):
        return
    if not abs(first - second) <= 1e-6 * max(abs(first), abs(second)):
        raise UserError(
            f"{name} is random: two calls with the same weights and batch gave {first:.6g} and {second:.6g}; "
            "switch dropout off, or set the seed inside it"
        )


# ---- NumPy


def differentiate_numpy(loss: Callable, arrays: Mapping[str, numpy.ndarray], batch: Any) -> Truth:
    """Through PyTorch's own NumPy layer where that gives the same loss and slope, else by differences."""
    name = name_of(loss)
    values = {k: numpy.asarray(x, dtype=numpy.float64) for k, x in arrays.items()}
    data = tree_map(_wide_array, batch)

    def call(values: Mapping[str, numpy.ndarray]) -> float:
        result = _called(loss, {k: v.copy() for k, v in values.items()}, data, name)
        result = result[0] if isinstance(result, tuple) and len(result) == 2 else result
        if not isinstance(result, float | int | numpy.generic | numpy.ndarray) or numpy.size(result) != 1:
            raise UserError(f"{name} returned {describe(result)}; return the loss as one number")
        return float(numpy.asarray(result).reshape(()))

    plain = call(values)
    _refuse_chance(plain, call(values), name)
    if not math.isfinite(plain):
        raise UserError(f"{name} itself gives a loss of {plain} from these parameters and this batch")
    found = _through_torch(loss, values, data, name)
    if found is not None and _slopes_agree(found, values, call, plain):
        return found
    return _by_differences(call, values, plain, name)


def _wide_array(x: Any) -> Any:
    if isinstance(x, numpy.ndarray) and x.dtype.kind == "f":
        return x.astype(numpy.float64)
    return x


def _through_torch(
    loss: Callable, values: Mapping[str, numpy.ndarray], batch: Any, name: str
) -> Truth | None:
    import torch._numpy as torch_numpy

    translated = _translated(loss, torch_numpy)
    if translated is None:
        return None
    leaves = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in values.items()}
    recorder = Recorder()
    for x in leaves.values():
        recorder.name_slot(x)
    try:
        with warnings.catch_warnings(), recorder:
            warnings.simplefilter("ignore")
            data = tree_map(
                lambda x: (
                    torch_numpy.asarray(torch.from_numpy(x.copy())) if isinstance(x, numpy.ndarray) else x
                ),
                batch,
            )
            result = translated({k: torch_numpy.asarray(x) for k, x in leaves.items()}, data)
            result = result[0] if isinstance(result, tuple) and len(result) == 2 else result
            value = result.tensor
        return _truth_of(recorder, leaves, value, {}, name, "PyTorch's NumPy layer in float64")
    except Exception:  # whatever the layer cannot do, differences can
        return None


def _translated(loss: Callable, torch_numpy: Any) -> Callable | None:
    """The same function with `numpy` read as PyTorch's layer, and the user's own functions and modules likewise."""
    if not isinstance(loss, types.FunctionType):
        return None
    worlds: dict[int, dict[str, Any]] = {}
    cells = {}

    def world_of(home: dict[str, Any]) -> dict[str, Any]:
        if id(home) not in worlds:
            worlds[id(home)] = world = {}
            for key, value in list(home.items()):
                try:
                    world[key] = translate(value)
                except Exception:  # a cell that is empty still, an array of a dtype that torch has not
                    world[key] = value
        return worlds[id(home)]

    def translate(x: Any) -> Any:
        if x is numpy:
            return torch_numpy
        if isinstance(x, types.FunctionType) and _is_users(x.__code__.co_filename):
            closure = tuple(cell(c) for c in x.__closure__ or ())
            world = world_of(x.__globals__)
            twin = types.FunctionType(x.__code__, world, x.__name__, x.__defaults__, closure)
            twin.__kwdefaults__ = x.__kwdefaults__
            return twin
        if isinstance(x, types.ModuleType) and _is_users(getattr(x, "__file__", None) or ""):
            twin_module = types.ModuleType(x.__name__)
            twin_module.__dict__.update(world_of(vars(x)))
            return twin_module
        if isinstance(x, numpy.ndarray):
            return torch_numpy.asarray(torch.from_numpy(x.copy()))
        if getattr(x, "__module__", "") == "numpy" and hasattr(torch_numpy, getattr(x, "__name__", "")):
            return getattr(torch_numpy, x.__name__)  # from numpy import exp
        return x

    def cell(c: types.CellType) -> types.CellType:
        if id(c) not in cells:
            cells[id(c)] = types.CellType()
            cells[id(c)].cell_contents = translate(c.cell_contents)
        return cells[id(c)]

    try:
        return translate(loss)
    except Exception:
        return None


def _is_users(file: str) -> bool:
    """Of no library, and not of Python itself."""
    installed = "/site-packages/" in file or file.startswith((os.path.dirname(os.__file__), "<frozen"))
    return bool(file) and not installed and f"{os.sep}gradproof{os.sep}check{os.sep}" not in file


def _slopes_agree(
    truth: Truth, values: Mapping[str, numpy.ndarray], call: Callable[[Mapping], float], plain: float
) -> bool:
    """Whether the layer's loss and its gradient along two lines are those of the code as it stands."""
    if not abs(truth.loss - plain) <= 1e-9 * max(abs(plain), 1e-9):
        return False
    rng = numpy.random.default_rng(0)
    for _ in range(2):
        line = {k: rng.standard_normal(v.shape) * scale_of(torch.from_numpy(v)) for k, v in values.items()}
        claimed = sum(float((truth.gradients[k].numpy() * v).sum()) for k, v in line.items())
        scale = math.sqrt(sum(float(((truth.gradients[k].numpy() * v) ** 2).sum()) for k, v in line.items()))
        errors = []
        for step in (1e-4, 1e-5, 1e-6):  # the finer ones step over kinks
            high, low = (call({k: values[k] + s * step * line[k] for k in values}) for s in (1, -1))
            errors.append(abs((high - low) / (2 * step) - claimed))
        if not min(errors) <= 1e-4 * scale + 1e-9 * abs(plain):
            return False
    return True


def _by_differences(
    call: Callable[[Mapping], float],
    values: Mapping[str, numpy.ndarray],
    plain: float,
    name: str,
) -> Truth:
    """Entry by entry where that can be afforded; a parameter of more entries is left out, and said so."""
    keys = list(values)
    point = tuple(torch.from_numpy(values[k].copy()) for k in keys)

    def outputs(tensors: Any) -> list[Tensor]:
        if tensors[0].is_complex():
            raise TypeError("no complex step")
        return [
            torch.tensor(
                call({k: x.numpy() for k, x in zip(keys, tensors, strict=True)}), dtype=torch.float64
            )
        ]

    start = time.perf_counter()
    outputs(point)
    each = time.perf_counter() - start
    subject = Subject(name, tuple(keys), point, outputs, lambda *_: [None] * len(point))
    zeros = tuple(torch.zeros_like(x) for x in point)
    claim = Claim(subject, point, (torch.ones((), dtype=torch.float64),), zeros)
    gradients, bars, notes = {}, {}, []
    left = SECONDS
    for which in sorted(range(len(keys)), key=lambda k: point[k].numel()):
        cost = 6 * each * point[which].numel()
        if cost > left:
            notes.append(
                f"{keys[which]} has {point[which].numel()} entries, too many for differences one by one"
            )
            continue
        left -= cost
        rough = _rough_gradient(claim, which)  # what the careful one is measured against
        claim = replace(claim, gradients=(*zeros[:which], rough, *zeros[which + 1 :]))
        gradients[keys[which]], bars[keys[which]] = _entry_by_entry(claim, which)
    ordered = {k: gradients[k] for k in keys if k in gradients}
    return Truth(plain, ordered, "differences", uncertainty=bars, notes=tuple(notes))


def _rough_gradient(claim: Claim, which: int) -> Tensor:
    x = claim.point[which]
    step = 1e-4 * scale_of(x)
    found = torch.zeros(x.numel(), dtype=torch.float64)
    for k in range(x.numel()):
        ends = []
        for sign in (1, -1):
            moved = x.clone()
            moved.view(-1)[k] += sign * step
            ends.append(
                float(claim.subject.outputs((*claim.point[:which], moved, *claim.point[which + 1 :]))[0])
            )
        found[k] = (ends[0] - ends[1]) / (2 * step)
    return found.nan_to_num(0.0, 0.0, 0.0).reshape(x.shape)


def _entry_by_entry(claim: Claim, which: int) -> tuple[Tensor, float]:
    x = claim.point[which]
    scale = scale_of(x)
    floor = 1e-6 * claim.natural(which) * scale
    slopes: list[Slope] = []
    for place in torch.ones(x.shape).nonzero().tolist():
        direction = torch.zeros_like(x)
        direction[tuple(place)] = scale
        slopes.append(measure_once(claim.line(which, direction), floor))
    truth = torch.tensor([(s.claimed + s.excess) / scale for s in slopes], dtype=torch.float64).reshape(
        x.shape
    )
    bar = max((4 * s.uncertainty / scale for s in slopes), default=0.0)
    return truth, bar
