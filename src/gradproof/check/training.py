"""Gradients by hand against the loss they are meant to be the gradients of: a table, and the pattern in words."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from gradproof.check.path import find_step
from gradproof.check.slip import Allowance, Case, Size, describe_slip, other_relation
from gradproof.check.subject import name_of
from gradproof.check.truth import Truth, differentiate, differentiate_numpy, to_tensor
from gradproof.errors import UserError

SECONDS = 4.0  # of its own thread, that looking for the steps of backward behind wrong gradients may take
SHORT = 60  # characters of a pattern that stand in a table; a longer one stands above it


@dataclass(frozen=True)
class GradientLine:
    """One parameter's gradient by hand beside the right one."""

    parameter: str
    ratio: float | None  # |hand| / |true|
    cosine: float | None
    verdict: str  # right, wrong, follows, unknown
    pattern: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        ratio = "–" if self.ratio is None else f"{self.ratio:.4g}"
        cosine = "–" if self.cosine is None else f"{self.cosine:+.4f}"
        short = self.pattern if len(self.pattern) <= SHORT else self.pattern.partition(":")[0]
        return self.parameter, ratio, cosine, self.verdict, short


@dataclass(frozen=True)
class TrainingCheck:
    """The gradients of one step by hand, parameter by parameter."""

    loss: float
    lines: tuple[GradientLine, ...]
    first: str | None  # the wrong one that backward comes to first
    method: str
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return all(line.verdict == "right" for line in self.lines)

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(line.parameter for line in self.lines if line.verdict in ("wrong", "follows"))

    def __getitem__(self, parameter: str) -> GradientLine:
        return next(line for line in self.lines if line.parameter == parameter)

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += say_patterns([(x.parameter, x.pattern) for x in self.lines], self.first)
        lines += table(
            ("parameter", "|hand|/|true|", "cosine", "verdict", "pattern"), [x.cells for x in self.lines]
        )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _headline(self) -> str:
        wrong = len(self.wrong)
        if not wrong:
            unknown = sum(line.verdict == "unknown" for line in self.lines)
            rest = f"; {unknown} could not be judged" if unknown else ""
            return f"gradients of {len(self.lines)} parameters are right (against {self.method}){rest}"
        assert self.first is not None
        return (
            f"{wrong} of {len(self.lines)} gradients are wrong (against {self.method}); the first that backward "
            f"comes to is that of {self.first}"
        )

    def as_json(self) -> str:
        return json.dumps(finite(asdict(self)), indent=2)


def say_patterns(named: Sequence[tuple[str, str]], first: str | None) -> list[str]:
    """The first one's pattern, and those too long for the table, each once."""
    owners: dict[str, list[str]] = {}
    for name, pattern in sorted(named, key=lambda pair: pair[0] != first):
        if name == first or len(pattern) > SHORT or pattern in owners:
            owners.setdefault(pattern, []).append(name)
    return [f"  {_listed(names)}: {pattern}" for pattern, names in owners.items() if pattern]


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return ", ".join(names[:3] if rest else names) + rest


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side, two spaces apart and two in."""
    every = [header, *rows]
    widths = [max(len(row[k]) for row in every) for k in range(len(header))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in every
    ]


def finite(value: Any) -> Any:
    """JSON has no NaN and no inf; they are written as text."""
    if isinstance(value, Mapping):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_training(
    loss: Callable,
    gradients: Any,
    parameters: Mapping[str, Any],
    batch: Any,
    *,
    before: Mapping | None = None,
) -> TrainingCheck:
    """Hand-written gradients against those of `loss(parameters, batch)`, as a table with each slip in words.

    `gradients` is a dict by the names of `parameters`, or a function of (parameters, batch) that returns one; then
    it is called twice, elsewhere first, so that a buffer that is kept or not cleared shows. With a dict, `before` is
    that of the step before. `loss` is of torch or NumPy.

        print(check_training(loss, {"w": dw, "b": db}, {"w": w, "b": b}, (x, y)))
    """
    if not isinstance(parameters, Mapping) or not parameters:
        raise UserError(
            "parameters must be a dict of arrays or tensors by name, the one that loss is called with"
        )
    values = {str(k): to_tensor(v) for k, v in parameters.items()}
    strange = next((k for k, v in values.items() if not isinstance(v, Tensor)), None)
    if strange is not None:
        raise UserError(
            f"parameter {strange!r} is a {type(parameters[strange]).__name__}, not an array or a tensor"
        )
    _refuse_not_finite(values)
    if callable(gradients):
        before = _gradients_elsewhere(gradients, parameters, batch)
        gradients = _copied(gradients(parameters, batch), name_of(gradients))
    elif not isinstance(gradients, Mapping):
        raise UserError(
            f"gradients is a {type(gradients).__name__}; give a dict by the names of parameters "
            f"({', '.join(list(values)[:5])}), or a function that returns one"
        )
    hands = {str(k): to_tensor(v) for k, v in gradients.items()}
    earlier = {str(k): to_tensor(v) for k, v in (before or {}).items()}
    in_numpy = any(isinstance(x, numpy.ndarray) for x in parameters.values())
    if in_numpy:
        arrays = {str(k): numpy.asarray(v) for k, v in parameters.items()}
        truth = differentiate_numpy(loss, arrays, batch)
    else:
        truth = differentiate(loss, values, batch)
    notes = [*truth.notes]
    notes += [f"gradients has {k!r}, which is no parameter" for k in hands if k not in values]
    judged = judge(
        truth, hands, values, sizes_of(tree_map(to_tensor, batch), values), earlier, _integers(batch)
    )
    lines = tuple(judged[k] for k in values if k in judged)
    order = [line.parameter for line in in_backward_order(truth, lines)]
    first = next((k for k in order if judged[k].verdict == "wrong"), None)
    return TrainingCheck(truth.loss, lines, first, truth.method, tuple(notes))


def _refuse_not_finite(values: Mapping[str, Tensor]) -> None:
    for key, x in values.items():
        bad = ~torch.isfinite(x)
        if bool(bad.any()):
            place = tuple(bad.nonzero()[0].tolist())
            raise UserError(
                f"parameter {key} is not finite at {place} ({int(bad.sum())} of {x.numel()} entries): no gradient can "
                "be right there; check a step before that one"
            )


def _copied(found: Any, name: str) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UserError(f"{name} returned a {type(found).__name__}; return a dict of gradients by parameter")
    return {str(k): _copy(v) for k, v in found.items()}


def _copy(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    return x.copy() if isinstance(x, numpy.ndarray) else x


def _gradients_elsewhere(gradients: Callable, parameters: Mapping[str, Any], batch: Any) -> dict[str, Any]:
    """What the function says for parameters a tenth away: a step before, as far as it can know."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Any) -> Any:
        away = 1 + 0.1 * torch.rand(tuple(x.shape), generator=generator, dtype=torch.float64)
        if isinstance(x, Tensor):
            return (x.detach() * away.to(x)).to(x.dtype)
        return (x * away.numpy()).astype(x.dtype)

    return _copied(gradients({k: moved(v) for k, v in parameters.items()}, batch), name_of(gradients))


def _integers(batch: Any) -> tuple[tuple[str, Tensor], ...]:
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(tree_flatten(batch)[0])
    found = ((f"batch {k}", to_tensor(x)) for k, x in pairs)
    return tuple((k, x) for k, x in found if isinstance(x, Tensor) and not x.is_floating_point())


def sizes_of(batch: Any, parameters: Mapping[str, Tensor]) -> tuple[Size, ...]:
    """The numbers that a factor may be: samples, positions, both, and the sizes of the parameters' axes."""
    tensors = [x for x in tree_flatten(batch)[0] if isinstance(x, Tensor) and x.dim()]
    found: list[Size] = []
    if tensors:
        samples = tensors[0].shape[0]
        found.append(Size(samples, "B", f"{samples} samples"))
        long = [x for x in tensors if x.dim() > 1]
        if long:
            positions = long[0].shape[1]
            found.append(Size(positions, "T", f"{positions} along axis 1 of the batch"))
            found.append(Size(samples * positions, "(B·T)", f"{samples} × {positions} of the batch"))
    taken = {size.value for size in found}
    for name, x in parameters.items():
        for axis, size in enumerate(x.shape):
            if size not in taken and size > 2:
                taken.add(size)
                found.append(Size(size, str(size), f"the size of axis {axis} of {name}"))
    return tuple(found)


def more_sizes(truth: Truth, known: Sequence[Size]) -> list[Size]:
    """Of the axes of what was computed on the way: the width of a head, say."""
    taken, found = {size.value for size in known}, []
    for slot, value in enumerate(truth.graph.values if truth.graph else ()):
        for axis, size in enumerate(value.shape):
            if size > 2 and size not in taken and truth.graph is not None:
                taken.add(size)
                found.append(
                    Size(size, str(size), f"the size of axis {axis} of {truth.graph.name_value(slot)}")
                )
    return found


def judge(
    truth: Truth,
    hands: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    sizes: Sequence[Size],
    earlier: Mapping[str, Any],
    integers: tuple[tuple[str, Tensor], ...] = (),
    eps: float | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> dict[str, GradientLine]:
    """A line for each parameter; what one slip explains of others follows from it."""
    sizes = (*sizes, *more_sizes(truth, sizes))
    eps = eps if eps is not None else coarsest(*hands.values(), *parameters.values())
    allowed = truth.allowances(eps)
    cases = {
        name: _case(name, hands[name], truth, allowed[name], earlier.get(name), sizes, integers)
        for name in truth.gradients
        if isinstance(hands.get(name), Tensor) and hands[name].numel() == truth.gradients[name].numel()
    }
    hand64 = {name: case.hand for name, case in cases.items()}
    cases = {name: replace(case, truths=truth.gradients, hands=hand64) for name, case in cases.items()}
    lines = {name: _line(name, cases.get(name), hands, parameters, truth) for name in parameters}
    _explain_rest(truth, cases, lines, allowed, sizes, extra or {})
    return lines


def coarsest(*tensors: Any) -> float:
    """The rounding unit of the coarsest floating-point format among these."""
    found = [torch.finfo(x.dtype).eps for x in tensors if isinstance(x, Tensor) and x.is_floating_point()]
    return max(found, default=torch.finfo(torch.float32).eps)


def _case(
    name: str, hand: Tensor, truth: Truth, allowed: Allowance, before: Any, sizes: Sequence[Size],
    integers: tuple[tuple[str, Tensor], ...],
) -> Case:  # fmt: skip
    right = truth.gradients[name]
    wide_hand = hand.detach().double().reshape(right.shape)
    old = (
        before.double().reshape(right.shape)
        if isinstance(before, Tensor) and before.numel() == right.numel()
        else None
    )
    dtype = hand.dtype if hand.is_floating_point() else torch.float32
    return Case(name, wide_hand, dtype, right, allowed, before=old, sizes=tuple(sizes), others=integers)


def _line(
    name: str, case: Case | None, hands: Mapping[str, Any], parameters: Mapping[str, Tensor], truth: Truth
) -> GradientLine:
    hand = hands.get(name)
    if name not in truth.gradients:
        integral = not parameters[name].is_floating_point()
        why = "an integer tensor has no gradient" if integral else "too many entries for differences"
        return GradientLine(name, None, None, "right" if integral and hand is None else "unknown", why)
    right = truth.gradients[name]
    if hand is None:
        if bool((right == 0).all()):
            return GradientLine(name, None, None, "right", "none given, and the loss does not depend on it")
        return GradientLine(name, 0.0, None, "wrong", "never written: no gradient was given for it")
    if not isinstance(hand, Tensor):
        return GradientLine(name, None, None, "wrong", f"a {type(hand).__name__}, not an array")
    if case is None:
        return GradientLine(
            name, None, None, "wrong",
            f"shape {tuple(hand.shape)} for a parameter of {tuple(right.shape)}",
        )  # fmt: skip
    ratio, cosine = measures(case.hand, right)
    misshapen = _other_shape(hand, right, case)
    if misshapen:
        return GradientLine(name, ratio, cosine, "wrong", misshapen)
    if case.right:
        return GradientLine(name, ratio, cosine, "right")
    return GradientLine(name, ratio, cosine, "wrong", describe_slip(case) or "")


def measures(hand: Tensor, right: Tensor) -> tuple[float | None, float | None]:
    """|hand| / |right|, and the cosine between them where both are more than nothing."""
    size, true = float(hand.norm()), float(right.norm())
    ratio = size / true if true else (1.0 if size == 0 else math.inf)
    if not (size and true and math.isfinite(size)):
        return ratio, None
    return ratio, float((hand * right).sum()) / (size * true)


def _other_shape(hand: Tensor, right: Tensor, case: Case) -> str | None:
    """The shape of the transpose with its numbers; a flat buffer is only another way to write the same."""
    if hand.dim() != right.dim() or hand.shape == right.shape:
        return None
    said = f"shape {tuple(hand.shape)} for a parameter of {tuple(right.shape)}"
    if hand.shape == right.mT.shape and case.allowed.admits(hand.double().mT - right):
        return f"transposed: {said}"
    return said


def in_backward_order(truth: Truth, lines: Sequence[GradientLine]) -> list[GradientLine]:
    """The parameter that is used last comes first: that is where backward begins."""
    if truth.graph is None or truth.slots is None:
        return list(reversed(lines))
    consumers, slots = truth.graph.consumers, truth.slots

    def first_use(line: GradientLine) -> int:
        slot = slots.get(line.parameter)
        used = [operation.index for operation, _ in consumers.get(slot, ())] if slot is not None else []
        return min(used, default=-1)

    return sorted(lines, key=first_use, reverse=True)


def _explain_rest(
    truth: Truth,
    cases: Mapping[str, Case],
    lines: dict[str, GradientLine],
    allowed: Mapping[str, Allowance],
    sizes: Sequence[Size],
    extra: Mapping[str, Tensor],
) -> None:
    """For wrong gradients without a pattern of their own: which step of backward would make them so."""
    backward, slots = truth.backward, truth.slots
    order = [line.parameter for line in in_backward_order(truth, list(lines.values()))]
    by_slot = {slots[k]: allowed[k] for k in slots if k in allowed} if slots else {}
    until = time.thread_time() + SECONDS
    for name in order:
        line = lines[name]
        if line.verdict != "wrong" or line.pattern or name not in cases:
            continue
        case = cases[name]
        if backward is not None and slots is not None and time.thread_time() < until:
            right = [slots[k] for k in slots if k in lines and lines[k].verdict == "right"]
            residual = case.hand - case.truth
            found = find_step(backward, slots[name], residual, by_slot, right, extra)
            if found is not None:
                step, carried = found
                lines[name] = replace(line, pattern=backward.describe(step, sizes))
                _mark_followers(name, carried, cases, lines, slots, allowed, order)
                continue
        earlier = next((k for k in order[: order.index(name)] if lines[k].verdict == "wrong"), None)
        words = other_relation(case) or _nothing_fits(case)
        lines[name] = replace(line, pattern=f"{words}; may follow from {earlier}" if earlier else words)


def _mark_followers(
    name: str, carried: Mapping[int, Tensor], cases: Mapping[str, Case], lines: dict[str, GradientLine],
    slots: Mapping[str, int], allowed: Mapping[str, Allowance], order: Sequence[str],
) -> None:  # fmt: skip
    for other in order[order.index(name) + 1 :]:
        added = carried.get(slots[other]) if other in slots else None
        if other not in cases or lines[other].verdict != "wrong" or added is None:
            continue
        apart = cases[other].hand - cases[other].truth - added
        if allowed[other].admits(apart, 2.0):
            lines[other] = replace(lines[other], verdict="follows", pattern=f"from {name}")


def _nothing_fits(case: Case) -> str:
    apart = case.hand - case.truth
    worst = int(apart.abs().nan_to_num(math.inf).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape))
    wrong = int(case.wrong.sum())
    return (
        f"{wrong} of {apart.numel()} entries, worst at {place}: {float(case.hand[place]):.4g} by hand, "
        f"{float(case.truth[place]):.4g} right"
    )
