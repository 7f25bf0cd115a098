"""Where a right gradient goes in and a wrong one comes out: the function, the line, and why."""

from __future__ import annotations

from dataclasses import dataclass

from gradproof.tape.audit import Audit
from gradproof.tape.nodes import NodeReport, WrongNode
from gradproof.tape.operations import Line, Tape
from gradproof.tape.stale import (
    backward_operations,
    find_foreign_activation,
    find_overwritten,
    find_recomputed_differently,
)

SEEN = {  # on the tape, whatever the numbers say
    "stale activation": ("the order of the calls",),
    "recomputed differently": ("the two results of one operation",),
}
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
    witnesses: tuple[str, ...] = ()  # independent of each other; one alone can be mistaken

    @property
    def confidence(self) -> str:
        return "proven" if len(self.witnesses) > 1 else "likely"

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        lines = [f"{self.kind}: {self.what}{where}: {self.pattern}"]
        lines += [f"  at       {self.line.file}:{self.line.number}"] if self.line else []
        lines += [f"  called   {self.called}"] if self.called else []
        lines += [f"  evidence {self.evidence}"] if self.evidence else []
        lines += [f"  by       {' and '.join(self.witnesses)}"] if self.witnesses else []
        return "\n".join(lines)


def wrong_functions(tape: Tape, audits: list[Audit]) -> list[Culprit]:
    """One culprit a call, in the order in which backward reached them."""
    culprits: list[Culprit] = []
    seen: set[int] = set()
    for audit in audits:
        if audit.right or audit.surrogate or audit.disputed or audit.call.index in seen:
            continue
        seen.add(audit.call.index)
        others = [a for a in audits if a.call is audit.call and not a.right and not a.disputed]
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
                (*max((a.witnesses for a in others), key=len), *SEEN.get(kind, ())),
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


def wrong_nodes(tape: Tape, report: NodeReport) -> list[Culprit]:
    """The places at which the node-by-node comparison found a wrong gradient, in the order of backward."""
    return [_culprit_at(tape, wrong) for wrong in report.wrong]


def _culprit_at(tape: Tape, wrong: WrongNode) -> Culprit:
    error, pattern, witnesses = wrong.error, wrong.pattern, wrong.witnesses
    made_by = tape.slots[wrong.gradient].made_by
    while made_by is not None and tape.operations[made_by].name in LOOKED_THROUGH:
        refs = tape.operations[made_by].reads
        if not refs or tape.slots[refs[0]].made_by is None:
            break
        made_by = tape.slots[refs[0]].made_by
    if made_by is None:
        return Culprit(
            "wrong gradient", "made outside PyTorch", "", None, error, pattern, witnesses=witnesses
        )
    operation = tape.operations[made_by]
    origin = tape.operations[operation.made_from] if operation.made_from is not None else operation
    if operation.line is not None and operation.in_backward is not None:
        seen = (*witnesses, f"{operation.name} runs inside backward at {operation.line}")
        return Culprit(
            "changed by a hook", operation.name, origin.module, operation.line, error, pattern, witnesses=seen
        )
    siblings = [
        op for op in tape.operations if op.made_from == operation.made_from and op.in_backward is not None
    ]
    overwritten = find_overwritten(tape, origin.index + 1, siblings)
    if overwritten is not None:
        write, _ = overwritten
        text = f"what {operation.node} saved was overwritten by {write.name}, {tape.place(write)}"
        return Culprit(
            "stale activation",
            origin.name,
            origin.module,
            origin.line,
            error,
            pattern,
            text,
            witnesses=(*witnesses, *SEEN["stale activation"]),
        )
    return Culprit(
        "wrong gradient",
        operation.node or operation.name,
        origin.module,
        origin.line,
        error,
        pattern,
        witnesses=witnesses,
    )
