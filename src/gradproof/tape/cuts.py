"""Where the path of a gradient is cut: parameters that shape the loss and yet receive no gradient from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gradproof.tape.operations import Line, Operation, Slot, Tape, references
from gradproof.tape.player import Player
from gradproof.tape.replay import forward_operations

LEAVES_PYTORCH = {"_local_scalar_dense": ".item()", "equal": "a comparison", "is_nonzero": "a condition"}
STEPS = {"argmax", "argmin", "round", "floor", "ceil", "sign", "trunc", "bernoulli", "multinomial"}


@dataclass(frozen=True)
class Cut:
    """A parameter without a gradient, and the operation at which its path to the loss ends."""

    parameter: str
    how: str
    module: str
    line: Line | None
    operation: int | None = None  # the place of the cut on the tape

    def __str__(self) -> str:
        where = (
            f"{f'{self.module}, ' if self.module else ''}{self.line}" if self.line else "nowhere on the tape"
        )
        return f"{self.parameter} gets no gradient: {self.how}, {where}"


def find_cuts(tape: Tape, without_gradient: list[Slot], in_part: bool = False) -> list[Cut]:
    """For each of these parameters, the first place where the way to the loss is cut, for all of it or in part."""
    towards_loss = _slots_towards(tape, tape.loss_slots)
    kept = _kept_results(tape)
    return [_cut_of(tape, parameter, towards_loss, kept, in_part) for parameter in without_gradient]


def _slots_towards(tape: Tape, targets: list[int]) -> set[int]:
    found = set(targets)
    for operation in reversed(tape.operations):
        if operation.in_backward is None and not found.isdisjoint((*operation.makes, *operation.writes)):
            found.update(operation.reads)
    return found


def _cut_of(tape: Tape, parameter: Slot, towards_loss: set[int], kept: set[int], in_part: bool) -> Cut:
    followed, influenced = {parameter.index}, {parameter.index}
    candidates: list[tuple[Operation, str]] = []
    leaving: tuple[Operation, str] | None = None
    for operation in tape.operations:
        if operation.in_backward is not None or operation.phase == "optimizer":
            continue
        if influenced.isdisjoint(operation.reads):
            continue
        influenced.update((*operation.makes, *operation.writes))
        if followed.isdisjoint(operation.reads):
            continue
        if operation.name in LEAVES_PYTORCH:
            leaving = (operation, f"{LEAVES_PYTORCH[operation.name]} turns it into a Python number")
        how = _stops(tape, operation, followed)
        if how and operation.index not in kept:
            candidates.append((operation, how))
        elif not how:
            followed.update((*operation.makes, *operation.writes))
    is_open = not followed.isdisjoint(tape.loss_slots) and parameter.index in _reached(tape)
    if is_open and not in_part:
        return Cut(
            parameter.name, "a way to the loss is open: a gradient comes back, and it is zero", "", None
        )
    # where several ways are cut, a cut of autograd is the slip; sampling and comparing have no gradient anyway
    for operation, how in sorted(candidates, key=lambda c: not c[1].endswith(("cuts it", "no_grad"))):
        if not towards_loss.isdisjoint((*operation.makes, *operation.writes)):
            line = tape.functions[operation.call].line if operation.call is not None else operation.line
            return Cut(parameter.name, how, operation.module, line, operation.index)
    last = leaving or (candidates[-1] if candidates else None)
    if last is not None and parameter.index not in towards_loss:
        how = f"{last[1]}, and no operation leads on to the loss"
        return Cut(parameter.name, how, last[0].module, last[0].line, last[0].index)
    how = (
        "it is part of the loss, but its backward returned nothing"
        if parameter.index in towards_loss
        else "it is not used by the loss"
    )
    return Cut(parameter.name, how, "", None)


def _reached(tape: Tape) -> set[int]:
    """The parameters that a backward brought a gradient to, be it zero."""
    return {slot for call in tape.backwards if call.accumulates for _, slot, _ in call.contributions}


def _stops(tape: Tape, operation: Operation, followed: set[int]) -> str:
    """Why an operation passes no gradient on; empty when it does."""
    refs_untracked = [
        ref
        for ref in references((operation.args, operation.kwargs))
        if ref.slot in followed and not ref.tracked
    ]
    if operation.call is not None:
        call = tape.functions[operation.call]
        if any(ref.tracked for ref in references(call.args)):
            return ""
        return f"no tensor that {call.cls.__name__} is given wants a gradient, and that cuts it"
    if operation.name == "detach":
        return "detach() or .data cuts it"
    if operation.name == "alias" and refs_untracked:
        return "a shallow copy (.data) cuts it"
    if not operation.grad_enabled:
        return f"{operation.name} runs under no_grad"
    made = [tape.slots[slot].dtype for slot in operation.makes]
    if made and not any(dtype.is_floating_point or dtype.is_complex for dtype in made):
        return f"{operation.name} makes integers or booleans of it"
    if operation.name in STEPS:
        return f"{operation.name} has no slope"
    return ""


def _kept_results(tape: Tape) -> set[int]:
    """The detaches by which autograd keeps results for its backward (softmax, exp, …): nobody else reads them."""
    forward = [op for op in tape.operations if op.in_backward is None]
    read = {*tape.loss_slots, *(slot for operation in forward for slot in operation.reads)}
    return {op.index for op in forward if op.name == "detach" and read.isdisjoint(op.makes)}


def gradients_through(tape: Tape, cut: int) -> dict[int, torch.Tensor]:
    """Every parameter's gradient in float64 as it were if an operation that cuts the path did not.

    Followed are a detach, and what runs without gradient behind it; where the path goes through whole numbers or leaves
    PyTorch there is nothing to follow, and the gradients are those of the step.
    """
    player = _Through(tape, _chain(tape, cut))
    with player.saving.hooks():
        player.play(forward_operations(tape, None))
    return player.replay.gradients


def _chain(tape: Tape, cut: int) -> set[int]:
    """The operation that cuts, and those after it that go on with its result without gradient."""
    through, made = {cut}, {*tape.operations[cut].makes, *tape.operations[cut].writes}
    for operation in tape.operations[cut + 1 :]:
        if (
            operation.in_backward is None
            and not operation.grad_enabled
            and not made.isdisjoint(operation.reads)
        ):
            through.add(operation.index)
            made.update((*operation.makes, *operation.writes))
    return through


class _Through(Player):
    """A replay in float64 to which some operations are no cut."""

    def __init__(self, tape: Tape, through: set[int]) -> None:
        super().__init__(tape, torch.float64, None, autograd=True, follow_cuts=True)
        self.through = through

    def step(self, operation: Operation) -> None:
        if operation.index in self.through:
            func = torch.ops.aten.alias.default if operation.name == "detach" else operation.func
            operation = replace(operation, grad_enabled=True, func=func)
        super().step(operation)
