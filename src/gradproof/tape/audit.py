"""Is the backward of each hand-written autograd.Function of a step the derivative of its forward?

Each call is judged alone, on the inputs and the incoming gradient it had in the step: its taped forward is
differentiated in float64, and the same derivative in the step's own precision says how much is rounding. What is wrong
by this witness is put before a second one, a difference quotient of the same forward along the error.
Where the forward cannot be replayed (Triton, NumPy, C++ inside), directional finite differences decide alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import FunctionCall, Line, Operation, Ref, Tape
from gradproof.tape.pattern import describe_difference, relative_error, wide
from gradproof.tape.player import Player
from gradproof.tape.witness import DERIVATIVE, DIFFERENCE, second_witness

DIRECTIONS = 3


@dataclass(frozen=True)
class Audit:
    """The verdict on one backward of one call."""

    call: FunctionCall
    argument: int  # place among the tensor arguments
    parameter: str  # its name when the argument is a parameter
    error: float
    tolerance: float
    pattern: str
    method: str  # derivative in float64, or finite differences
    surrogate: str = ""  # why the difference may be meant: straight-through estimators, gradient reversal
    witnesses: tuple[str, ...] = ()  # who says that it is wrong
    disputed: bool = False  # a difference quotient sides with the backward, not with the derivative

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance

    @property
    def line(self) -> Line:
        return self.call.backward_line

    def __str__(self) -> str:
        what = f"with respect to {self.parameter or f'argument {self.argument}'}"
        where = f" in {self.call.module}" if self.call.module else ""
        verdict = "right" if self.right else "wrong"
        return (
            f"backward of {self.call.cls.__name__}{where} is {verdict} {what}: {self.pattern or 'the same'}\n"
            f"  relative error {self.error:.2g}, {self.tolerance:.2g} allowed ({self.method})\n"
            f"  backward       {self.line.file}:{self.line.number}\n"
            f"  called         {self.call.line}"
        )


@dataclass
class Auditor:
    """Collects what each call needs during an exact replay, and judges it when its backward has ended."""

    tape: Tape
    audits: list[Audit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    captured: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # call -> backwards still to come

    def schedule(self) -> dict[int, list[Callable[[Player], None]]]:
        """What to look at before which operation of an exact replay."""
        looks: dict[int, list[Callable]] = {}
        for call in self.tape.functions:
            if not call.backwards:
                continue
            looks.setdefault(call.first, []).append(lambda player, call=call: self._capture(player, call))
            for at, gradients_in, gradients_out, _ in call.backwards:
                looks.setdefault(at, []).append(
                    lambda player, call=call, i=gradients_in, o=gradients_out: self._judge(player, call, i, o)
                )
        return looks

    def _capture(self, player: Player, call: FunctionCall) -> None:
        slots = {*external_reads(self.tape, call), *call.inputs}
        values = {}
        for slot in slots:
            try:
                values[slot] = player.value(slot).detach().clone()
            except CannotReplay:
                continue
        self.captured[call.index] = values

    def _judge(self, player: Player, call: FunctionCall, slots_in: list, slots_out: list) -> None:
        self.waiting[call.index] = self.waiting.get(call.index, len(call.backwards)) - 1
        try:
            gradients_in = [None if slot is None else player.value(slot).detach() for slot in slots_in]
            gradients_out = [None if slot is None else player.value(slot).detach() for slot in slots_out]
            judge = judge_by_differences if call.opaque else judge_by_derivative
            self.audits += judge(self.tape, call, self.captured[call.index], gradients_in, gradients_out)
        except Exception as error:
            self.notes.append(
                f"backward of {call.cls.__name__} could not be judged: {str(error)[:160] or error!r}"
            )
        if self.waiting[call.index] == 0:
            del self.captured[call.index]


def segment(tape: Tape, call: FunctionCall) -> list[Operation]:
    return [op for op in tape.operations[call.first : call.last] if op.in_backward is None]


def external_reads(tape: Tape, call: FunctionCall) -> set[int]:
    """Slots a forward reads that it did not make."""
    made: set[int] = set()
    read: set[int] = set()
    for operation in segment(tape, call):
        read.update(slot for slot in operation.reads if slot not in made)
        made.update(slot for slot in operation.makes if slot not in read)
    return read


def derivative(
    tape: Tape, call: FunctionCall, values: dict, gradients_in: list, dtype: torch.dtype | None
) -> list[torch.Tensor | None]:
    """The vector-Jacobian product of a call's taped forward, one entry a tensor argument."""
    player = Player(tape, dtype, values, autograd=True, open_functions=False)
    with player.saving.hooks():
        tracked = [arg for arg in call.args if isinstance(arg, Ref)]
        written = {slot for operation in segment(tape, call) for slot in operation.writes}
        leaves = []
        for ref in tracked:
            tensor = player.value(ref.slot)
            if ref.tracked and not tensor.requires_grad:
                tensor = player.env[ref.slot] = tensor.detach().requires_grad_()
                if ref.slot in written:
                    player.env[ref.slot] = tensor.clone()  # a leaf cannot be changed in place
            leaves.append(tensor)
        for operation in segment(tape, call):
            player.step(operation)
            if operation.index in player.replay.notes:
                raise CannotReplay(player.replay.notes[operation.index])
        outputs, weights = [], []
        for slot, gradient in zip(call.outputs, gradients_in, strict=False):
            if slot is not None and gradient is not None and player.value(slot).requires_grad:
                outputs.append(player.value(slot))
                weights.append(gradient.to(outputs[-1].dtype))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(
            torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
            if outputs
            else [None] * len(wanted)
        )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def judge_by_derivative(
    tape: Tape, call: FunctionCall, values: dict, gradients_in: list, gradients_out: list
) -> list[Audit]:
    refs = [arg for arg in call.args if isinstance(arg, Ref)]
    truth = derivative(tape, call, values, gradients_in, torch.float64)
    own = derivative(tape, call, values, gradients_in, None)
    eps = max(_eps(tape, call), *(torch.finfo(g.dtype).eps for g in gradients_in if g is not None), 0.0)
    depth = max(1, len(segment(tape, call)))
    size_in = math.sqrt(sum(float(g.double().square().sum()) for g in gradients_in if g is not None))
    audits = []
    for place, ref in enumerate(refs):
        if not ref.tracked:
            continue
        got = gradients_out[place] if place < len(gradients_out) else None
        right = truth[place]
        if right is None:
            right = torch.zeros(
                tape.slots[ref.slot].shape, dtype=torch.float64, device=tape.slots[ref.slot].device
            )
        right, mine = wide(right), own[place]
        noise = float(torch.linalg.vector_norm((right if mine is None else wide(mine)) - right))
        size = float(torch.linalg.vector_norm(right))
        # eight times the measured rounding, at least two units an operation, walking at random
        floor = max(8 * noise, 2 * eps * math.sqrt(depth) * size, 1e-5 * size)
        if size <= eps * size_in:  # what came in has cancelled, and left the rounding of its own size
            floor = max(floor, 4 * eps * size_in)
        tolerance = floor / size if size > 0 else floor
        if got is None:
            error = 1.0 if size > floor else 0.0
        elif size > 0:
            error = relative_error(got, right)
        else:
            error = float(torch.linalg.vector_norm(wide(got)))
        error = error if error == error else float("inf")
        if not all(
            bool(torch.isfinite(t).all()) for t in (right, *(g for g in gradients_in if g is not None))
        ):
            continue  # not finite already: the first bad operation is the question, not the derivative
        pattern = "" if error <= tolerance else describe_difference(got, right, tolerance)
        name = _parameter_name(tape, ref.slot)
        surrogate = _surrogate(tape, call, got, right) if error > tolerance else ""
        witnesses: tuple[str, ...] = ()
        disputed = False
        if error > tolerance and not surrogate:
            agrees = difference_agrees(tape, call, values, gradients_in, ref.slot, got, right)
            witnesses, disputed = (DERIVATIVE, DIFFERENCE) if agrees else (DERIVATIVE,), agrees is False
        audits.append(
            Audit(
                call,
                place,
                name,
                error,
                tolerance,
                pattern,
                "derivative in float64",
                surrogate,
                witnesses,
                disputed,
            )
        )
    return audits


def difference_agrees(
    tape: Tape,
    call: FunctionCall,
    values: dict,
    gradients_in: list,
    slot: int,
    got: torch.Tensor | None,
    right: torch.Tensor,
) -> bool | None:
    """Does a difference quotient of a call's taped forward side with its derivative? None where it cannot be had."""

    def outputs_at(x: torch.Tensor) -> list[torch.Tensor | None]:
        player = Player(tape, torch.float64, {**values, slot: x}, open_functions=False)
        for operation in segment(tape, call):
            player.step(operation)
            if operation.index in player.replay.notes:
                raise CannotReplay(player.replay.notes[operation.index])
        return [None if out is None else player.env.get(out) for out in call.outputs]

    return second_witness(outputs_at, gradients_in, values[slot], got, right)


def judge_by_differences(
    tape: Tape, call: FunctionCall, values: dict, gradients_in: list, gradients_out: list
) -> list[Audit]:
    """Directional finite differences of the function itself: Σ⟨g, F(x + hv) − F(x − hv)⟩ / 2h against
    ⟨gradient, v⟩.

    It is called in the dtypes that it was called with: a kernel behind a pointer makes garbage of any other.
    """
    audits = []
    for place, ref in enumerate(arg for arg in call.args if isinstance(arg, Ref)):
        got = gradients_out[place] if place < len(gradients_out) else None
        x = values[ref.slot].double()
        if not ref.tracked or x.numel() == 0:
            continue
        got = torch.zeros_like(x) if got is None else got.double()
        eps = max(torch.finfo(call.dtypes[ref.slot]).eps, _eps_of(gradients_in))
        errors, allowed = [], []
        generator = torch.Generator().manual_seed(0)
        for _ in range(DIRECTIONS):
            v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            v = v * x.square().mean().sqrt().clamp_min(1e-3)
            slope, doubt, size = _slope(call, values, gradients_in, ref.slot, v, eps ** (1 / 3))
            said = float((got * v).sum())
            size = max(abs(slope), abs(said), size, 1e-300)
            errors.append(abs(slope - said) / size)
            allowed.append((doubt + 8 * eps * float((got * v).norm())) / size + 100 * eps ** (2 / 3))
        if not all(map(math.isfinite, (*errors, *allowed))):
            raise CannotReplay("its results are not finite when it is called again")
        worst = max(range(DIRECTIONS), key=lambda i: errors[i] / allowed[i])
        pattern = (
            "" if errors[worst] <= allowed[worst] else f"{errors[worst]:.2g} off along a random direction"
        )
        method = f"finite differences of the function itself ({call.opaque})"
        name = _parameter_name(tape, ref.slot)
        witnesses = (method,) if pattern else ()
        audits.append(
            Audit(call, place, name, errors[worst], allowed[worst], pattern, method, witnesses=witnesses)
        )
    return audits


def _slope(
    call: FunctionCall, values: dict, gradients_in: list, slot: int, v: torch.Tensor, h: float
) -> tuple[float, float, float]:
    """(the slope along v, what rounding and curvature leave open, its size where the terms do not cancel)."""
    x = values[slot].double()
    asked = (-2, -1, 0, 1, 2)
    moved = {k: (x + k * h * v).to(call.dtypes[slot]).double() for k in asked}
    outs = {k: call_function(call, {**values, slot: moved[k]}) for k in asked}
    near, terms = _weighted(outs[1], outs[-1], gradients_in)
    far, _ = _weighted(outs[2], outs[-2], gradients_in)
    near, far = near / (2 * h), far / (4 * h)
    # fourth differences: slopes and curvature cancel in them, and what is left is what it jitters by
    wide = [_weighted(outs[k], outs[0], gradients_in)[0] for k in (-2, -1, 1, 2)]
    jitter = abs(wide[0] - 4 * wide[1] - 4 * wide[2] + wide[3]) / math.sqrt(70)
    size = math.sqrt(sum(_square(o, g) for o, g in zip(outs[0], gradients_in, strict=False)))
    eps = max(torch.finfo(call.dtypes[slot]).eps, _eps_of(gradients_in))
    return near, 2 * abs(near - far) + (4 * jitter + 8 * eps * size) / h, terms / (2 * h)


def _square(out: torch.Tensor | None, gradient: torch.Tensor | None) -> float:
    return (
        0.0 if out is None or gradient is None else float((out.double() * gradient.double()).square().sum())
    )


def _eps_of(gradients: list) -> float:
    return max((torch.finfo(g.dtype).eps for g in gradients if g is not None), default=0.0)


def _weighted(here: list, there: list, gradients_in: list) -> tuple[float, float]:
    """(Σ⟨g, here − there⟩, the size of what was summed): differences first, so that what stays does not round."""
    parts = [
        (a.double() - b.double()) * g.double()
        for a, b, g in zip(here, there, gradients_in, strict=False)
        if g is not None and a is not None
    ]
    return sum(float(p.sum()) for p in parts), math.sqrt(sum(float(p.square().sum()) for p in parts))


def call_function(call: FunctionCall, values: dict) -> list:
    """Its outputs for some values of its arguments, each in the dtype it was called with."""

    def arg(value: object) -> object:
        return values[value.slot].to(call.dtypes[value.slot]) if isinstance(value, Ref) else value

    with torch.no_grad():
        result = call.cls.apply(*(arg(value) for value in call.args))
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _eps(tape: Tape, call: FunctionCall) -> float:
    """The coarsest rounding inside a call."""
    slots = {slot for op in segment(tape, call) for slot in (*op.reads, *op.makes)} | set(call.inputs)
    floats = [tape.slots[slot].dtype for slot in slots if tape.slots[slot].dtype.is_floating_point]
    return max((torch.finfo(dtype).eps for dtype in floats), default=torch.finfo(torch.float32).eps)


def _parameter_name(tape: Tape, slot: int) -> str:
    """The parameter a slot is, looked at through casts and views."""
    for _ in range(8):
        if tape.slots[slot].kind == "parameter":
            return tape.slots[slot].name
        made_by = tape.slots[slot].made_by
        if made_by is None or tape.operations[made_by].name not in (
            "_to_copy",
            "detach",
            "view",
            "t",
            "alias",
            "transpose",
        ):
            return ""
        slot = tape.operations[made_by].reads[0]
    return ""


STEP_FUNCTIONS = {
    "round", "sign", "sgn", "floor", "ceil", "trunc", "gt", "ge", "lt", "le", "heaviside", "argmax", "argmin",
    "bernoulli", "multinomial", "topk", "sort", "argsort", "bucketize", "searchsorted", "_to_copy",
}  # fmt: skip


def _surrogate(tape: Tape, call: FunctionCall, got: torch.Tensor | None, right: torch.Tensor) -> str:
    """Why a backward that is not the derivative may be meant; empty when nothing speaks for it."""
    names = {op.name for op in segment(tape, call)}
    if not bool(right.any()) and got is not None and bool(got.any()) and names & STEP_FUNCTIONS:
        return "its forward is a step function: a straight-through estimator?"
    if names <= {"view", "alias", "view_as", "clone", "detach", "_unsafe_view"}:
        return "its forward passes the input on: a gradient reversal, scaling or clipping on purpose?"
    return ""
