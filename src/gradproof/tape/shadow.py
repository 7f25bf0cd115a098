"""The truth about a step: its loss and every gradient in float64, against what the step really computed.

answer = shadow(tape)
answer.right          # True, and str(answer) says how right
answer.culprits[0]    # else: the backward that is wrong, by class, module and line
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradproof.tape.accumulation import Accumulation, judge_accumulation
from gradproof.tape.audit import Audit, Auditor
from gradproof.tape.culprits import Culprit, wrong_functions, wrong_nodes
from gradproof.tape.cuts import Cut, find_cuts
from gradproof.tape.locate import find_never_written
from gradproof.tape.nodes import NodeReport, begins_before, check_nodes
from gradproof.tape.operations import Slot, Tape, references
from gradproof.tape.operators import FRESH
from gradproof.tape.pattern import cosine, describe_difference, distance_between, wide
from gradproof.tape.player import Replay
from gradproof.tape.replay import collect, differentiate, real_contributions, replay_exactly

NOTHING_ARRIVES = "no gradient arrives"
NOTHING_TO_COMPARE = "the float64 replay brings no gradient to it"
COARSE = 0.05  # of a gradient: where rounding may take more, the nodes are asked one by one
CHAOTIC = 0.5  # of a gradient: where it may take more than this, the whole says nothing
NOTHING = 1e-9  # of what was summed in float64: what is left is rounding
CLOSE = 1e-5  # of a gradient
FINE = 1e-4  # a step whose roundings add up to less can tell zero from small by itself


@dataclass(frozen=True)
class ParameterGradient:
    """One parameter's gradient in the step against the truth."""

    name: str
    error: float  # |got − truth| / |truth|
    noise: float  # the same for PyTorch's own derivative in the step's precision, 0 where nobody had to ask
    tolerance: float
    cosine: float
    size: float  # |truth|, with the loss scale taken out
    verdict: str  # right, wrong, zero in truth, no gradient, not finite, undecided
    pattern: str = ""
    by_nodes: bool = False  # decided node by node: the step as a whole rounds too much to be compared

    @property
    def right(self) -> bool:
        return self.verdict in ("right", "zero in truth")

    def __str__(self) -> str:
        if self.verdict == "zero in truth":
            return f"{self.name}: zero in truth, what is there is rounding"
        if self.by_nodes:
            return f"{self.name}: {self.verdict}, node by node"
        text = f"{self.name}: {self.verdict}, {self.error:.1e} off, {self.tolerance:.1e} allowed"
        return f"{text}: {self.pattern}" if self.pattern else text


SURROGATE = "a surrogate gradient, not the derivative"


@dataclass(frozen=True)
class Shadow:
    """The gradients of one step against float64."""

    loss: float
    true_loss: float
    parameters: tuple[ParameterGradient, ...]
    culprits: tuple[Culprit, ...]
    surrogates: tuple[
        Audit, ...
    ]  # backwards that differ from the derivative and look as if they were meant to
    audits: tuple[Audit, ...]
    cuts: tuple[Cut, ...]
    accumulation: tuple[Accumulation, ...]
    notes: tuple[str, ...]  # what could not be replayed as recorded; every conclusion above leans on it
    nodes: NodeReport | None = None  # where the gradients as a whole did not decide
    departs_at: int | None = None  # the first operation whose replay did not make what was recorded

    @property
    def departed(self) -> bool:
        """What is said of the replay is said of another step."""
        return self.departs_at is not None

    @property
    def right(self) -> bool:
        """Every gradient that arrived is right; paths that are cut are told apart in `cuts`."""
        return not self.culprits and all(p.right or p.verdict == "no gradient" for p in self.parameters)

    @property
    def worst(self) -> ParameterGradient | None:
        return max(self.compared, key=lambda p: p.error, default=None)

    @property
    def error(self) -> float:
        """|got − truth| / |truth| over all parameters together."""
        size = math.sqrt(sum(p.size**2 for p in self.compared))
        return math.sqrt(sum((p.error * p.size) ** 2 for p in self.compared)) / size if size > 0 else 0.0

    @property
    def compared(self) -> list[ParameterGradient]:
        """Those that were held against float64 as a whole, and mean to be the derivative."""
        known = [p for p in self.parameters if p.verdict in ("right", "wrong", "not finite")]
        return [p for p in known if not p.by_nodes and p.pattern != SURROGATE]

    def __str__(self) -> str:
        worst = self.worst
        if self.right and worst is not None:
            head = (
                f"the loss gradient is correct to {self.error:.0e}: "
                f"{len(self.parameters)} parameters against float64, "
                f"worst {worst.name}, {worst.error:.0e} off ({worst.tolerance:.0e} allowed)\n"
                f"loss {self.loss:.8g}, in float64 {self.true_loss:.8g}"
            )
        elif self.right and self.nodes is not None and self.nodes.right:
            head = "the loss gradient is correct, though not comparable as a whole"
        elif self.right and self.surrogates:
            head = "no gradient here means to be the derivative"
        elif self.right:
            head = "no parameter received a gradient"
        else:
            wrong = [p for p in self.parameters if not p.right and p.verdict != "no gradient"]
            known = any(p.verdict != "undecided" for p in wrong)
            head = "\n".join(map(str, self.culprits)) or (
                "the gradient is wrong, and no single place explains it"
                if known
                else "the gradient cannot be judged in this precision"
            )
            word = "wrong" if known or self.culprits else "undecided"
            head += f"\n{len(wrong)} of {len(self.parameters)} parameters have a gradient that is {word}"
            head += "".join(f"\n  {p}" for p in sorted(wrong, key=lambda p: -p.error)[:5])
        nodes = [f"node by node: {self.nodes}"] if self.nodes is not None else []
        parts = [head, *nodes, *map(str, self.cuts), *map(str, self.accumulation)]
        parts += [
            f"not the derivative, perhaps on purpose: {a.call.cls.__name__}: {a.surrogate}"
            for a in self.surrogates
        ]
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)


def shadow(tape: Tape, only: Collection[int] = ()) -> Shadow:
    """Loss and gradients of a taped step in float64, and where the step departs from them.

    With `only`, slots of parameters, nothing is said of the others: that takes less than the whole.
    """
    scaled = _scaled_loss(tape)
    real = _replay_real_step(tape, math.nan, scaled, only)  # fresh memory is NaN: whoever reads it is seen
    never = find_never_written(tape) if real.exact.departs_at is not None or tape.never_written else None
    if never is not None:
        real = _replay_real_step(tape, 0.0, scaled, only)
    truth, narrow = _true_gradients(tape, only)
    scale = _loss_scale(scaled, real.exact)
    parameters = _judge_parameters(tape, real.gradients, truth, {}, scale, only)
    if not all(p.verdict == "no gradient" or (p.right and p.error <= FINE) for p in parameters.values()):
        own = differentiate(tape, only=only).gradients  # how much of it may be rounding
        parameters = _judge_parameters(tape, real.gradients, truth, own, scale, only)
    missing = [tape.slots[slot] for slot, p in parameters.items() if p.verdict == "no gradient"]
    culprits = wrong_functions(tape, real.auditor.audits)
    if never is not None:
        culprits = [
            culprit for culprit in culprits if culprit.what != never.what or culprit.module != never.module
        ]
        culprits.insert(0, _never_written(never))
    surrogates = [a for a in real.auditor.audits if a.surrogate]
    nodes = None
    if surrogates and not culprits:
        parameters = {slot: _excused(p) for slot, p in parameters.items()}
    elif not culprits and any(_is_doubtful(p) for p in parameters.values()):
        nodes = check_nodes(tape)
        culprits += wrong_nodes(tape, nodes)
        judged = not any(a.disputed for a in real.auditor.audits) and not real.auditor.notes
        parameters = {
            slot: _by_nodes(p, nodes, judged, nodes.sizes.get(slot, 0.0) / scale, _walk(tape))
            for slot, p in parameters.items()
        }
    loss = float(real.exact.losses[0].double().sum()) / scale if real.exact.losses else math.nan
    true_loss = float(truth.losses[0].double().sum()) / scale if truth.losses else math.nan
    return Shadow(
        loss,
        true_loss,
        tuple(parameters.values()),
        tuple(culprits),
        tuple(surrogates),
        tuple(real.auditor.audits),
        tuple(find_cuts(tape, missing)),
        tuple(judge_accumulation(tape, real.gradients, real.final)),
        (*narrow, *_notes(tape, real.exact, truth, real.auditor.notes)),
        nodes,
        real.exact.departs_at if never is None else None,
    )


def _true_gradients(tape: Tape, only: Collection[int]) -> tuple[Replay, list[str]]:
    """In float64; where a GPU has no room for that and the step is one in half precision, in float32, with a note."""
    try:
        return differentiate(tape, torch.float64, only=only), []
    except torch.OutOfMemoryError:
        if _coarsest(tape) <= torch.finfo(torch.float32).eps:
            raise
    torch.cuda.empty_cache()
    return differentiate(tape, torch.float32, only=only), [
        "there is no room for float64 on the GPU: compared with float32"
    ]


def _never_written(never: Any) -> Culprit:
    seen = ("a replay in which fresh memory is NaN", "one in which it is zero")
    return Culprit(
        "memory never written", never.what, never.module, never.line, math.inf, never.text, witnesses=seen
    )


def _is_doubtful(parameter: ParameterGradient) -> bool:
    """Wrong as it stands, or with so much room for rounding that a mistake would fit in."""
    return parameter.verdict in ("wrong", "undecided") or (
        parameter.verdict == "right" and parameter.tolerance > COARSE
    )


def _by_nodes(
    parameter: ParameterGradient, nodes: NodeReport, judged: bool, summed: float, walk: float
) -> ParameterGradient:
    """The verdict on a parameter once every node has been asked.

    `summed` is the size of what was added up into its gradient: where float64 leaves nothing of it, `walk` of it is
    what rounding leaves in the step's own precision.
    """
    if not _is_doubtful(parameter) or parameter.pattern == NOTHING_ARRIVES or nodes.wrong:
        return parameter
    compared = parameter.pattern != NOTHING_TO_COMPARE
    there = parameter.size * (1 + parameter.error) if parameter.size > 0 else parameter.error
    if compared and parameter.size <= NOTHING * summed and there <= 8 * walk * summed:
        return replace(parameter, verdict="zero in truth", pattern="", by_nodes=True)
    if parameter.verdict != "right" and nodes.right and judged:
        return replace(parameter, verdict="right", pattern="", by_nodes=True)
    if parameter.verdict == "wrong" and parameter.tolerance > COARSE:
        return replace(parameter, verdict="undecided")
    return parameter


@dataclass
class _RealStep:
    """What the step itself computed, brought back by an exact replay."""

    exact: Replay
    auditor: Auditor
    gradients: dict[int, dict[int, torch.Tensor]]  # backward call -> parameter -> what it brought
    final: dict[int, torch.Tensor]  # parameter -> .grad as the optimizer saw it


def _replay_real_step(
    tape: Tape, fresh: float, scaled: tuple[int, int] | None, only: Collection[int]
) -> _RealStep:
    auditor = Auditor(tape)
    looks = auditor.schedule()
    gradients: dict[int, dict[int, torch.Tensor]] = {}
    for call in tape.top_backwards:
        if call.accumulates:
            gradients[call.index] = {}
            for at, parameter, gradient in real_contributions(tape, call):
                if only and parameter not in only:
                    continue
                looks.setdefault(at, []).append(collect(gradients[call.index], parameter, gradient))
    final: dict[int, torch.Tensor] = {}
    for parameter, (at, gradient) in tape.final_gradients.items():
        if not only or parameter in only:
            looks.setdefault(at, []).append(collect(final, parameter, gradient))
    until = max(looks, default=0) + 1 if only else _before_update(tape, looks)
    exact = replay_exactly(tape, at=looks, keep=scaled or (), fresh=fresh, until=until)
    return _RealStep(exact, auditor, gradients, final)


def _before_update(tape: Tape, looks: dict[int, list]) -> int | None:
    """Behind the last look, if there is only an update to come, and no memory in it that somebody has to write."""
    last = max(looks, default=len(tape.operations)) + 1
    rest = tape.operations[last:]
    return last if all(op.phase == "optimizer" and op.name not in FRESH for op in rest) else None


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


def _judge_parameters(
    tape: Tape,
    real: dict,
    truth: Replay,
    own: dict[int, torch.Tensor],
    scale: float,
    only: Collection[int],
) -> dict[int, ParameterGradient]:
    walk = _walk(tape)
    judged: dict[int, ParameterGradient] = {}
    # what only reads a parameter before the tape began cannot be judged from it
    wanted = {slot for call in truth.per_call.values() for slot in call} | _followed_leaves(tape)
    wanted = wanted & set(only) if only else wanted
    early = any(begins_before(tape, call) for call in tape.top_backwards)
    for slot in (slot for slot in tape.parameters if slot.index in wanted):
        got = _total(real, slot.index)
        right, mine = truth.gradients.get(slot.index), own.get(slot.index)
        found = _judge_one(slot, got, right, mine, walk, scale)
        if early and found.verdict == "wrong":
            found = replace(found, verdict="undecided", pattern="part of its graph is older than the tape")
        judged[slot.index] = found
    return judged


def _judge_one(
    slot: Slot,
    got: torch.Tensor | None,
    right: torch.Tensor | None,
    mine: torch.Tensor | None,
    walk: float,
    scale: float,
) -> ParameterGradient:
    if got is None:
        size = 0.0 if right is None else float(torch.linalg.vector_norm(right))
        verdict = "no gradient" if size == 0 else "wrong"
        return ParameterGradient(
            slot.name, 1.0, 0.0, 0.0, 0.0, size / scale, verdict, "" if size == 0 else NOTHING_ARRIVES
        )
    if right is None or not math.isfinite(abs(complex(right.sum()))):
        # the float64 replay has nothing to compare with; a gradient of exact zeros needs nothing
        verdict = "undecided" if bool(got.any()) else "zero in truth"
        verdict = verdict if bool(torch.isfinite(got).all()) else "not finite"
        text = NOTHING_TO_COMPARE
        there = float(torch.linalg.vector_norm(wide(got))) / scale
        return ParameterGradient(slot.name, there, 0.0, math.inf, 0.0, 0.0, verdict, text)
    size = float(torch.linalg.vector_norm(right))
    noise = 0.0 if mine is None else distance_between(mine, right)
    # eight times the measured rounding, and at least the random walk of one rounding an operation
    floor = max(8 * noise, walk * size, 1e-5 * size)
    distance = distance_between(got, right)
    error, tolerance = (distance / size, floor / size) if size > 0 else (distance, floor)
    if not math.isfinite(distance):
        verdict = "not finite"
    elif distance > floor:
        verdict = "wrong" if size > 0 and tolerance <= CHAOTIC else "undecided"
    elif size == 0 or size <= 4 * noise:
        verdict = "zero in truth" if size <= 4 * noise and walk <= FINE else "undecided"
    else:
        verdict = "right" if tolerance <= CHAOTIC else "undecided"
    pattern = describe_difference(got, right, tolerance) if verdict == "wrong" else ""
    relative_noise = noise / size if size > 0 else noise
    angle = 1.0  # to nine digits, where they are so close
    if not error <= CLOSE:
        angle = cosine(got, right) if size > 0 and math.isfinite(distance) else 0.0
    return ParameterGradient(
        slot.name, error, relative_noise, tolerance, angle, size / scale, verdict, pattern
    )


def _excused(parameter: ParameterGradient) -> ParameterGradient:
    """Behind a straight-through estimator the step is not meant to follow the derivative."""
    if parameter.verdict not in ("wrong", "undecided"):
        return parameter
    values = {**parameter.__dict__, "verdict": "right", "pattern": SURROGATE}
    return ParameterGradient(**{**values, "tolerance": max(parameter.tolerance, parameter.error)})


def _total(real: dict[int, dict[int, torch.Tensor]], slot: int) -> torch.Tensor | None:
    parts = [call[slot] for call in real.values() if slot in call]
    return sum(parts[1:], parts[0]) if parts else None


def _followed_leaves(tape: Tape) -> set[int]:
    """Leaves that ask for a gradient and were read by a forward."""
    forward = (op for op in tape.operations if op.in_backward is None and op.phase == "forward")
    read = (references((op.args, op.kwargs)) for op in forward)
    given = (references(call.args) for call in tape.functions)
    return {ref.slot for refs in (*read, *given) for ref in refs if ref.tracked}


def _walk(tape: Tape) -> float:
    """How far one rounding an operation may take a number, relative to it: they add up like a random walk."""
    return _coarsest(tape) * math.sqrt(max(1, sum(op.in_backward is None for op in tape.operations)))


def _coarsest(tape: Tape) -> float:
    floats = {slot.dtype for slot in tape.slots if slot.dtype.is_floating_point and slot.dtype.itemsize >= 2}
    return max((torch.finfo(dtype).eps for dtype in floats), default=torch.finfo(torch.float32).eps)


def _notes(tape: Tape, exact: Replay, truth: Replay, others: list[str]) -> list[str]:
    notes = [tape.broken] if tape.broken else []
    if exact.departs_at is not None:
        operation = tape.operations[exact.departs_at]
        notes.append(
            f"{operation.name} made something else when replayed ({tape.place(operation)}): "
            "what follows it is approximate"
        )
    seen: set[str] = set()
    for index, text in truth.notes.items():
        if text not in seen and index < len(tape.operations):
            seen.add(text)
            notes.append(f"{text} ({tape.place(tape.operations[index])})")
    return notes[:8] + others
