"""The truth about a step: its loss and every gradient in float64, against what the step really computed.

    answer = shadow(tape)
    answer.right          # True, and str(answer) says how right
    answer.culprits[0]    # else: the backward that is wrong, by class, module and line
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gradproof.tape.audit import Audit, Auditor
from gradproof.tape.cuts import Cut, find_cuts
from gradproof.tape.execute import CannotReplay
from gradproof.tape.locate import find_never_written
from gradproof.tape.operations import Line, Slot, Tape, references
from gradproof.tape.pattern import cosine, describe_difference, relative_error
from gradproof.tape.replay import Player, Replay, differentiate, real_contributions, replay_exactly
from gradproof.tape.stale import (
    backward_operations,
    find_foreign_activation,
    find_overwritten,
    find_recomputed_differently,
)


@dataclass(frozen=True)
class ParameterGradient:
    """One parameter's gradient in the step against the truth."""

    name: str
    error: float  # |got − truth| / |truth|
    noise: float  # the same for PyTorch's own derivative in the step's precision: pure rounding
    tolerance: float
    cosine: float
    size: float  # |truth|, with the loss scale taken out
    verdict: str  # right, wrong, zero in truth, no gradient, not finite
    pattern: str = ""

    @property
    def right(self) -> bool:
        return self.verdict in ("right", "zero in truth")

    def __str__(self) -> str:
        if self.verdict == "zero in truth":
            return f"{self.name}: zero in truth, what is there is rounding"
        text = f"{self.name}: {self.verdict}, {self.error:.1e} off, {self.tolerance:.1e} allowed"
        return f"{text}: {self.pattern}" if self.pattern else text


@dataclass(frozen=True)
class Culprit:
    """The place where a right gradient goes in and a wrong one comes out."""

    kind: str  # wrong backward, stale activation, recomputed differently, memory never written, changed by a hook
    what: str  # class of the autograd.Function, or operator
    module: str
    line: Line | None
    error: float
    pattern: str
    evidence: str = ""
    called: Line | None = None

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        lines = [f"{self.kind}: {self.what}{where}: {self.pattern}"]
        lines += [f"  at       {self.line.file}:{self.line.number}"] if self.line else []
        lines += [f"  called   {self.called}"] if self.called else []
        lines += [f"  evidence {self.evidence}"] if self.evidence else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Accumulation:
    """.grad as the optimizer sees it is not the sum of what this step's backwards brought."""

    parameter: str
    how: str

    def __str__(self) -> str:
        return f".grad of {self.parameter}: {self.how}"


@dataclass(frozen=True)
class Shadow:
    """The gradients of one step against float64."""

    loss: float
    true_loss: float
    parameters: tuple[ParameterGradient, ...]
    culprits: tuple[Culprit, ...]
    surrogates: tuple[Audit, ...]  # backwards that differ from the derivative and look as if they were meant to
    audits: tuple[Audit, ...]
    cuts: tuple[Cut, ...]
    accumulation: tuple[Accumulation, ...]
    notes: tuple[str, ...]  # what could not be replayed as recorded; every conclusion above leans on it

    @property
    def right(self) -> bool:
        return not self.culprits and all(parameter.right for parameter in self.parameters)

    @property
    def worst(self) -> ParameterGradient | None:
        judged = [p for p in self.parameters if p.verdict in ("right", "wrong", "not finite")]
        return max(judged, key=lambda p: p.error, default=None)

    @property
    def error(self) -> float:
        """|got − truth| / |truth| over all parameters together."""
        judged = [p for p in self.parameters if p.verdict in ("right", "wrong", "not finite")]
        size = math.sqrt(sum(p.size**2 for p in judged))
        return math.sqrt(sum((p.error * p.size) ** 2 for p in judged)) / size if size > 0 else 0.0

    def __str__(self) -> str:
        worst = self.worst
        if self.right and worst is not None:
            head = (
                f"the loss gradient is correct to {self.error:.0e}: {len(self.parameters)} parameters against float64, "
                f"worst {worst.name}, {worst.error:.0e} off ({worst.tolerance:.0e} allowed)\n"
                f"loss {self.loss:.8g}, in float64 {self.true_loss:.8g}"
            )
        elif self.right:
            head = "no parameter received a gradient"
        else:
            wrong = [p for p in self.parameters if not p.right and p.verdict != "no gradient"]
            head = "\n".join(map(str, self.culprits)) or "the gradient is wrong, and no single place explains it"
            head += f"\n{len(wrong)} of {len(self.parameters)} parameters have a wrong gradient"
            head += "".join(f"\n  {p}" for p in sorted(wrong, key=lambda p: -p.error)[:5])
        parts = [head, *map(str, self.cuts), *map(str, self.accumulation)]
        parts += [f"not the derivative, perhaps on purpose: {a.call.cls.__name__}: {a.surrogate}" for a in self.surrogates]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)


def shadow(tape: Tape) -> Shadow:
    """Loss and gradients of a taped step in float64, and where the step departs from them."""
    auditor = Auditor(tape)
    real: dict[int, dict[int, torch.Tensor]] = {}
    looks = auditor.schedule()
    for call in tape.top_backwards:
        if call.accumulates:
            real[call.index] = {}
            for at, parameter, gradient in real_contributions(tape, call):
                look = _collect(real[call.index], parameter, gradient)
                looks.setdefault(at, []).append(look)
    final: dict[int, torch.Tensor] = {}
    for parameter, (at, gradient) in tape.final_gradients.items():
        looks.setdefault(at, []).append(_collect(final, parameter, gradient))
    scaled = _scaled_loss(tape)
    exact = replay_exactly(tape, at=looks, keep=scaled or ())
    truth = differentiate(tape, torch.float64)
    own = differentiate(tape)
    scale = _loss_scale(scaled, exact)
    parameters = _judge_parameters(tape, real, truth, own, scale)
    missing = [tape.slots[slot] for slot, p in parameters.items() if p.verdict == "no gradient"]
    culprits = _wrong_functions(tape, auditor.audits)
    never = find_never_written(tape)
    if never is not None:
        culprits = [culprit for culprit in culprits if culprit.what != never.what or culprit.module != never.module]
        culprits.insert(0, Culprit("memory never written", never.what, never.module, never.line, math.inf, never.text))
    if not culprits and any(p.verdict == "wrong" for p in parameters.values()):
        culprits += _wrong_nodes(tape)
    surrogates = [a for a in auditor.audits if a.surrogate]
    if surrogates and not culprits:
        parameters = {slot: _excused(p) for slot, p in parameters.items()}
    loss = float(exact.losses[0].double().sum()) / scale if exact.losses else math.nan
    true_loss = float(truth.losses[0].double().sum()) / scale if truth.losses else math.nan
    return Shadow(
        loss,
        true_loss,
        tuple(parameters.values()),
        tuple(culprits),
        tuple(surrogates),
        tuple(auditor.audits),
        tuple(find_cuts(tape, missing)),
        tuple(_judge_accumulation(tape, real, final)),
        tuple(_notes(tape, exact, truth, auditor.notes)),
    )


def _collect(into: dict[int, torch.Tensor], parameter: int, gradient: int):
    def look(player: Player) -> None:
        try:
            value = player.value(gradient).detach()
        except CannotReplay:
            return
        before = into.get(parameter)
        into[parameter] = value.clone() if before is None else before + value

    return look


def _scaled_loss(tape: Tape) -> tuple[int, int] | None:
    """(scaled, unscaled) slots of the loss, when a GradScaler scaled it."""
    for slot in tape.loss_slots:
        made_by = tape.slots[slot].made_by
        if made_by is not None and made_by in tape.scaled:
            return slot, tape.operations[made_by].reads[0]
    return None


def _loss_scale(scaled: tuple[int, int] | None, exact: Replay) -> float:
    """What a GradScaler multiplied the loss with."""
    if scaled is None or not all(slot in exact.values for slot in scaled):
        return 1.0
    ratio = float(exact.values[scaled[0]].double().sum() / exact.values[scaled[1]].double().sum())
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0


def _judge_parameters(tape: Tape, real: dict, truth: Replay, own: Replay, scale: float) -> dict[int, ParameterGradient]:
    depth = math.sqrt(max(1, sum(op.in_backward is None for op in tape.operations)))
    eps = _coarsest(tape)
    judged: dict[int, ParameterGradient] = {}
    slots = [s for s in tape.parameters if any(s.index in calls for calls in (*truth.per_call.values(), *real.values()))]
    slots += [s for s in tape.parameters if s not in slots and _wants_gradient(tape, s)]
    for slot in slots:
        got = _total(real, slot.index)
        right, mine = truth.gradients.get(slot.index), own.gradients.get(slot.index)
        judged[slot.index] = _judge_one(slot, got, right, mine, eps * depth, scale)
    return judged


def _judge_one(
    slot: Slot, got: torch.Tensor | None, right: torch.Tensor | None, mine: torch.Tensor | None, eps: float, scale: float
) -> ParameterGradient:
    if got is None:
        size = 0.0 if right is None else float(torch.linalg.vector_norm(right))
        verdict = "no gradient" if size == 0 else "wrong"
        return ParameterGradient(slot.name, 1.0, 0.0, 0.0, 0.0, size / scale, verdict, "" if size == 0 else "no gradient arrives")
    if right is None:
        right = torch.zeros_like(got, dtype=torch.float64)
    size = float(torch.linalg.vector_norm(right))
    noise = float(torch.linalg.vector_norm((right if mine is None else mine.double()) - right))
    # relative error allowed: eight times the measured rounding, at least what the depth of the step explains
    floor = max(8 * noise, eps * size, 1e-5 * size)
    distance = float(torch.linalg.vector_norm(got.double() - right))
    error, tolerance = (distance / size, floor / size) if size > 0 else (distance, floor)
    if not math.isfinite(distance):
        verdict = "not finite"
    elif distance <= floor:
        verdict = "zero in truth" if size <= 4 * noise or size == 0 else "right"
    else:
        verdict = "wrong"
    pattern = describe_difference(got, right, tolerance) if verdict == "wrong" else ""
    relative_noise = noise / size if size > 0 else noise
    angle = cosine(got, right) if size > 0 and math.isfinite(distance) else 0.0
    return ParameterGradient(slot.name, error, relative_noise, tolerance, angle, size / scale, verdict, pattern)


def _excused(parameter: ParameterGradient) -> ParameterGradient:
    """With a straight-through estimator on the way, the derivative is not what the step was meant to follow."""
    if parameter.verdict != "wrong":
        return parameter
    values = {**parameter.__dict__, "verdict": "right", "pattern": "a surrogate gradient, not the derivative"}
    return ParameterGradient(**{**values, "tolerance": max(parameter.tolerance, parameter.error)})


def _total(real: dict[int, dict[int, torch.Tensor]], slot: int) -> torch.Tensor | None:
    parts = [call[slot] for call in real.values() if slot in call]
    return sum(parts[1:], parts[0]) if parts else None


def _wants_gradient(tape: Tape, slot: Slot) -> bool:
    return any(
        ref.slot == slot.index and ref.tracked
        for operation in tape.operations
        if operation.in_backward is None
        for ref in references((operation.args, operation.kwargs))
    )


def _coarsest(tape: Tape) -> float:
    floats = {slot.dtype for slot in tape.slots if slot.dtype.is_floating_point and slot.dtype.itemsize >= 2}
    return max((torch.finfo(dtype).eps for dtype in floats), default=torch.finfo(torch.float32).eps)


def _wrong_functions(tape: Tape, audits: list[Audit]) -> list[Culprit]:
    """One culprit a call, in the order in which backward reached them."""
    culprits: list[Culprit] = []
    seen: set[int] = set()
    for audit in audits:
        if audit.right or audit.surrogate or audit.call.index in seen:
            continue
        seen.add(audit.call.index)
        others = [a for a in audits if a.call is audit.call and not a.right]
        pattern = "; ".join(f"{a.parameter or f'argument {a.argument}'}: {a.pattern}" for a in others)
        kind, evidence, line = _why_wrong(tape, audit)
        culprits.append(
            Culprit(
                kind,
                audit.call.cls.__name__,
                audit.call.module,
                line or audit.line,
                max(a.error for a in others),
                pattern,
                evidence or f"{audit.method}: {audit.error:.2g} off, {audit.tolerance:.1g} allowed",
                audit.call.line,
            )
        )
    return culprits


def _why_wrong(tape: Tape, audit: Audit) -> tuple[str, str, Line | None]:
    call = audit.call
    backward = backward_operations(tape, call)
    overwritten = find_overwritten(tape, call.last, backward)
    if overwritten is not None:
        write, read = overwritten
        text = f"what {read.name} reads was overwritten by {write.name}, {tape.place(write)}"
        return "stale activation", text, read.line
    foreign = find_foreign_activation(tape, call, backward)
    if foreign is not None:
        read, text = foreign
        return "stale activation", f"{read.name} reads a value that is not from this forward: {text}", read.line
    again = find_recomputed_differently(tape, call, backward)
    if again is not None:
        return "recomputed differently", f"{again.name} is repeated in backward with another result than in forward", again.line
    return "wrong backward", "", None


def _wrong_nodes(tape: Tape) -> list[Culprit]:
    """No hand-written function is at fault: compare the gradient at each slot, from the loss backwards."""
    pairs = [(at, slot, gradient) for call in tape.top_backwards if not call.create_graph for at, slot, gradient in call.received]
    pairs += [triple for call in tape.top_backwards if call.accumulates for triple in real_contributions(tape, call)]
    if len([call for call in tape.top_backwards if call.accumulates]) != 1:
        return []  # several backwards reach a slot: their gradients cannot be told apart slot by slot
    got: dict[int, torch.Tensor] = {}
    looks: dict[int, list] = {}
    for at, slot, gradient in sorted(pairs):
        looks.setdefault(at, []).append(_collect(got, slot, gradient))
    replay_exactly(tape, at=looks)
    own = differentiate(tape, gradients_at=[slot for _, slot, _ in pairs])
    expected = {**own.slot_gradients, **own.gradients}
    for _, slot, gradient in sorted(pairs):
        if slot not in expected or slot not in got or got[slot].shape != expected[slot].shape:
            continue
        error = relative_error(got[slot], expected[slot])
        if error > max(1e-4, 64 * torch.finfo(got[slot].dtype).eps):
            return [_culprit_at(tape, gradient, error, describe_difference(got[slot], expected[slot], 1e-4))]
    return []


def _culprit_at(tape: Tape, gradient: int, error: float, pattern: str) -> Culprit:
    made_by = tape.slots[gradient].made_by
    while made_by is not None and tape.operations[made_by].name in ("detach", "view", "t", "alias", "transpose", "expand"):
        refs = tape.operations[made_by].reads
        if not refs or tape.slots[refs[0]].made_by is None:
            break
        made_by = tape.slots[refs[0]].made_by
    if made_by is None:
        return Culprit("wrong gradient", "made outside PyTorch", "", None, error, pattern)
    operation = tape.operations[made_by]
    origin = tape.operations[operation.made_from] if operation.made_from is not None else operation
    if operation.line is not None and operation.in_backward is not None:
        return Culprit("changed by a hook", operation.name, origin.module, operation.line, error, pattern)
    siblings = [op for op in tape.operations if op.made_from == operation.made_from and op.in_backward is not None]
    overwritten = find_overwritten(tape, origin.index + 1, siblings)
    if overwritten is not None:
        write, _ = overwritten
        text = f"what {operation.node} saved was overwritten by {write.name}, {tape.place(write)}"
        return Culprit("stale activation", origin.name, origin.module, origin.line, error, pattern, text)
    return Culprit("wrong gradient", operation.node or operation.name, origin.module, origin.line, error, pattern)


def _judge_accumulation(tape: Tape, real: dict, final: dict[int, torch.Tensor]) -> list[Accumulation]:
    found = []
    for slot, value in final.items():
        parts = [call[slot] for call in real.values() if slot in call]
        if not parts or not bool(torch.isfinite(value).all()):
            continue
        total = sum(parts[1:], parts[0])
        scale = float((value.double() * total.double()).sum() / total.double().square().sum().clamp_min(1e-300))
        if relative_error(value, scale * total) <= 1e-3:
            continue  # the sum itself, or the sum clipped or unscaled
        name = tape.slots[slot].name
        if len(parts) > 1 and relative_error(value, parts[-1]) <= 1e-3:
            found.append(Accumulation(name, f"only the last of {len(parts)} backwards is in it: overwritten, not added"))
        elif not bool(value.any()):
            found.append(Accumulation(name, "zero when the optimizer reads it: cleared between backward and step"))
        else:
            old = _stale_gradient(tape, slot)
            if old is not None and relative_error(value, total + old) <= 1e-3:
                share = float(old.double().norm() / value.double().norm())
                found.append(Accumulation(name, f"holds {share:.0%} of an earlier step's gradient: not cleared before this step"))
            else:
                found.append(Accumulation(name, f"{relative_error(value, total):.2g} off the sum of {len(parts)} backwards"))
    return found


def _stale_gradient(tape: Tape, slot: int) -> torch.Tensor | None:
    for call in tape.top_backwards:
        stored = call.stored.get(slot)
        if stored is not None and tape.slots[stored].made_by is None:
            return tape.leaf_value(stored)
    return None


def _notes(tape: Tape, exact: Replay, truth: Replay, others: list[str]) -> list[str]:
    notes = [tape.broken] if tape.broken else []
    if exact.departs_at is not None:
        operation = tape.operations[exact.departs_at]
        notes.append(f"{operation.name} made something else when replayed ({tape.place(operation)}): what follows it is approximate")
    seen: set[str] = set()
    for index, text in truth.notes.items():
        if text not in seen and index < len(tape.operations):
            seen.add(text)
            notes.append(f"{text} ({tape.place(tape.operations[index])})")
    return notes[:8] + others

