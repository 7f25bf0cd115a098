"""Where a right gradient goes in and a wrong one comes out: the function, the line, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradproof.tape.audit import Audit
from gradproof.tape.operations import Line, Tape
from gradproof.tape.pattern import describe_difference, relative_error
from gradproof.tape.replay import collect, differentiate, real_contributions, replay_exactly
from gradproof.tape.stale import (
    backward_operations,
    find_foreign_activation,
    find_overwritten,
    find_recomputed_differently,
)

LOOKED_THROUGH = {"detach", "view", "t", "alias", "transpose", "expand"}


@dataclass(frozen=True)
class Culprit:
    """The place where a right gradient goes in and a wrong one comes out."""

    # wrong backward, stale activation, recomputed differently, memory never written, changed by a hook
    kind: str
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


def wrong_functions(tape: Tape, audits: list[Audit]) -> list[Culprit]:
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
        return (
            "stale activation",
            f"{read.name} reads a value that is not from this forward: {text}",
            read.line,
        )
    again = find_recomputed_differently(tape, call, backward)
    if again is not None:
        return (
            "recomputed differently",
            f"{again.name} is repeated in backward with another result than in forward",
            again.line,
        )
    return "wrong backward", "", None


def wrong_nodes(tape: Tape) -> list[Culprit]:
    """No hand-written function is at fault: compare the gradient at each slot, from the loss backwards."""
    pairs = [
        (at, slot, gradient)
        for call in tape.top_backwards
        if not call.create_graph
        for at, slot, gradient in call.received
    ]
    pairs += [
        triple for call in tape.top_backwards if call.accumulates for triple in real_contributions(tape, call)
    ]
    if len([call for call in tape.top_backwards if call.accumulates]) != 1:
        return []  # several backwards reach a slot: their gradients cannot be told apart slot by slot
    got: dict[int, torch.Tensor] = {}
    looks: dict[int, list] = {}
    for at, slot, gradient in sorted(pairs):
        looks.setdefault(at, []).append(collect(got, slot, gradient))
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
    while made_by is not None and tape.operations[made_by].name in LOOKED_THROUGH:
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
    siblings = [
        op for op in tape.operations if op.made_from == operation.made_from and op.in_backward is not None
    ]
    overwritten = find_overwritten(tape, origin.index + 1, siblings)
    if overwritten is not None:
        write, _ = overwritten
        text = f"what {operation.node} saved was overwritten by {write.name}, {tape.place(write)}"
        return Culprit("stale activation", origin.name, origin.module, origin.line, error, pattern, text)
    return Culprit(
        "wrong gradient", operation.node or operation.name, origin.module, origin.line, error, pattern
    )
