"""A step that another program dumped, against a reference: the first activation and gradient that are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from gradproof.check.activations import CHANGES, Forward, TensorLine, plain_name, relative_error
from gradproof.check.dump import Dump
from gradproof.check.graph import Graph
from gradproof.check.slip import Allowance, Case, describe_slip, other_relation
from gradproof.check.subject import name_of
from gradproof.check.training import (
    GradientLine,
    coarsest,
    finite,
    judge,
    measures,
    say_patterns,
    table,
)
from gradproof.check.truth import Truth, differentiate
from gradproof.errors import UserError
from gradproof.numerics.stored import format_of

SHOWN = 30  # lines of a table up to which those that are right are listed, too


@dataclass(frozen=True)
class DumpCheck:
    """What a dumped step has right and wrong: activations in the order of forward, gradients in that of backward."""

    path: str
    step: int | None
    reference: str
    loss: float | None
    right_loss: float
    loss_verdict: str
    loss_pattern: str
    activations: tuple[TensorLine, ...]
    gradients: tuple[TensorLine, ...]
    summary: tuple[str, ...]  # what several lines have in common
    notes: tuple[str, ...]

    @property
    def first_activation(self) -> TensorLine | None:
        return next((line for line in self.activations if line.verdict == "wrong"), None)

    @property
    def first_gradient(self) -> TensorLine | None:
        return next((line for line in self.gradients if line.verdict == "wrong"), None)

    @property
    def verdict(self) -> str:
        lines = (*self.activations, *self.gradients)
        said = {self.loss_verdict, *(line.verdict for line in lines)}
        if said & {"wrong", "follows"}:
            return "wrong"
        return "right" if "right" in said else "undecided"

    @property
    def exit_code(self) -> int:
        return {"right": 0, "wrong": 1, "undecided": 2}[self.verdict]

    def __getitem__(self, name: str) -> TensorLine:
        return next(line for line in (*self.activations, *self.gradients) if line.name == name)

    def as_json(self) -> str:
        first = {"first_activation": self.first_activation, "first_gradient": self.first_gradient}
        found = {"verdict": self.verdict} | {k: v and v.name for k, v in first.items()} | asdict(self)
        return json.dumps(finite(found), indent=2)

    def __str__(self) -> str:
        step = f", step {self.step}" if self.step is not None else ""
        verdict = {
            "right": "all that can be compared is right",
            "wrong": "something is wrong",
            "undecided": "nothing to judge",
        }[self.verdict]
        lines = [f"{self.path}{step}, against {self.reference}: {verdict}"]
        dumped = "none dumped" if self.loss is None else f"{self.loss:.7g} dumped"
        pattern = f": {self.loss_pattern}" if self.loss_pattern else ""
        lines.append(f"  loss: {dumped}, {self.right_loss:.7g} right, {self.loss_verdict}{pattern}")
        for words, line in (("activation", self.first_activation), ("gradient", self.first_gradient)):
            if line is not None:
                lines.append(
                    f"  first wrong {words}: {line.name}{': ' + line.pattern if line.pattern else ''}"
                )
        lines += [f"  {said}" for said in self.summary]
        for words, found, first in (
            ("activations, in the order of the computation", self.activations, self.first_activation),
            ("gradients, in the order of backward", self.gradients, self.first_gradient),
        ):
            if found:
                lines += ["", words, *_listed(found, first)]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _listed(found: Sequence[TensorLine], first: TensorLine | None) -> list[str]:
    shown = [line for line in found if line.verdict != "right"] if len(found) > SHOWN else list(found)
    lines = [
        x for x in say_patterns([(line.name, line.pattern) for line in shown if line is not first], None) if x
    ]  # fmt: skip
    header = ("tensor", "error", "|dumped|/|right|", "cosine", "verdict", "pattern")
    lines += table(header, [line.cells for line in shown]) if shown else []
    hidden = len(found) - len(shown)
    return lines + ([f"  {hidden} more, all right"] if hidden else [])


def check_dump(
    dump: Dump, reference: Callable, *, name: str | None = None, before: Dump | None = None
) -> DumpCheck:
    """A dumped step against `reference(weights, batch)`, which returns the loss or (loss, activations by name).

    With the dump of the step `before` it, a gradient that was not computed anew or not cleared is seen, too.
    """
    if not (dump.gradients or dump.activations or dump.activation_gradients or dump.loss is not None):
        raise UserError(
            f"{dump.path} has neither gradients/… nor activations/… nor a loss: there is nothing to compare"
        )
    name = name or name_of(reference)
    truth = differentiate(reference, dump.weights, dump.batch, name)
    eps = _precision(dump)
    forward = Forward(dump, truth, eps)
    activations, used = forward.judged()
    loss_verdict, loss_pattern, used = forward.judged_loss(used)
    gradients = _judge_gradients(dump, truth, used, forward, eps, before)
    notes = [*dump.notes, *truth.notes, *forward.say_twins()]
    if truth.backward is None:
        notes.append(
            "the reference writes into views: activations are compared less sharply, and patterns less known"
        )
    return DumpCheck(
        str(dump.path), dump.step, name, dump.loss, truth.loss, loss_verdict, loss_pattern, activations, gradients,
        tuple(_say_silence(gradients)), tuple(notes),
    )  # fmt: skip


def _precision(dump: Dump) -> float:
    """The coarsest rounding in the dump, of dtypes and of numbers that were rounded before they were widened."""
    tensors = [x for x in (*dump.activations.values(), *dump.gradients.values()) if x.is_floating_point()]
    eps = coarsest(*tensors, *dump.weights.values())
    for x in tensors:
        narrow = format_of(x[:4096] if x.dim() == 1 else x) if x.dtype == torch.float32 else None
        eps = max(eps, torch.finfo(narrow).eps if narrow else 0.0)
    return eps


# ---- gradients


def _judge_gradients(
    dump: Dump, truth: Truth, used: Graph, forward: Forward, eps: float, before: Dump | None
) -> tuple[TensorLine, ...]:
    """Against the gradients of the forward as it was run; what is right for that alone follows from it."""
    hands = _named_gradients(dump)
    ran = _as_run(truth, used, hands, eps)
    incoming, seen = _activation_gradients(dump, ran, hands, forward, eps, before)
    earlier = {k: v for k, v in (before.gradients if before else {}).items() if k in hands}
    weights = {k: dump.weights[k] for k in hands}
    integers = tuple((f"batch {k}", x) for k, x in dump.batch.items() if not x.is_floating_point())
    wrong = {
        f"activations/{m.name} as dumped": m.dumped
        for m in forward.matches
        if not forward.case(m, used).right
    }
    lines = judge(seen, hands, weights, forward.sizes, earlier, integers, eps, wrong)
    plain = truth.allowances(eps)
    found: dict[str, TensorLine] = {}
    for name, line in lines.items():
        label, line = f"gradients/{name}", _unused(line, truth)
        if name not in truth.gradients:
            found[name] = TensorLine(label, name, None, None, None, line.verdict, line.pattern)
            continue
        right = truth.gradients[name]
        hand = hands[name].double().reshape(right.shape)
        follows = line.verdict == "right" and not plain[name].admits(hand - right)
        verdict = "follows" if follows else line.verdict
        forward_alone = follows and ran.allowances(eps)[name].admits(hand - ran.gradients[name])
        why = "the numbers of the forward as it was run" if forward_alone else "the gradient that came in"
        pattern = f"right for {why}" if follows else line.pattern
        found[name] = TensorLine(
            label, name, relative_error(hand, right), *measures(hand, right), verdict, pattern
        )
    ordered = [(_first_use(truth, name), line) for name, line in found.items()]
    ordered += incoming
    return tuple(line for _, line in sorted(ordered, key=lambda pair: pair[0], reverse=True))


def _as_run(truth: Truth, used: Graph, hands: Mapping[str, Tensor], eps: float) -> Truth:
    """The truth of the forward as it was run, or of the reference's backward on the numbers as they were run."""
    if truth.graph is used or truth.graph is None:
        return truth
    on_numbers = truth.graph.with_values(used.values)
    return max(
        (_of_graph(truth, used), _of_graph(truth, on_numbers)), key=lambda t: _count_right(t, hands, eps)
    )


def _of_graph(truth: Truth, graph: Graph) -> Truth:
    assert truth.slots is not None
    total, _ = graph.gradients({truth.loss_slot: torch.ones_like(graph.values[truth.loss_slot])})
    gradients = {k: total.get(slot, torch.zeros_like(truth.gradients[k])) for k, slot in truth.slots.items()}
    return replace(truth, graph=graph, gradients=gradients, loss=float(graph.values[truth.loss_slot]))


def _count_right(truth: Truth, hands: Mapping[str, Tensor], eps: float) -> int:
    allowed = truth.allowances(eps)
    return sum(
        allowed[k].admits(hands[k].double().reshape(right.shape) - right)
        for k, right in truth.gradients.items()
        if k in hands
    )


def _named_gradients(dump: Dump) -> dict[str, Tensor]:
    """By the names of the weights: the same name, one with a d or grad before it, or the only one of its shape."""
    plain = {plain_name(name): name for name in dump.weights}
    found: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    for name, x in dump.gradients.items():
        bare = plain_name(name)
        tries = (
            bare,
            bare.removeprefix("d"),
            bare.removeprefix("grad."),
            bare.removesuffix(".grad"),
            bare.removeprefix("d."),
        )
        weight = name if name in dump.weights else next((plain[t] for t in tries if t in plain), None)
        if weight is None:
            rest[name] = x
            continue
        if x.numel() != dump.weights[weight].numel():
            raise UserError(
                f"{dump.path}: gradients/{name} has the shape {tuple(x.shape)}, weights/{weight} has "
                f"{tuple(dump.weights[weight].shape)}"
            )
        found[weight] = x
    for name, x in rest.items():
        alike = [w for w, v in dump.weights.items() if w not in found and v.shape == x.shape]
        if len(alike) != 1:
            raise UserError(
                f"{dump.path}: gradients/{name} belongs to no weight; call it as one of the weights: "
                f"{', '.join(list(dump.weights)[:6])}"
            )
        found[alike[0]] = x
    return {name: found[name] for name in dump.weights if name in found}


def _first_use(truth: Truth, name: str) -> int:
    slot = (truth.slots or {}).get(name)
    uses = truth.graph.consumers.get(slot, []) if truth.graph and slot is not None else []
    return min((operation.index for operation, _ in uses), default=-1)


def _unused(line: GradientLine, truth: Truth) -> GradientLine:
    if line.verdict == "wrong" and _first_use(truth, line.parameter) < 0:
        return replace(line, verdict="unknown", pattern="the reference does not use this weight")
    return line


def _activation_gradients(
    dump: Dump, truth: Truth, hands: Mapping[str, Tensor], forward: Forward, eps: float, before: Dump | None
) -> tuple[list[tuple[int, TensorLine]], Truth]:
    """A line for each, and the truth with those that are wrong and were used as they are."""
    backward, lines = truth.backward, []
    by_name = dict(truth.activations or {}) | {m.name: m.slot for m in forward.matches}
    found: list[tuple[int, str, int]] = []
    for name, x in dump.activation_gradients.items():
        slot = by_name.get(name, by_name.get(name.removeprefix("d")))
        if backward is None or slot is None:
            words = "the reference has no activation of that name"
            lines.append(
                (-1, TensorLine(f"activation_gradients/{name}", "", None, None, None, "unknown", words))
            )
            continue
        if backward.graph.values[slot].numel() != x.numel():
            raise UserError(
                f"{dump.path}: activation_gradients/{name} has the shape {tuple(x.shape)}, the reference's has "
                f"{tuple(backward.graph.values[slot].shape)}"
            )
        uses = backward.graph.consumers.get(slot, [])
        found.append((min((operation.index for operation, _ in uses), default=-1), name, slot))
    if backward is None or not found:
        return lines, truth
    found.sort(reverse=True)
    given = {name: forward.shaped(dump.activation_gradients[name].double(), slot) for _, name, slot in found}
    earlier = before.activation_gradients if before else {}
    allowed = truth.slot_allowances(eps)[0]

    def case_of(name: str, slot: int, total: Mapping[int, Tensor]) -> Case:
        right = total.get(slot, torch.zeros_like(given[name]))
        others = {n: total[s] for _, n, s in found if s in total and s != slot}
        old = earlier[name].double().reshape(right.shape) if name in earlier and slot in allowed else None
        dtype = dump.activation_gradients[name].dtype
        return Case(
            name, given[name], dtype, right, allowed[slot], before=old, truths=others, hands=given, sizes=forward.sizes
        )  # fmt: skip

    current = truth
    for place, name, slot in found:
        assert current.backward is not None
        case, now = case_of(name, slot, backward.total), case_of(name, slot, current.backward.total)
        verdict, pattern = "right", ""
        if not case.right and now.right:
            verdict, pattern = "follows", "right for the gradient that came in"
        elif not case.right:
            verdict, pattern = "wrong", describe_slip(now) or other_relation(now) or ""
            if len(current.held) < CHANGES and bool(torch.isfinite(now.hand).all()):
                current = _held_if_used(current, slot, now.hand, hands, found, case_of, allowed)
        measured = (relative_error(case.hand, case.truth), *measures(case.hand, case.truth))
        lines.append((place, TensorLine(f"activation_gradients/{name}", name, *measured, verdict, pattern)))
    return lines, current


def _held_if_used(
    truth: Truth,
    slot: int,
    value: Tensor,
    hands: Mapping[str, Tensor],
    found: Sequence[tuple[int, str, int]],
    case_of: Callable[[str, int, Mapping[int, Tensor]], Case],
    allowed: Mapping[int, Allowance],
) -> Truth:
    """The truth behind a gradient as the program has it, where more of the program agrees with that."""
    assert truth.graph is not None and truth.slots is not None and truth.backward is not None
    held = {**truth.held, slot: value}
    ones = torch.ones_like(truth.graph.values[truth.loss_slot])
    total, _ = truth.graph.gradients({truth.loss_slot: ones}, held=held)

    def count(total: Mapping[int, Tensor]) -> int:
        slots = truth.slots or {}
        pairs = [(hands[k].double(), total[s], s) for k, s in slots.items() if k in hands and s in total]
        right = sum(allowed[s].admits(hand.reshape(g.shape) - g, 2.0) for hand, g, s in pairs)
        return right + sum(case_of(name, s, total).right for _, name, s in found if s != slot)

    if count(total) <= count(truth.backward.total):
        return truth
    gradients = {k: total.get(s, torch.zeros_like(truth.gradients[k])) for k, s in truth.slots.items()}
    return replace(truth, gradients=gradients, held=held)


def _say_silence(lines: Sequence[TensorLine]) -> list[str]:
    """Layers whose every gradient is 0, and a backward that stops somewhere."""
    parameters = [line for line in lines if line.name.startswith("gradients/")]
    silent = [line.ratio == 0.0 and line.verdict in ("wrong", "follows") for line in parameters]
    if sum(silent) < 2:
        return []
    first = silent.index(True)
    after = silent[first + 1 :]
    if sum(after) >= max(len(after) - 1, 1):  # a tied embedding has another path
        said = f"backward stops before {parameters[first].name}: it and {sum(after)} of the {len(after)} after it are 0"
        return [f"{said}, so the backward of that layer was never called"]
    layers: dict[str, list[bool]] = {}
    for line, zero in zip(parameters, silent, strict=True):
        layer = re.match(r"gradients/(.*?\d+)(?=[._/]|$)", line.name)
        if layer:
            layers.setdefault(layer[1], []).append(zero)
    return [
        f"every gradient of {layer} is 0: the backward of that layer was never called"
        for layer, zeros in layers.items()
        if len(zeros) > 1 and all(zeros)
    ]
