"""The first operation that makes a NaN or an infinity which reaches the loss, a gradient or a parameter.

bad = find_first_bad_operation(tape)
print(bad)  # operator, module, source line, the operands that did it, the chain to the loss, the batch row
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from gradproof.tape.execute import CannotReplay
from gradproof.tape.operations import Line, Operation, Tape
from gradproof.tape.pattern import ranges
from gradproof.tape.player import Player
from gradproof.tape.rows import trace_rows
from gradproof.tape.trace import Bad, Trace, follow, origins


@dataclass(frozen=True)
class Operand:
    """One argument of the bad operation."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    zeros: int
    at_bad: float | None  # its value where the first bad result is

    def __str__(self) -> str:
        here = "" if self.at_bad is None else f", {self.at_bad:.4g} where the result is bad"
        zeros = f", {self.zeros} zeros" if self.zeros else ""
        return (
            f"{self.name} {self.dtype}{list(self.shape)} from {self.low:.4g} to {self.high:.4g}{zeros}{here}"
        )


@dataclass(frozen=True)
class FirstBad:
    """Where a NaN or an infinity was born, and what it reached."""

    kind: str  # operation, data, parameter, memory never written
    index: int  # of the operation on the tape; −1 for a leaf
    operator: str  # the forward operator, also of a backward birth
    phase: str  # forward, backward, optimizer
    node: str
    module: str
    line: Line | None
    value: str  # nan or inf
    count: int
    total: int
    where: tuple[int, ...]  # the first bad element
    operands: tuple[Operand, ...]
    why: str
    chain: tuple[str, ...]
    reaches: str
    rows: str  # the batch row, position or token it came from
    scaled: bool  # a GradScaler scaled this loss and skips the step
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        made = f"{self.operator} in {self.phase}" + (f" ({self.node})" if self.node else "")
        lines = [
            f"first bad value: {self.value} from {made}"
            if self.kind == "operation"
            else f"first bad value: {self.why}"
        ]
        lines += [f"  module   {self.module}"] if self.module else []
        lines += [f"  line     {self.line}"] if self.line else []
        lines += [f"  because  {self.why}"] if self.kind == "operation" and self.why else []
        lines += [f"  operand  {operand}" for operand in self.operands]
        lines.append(f"  result   {self.count} of {self.total} entries, first at {self.where}")
        lines += [f"  from     {self.rows}"] if self.rows else []
        lines += [f"  reaches  {self.reaches}" + (f" by {' → '.join(self.chain)}" if self.chain else "")]
        lines += ["  (the loss is scaled: a GradScaler skips this step)"] if self.scaled else []
        return "\n".join(lines + [f"  note     {note}" for note in self.notes])


@dataclass(frozen=True)
class NeverWritten:
    """Fresh memory that is read before anything is written to it."""

    what: str
    module: str
    line: Line | None
    text: str

    def __str__(self) -> str:
        return f"{self.what}: {self.text}, {self.line}"


def find_first_bad_operation(tape: Tape) -> FirstBad | None:
    """The first operation whose non-finite result reaches the loss, a gradient or a parameter."""
    trace = follow(tape, fresh=math.nan)
    found = _first(tape, trace)
    if found is None:
        return None
    bad, chain, reaches = found
    if bad.operation < 0 and tape.slots[bad.slot].kind == "parameter":
        born_here = _first(tape, trace, in_operations=True)
        if born_here is not None:  # of finite operands: what has spoiled the weights happens again
            again = _operation(tape, *born_here)
            return replace(
                again, notes=(f"{tape.slots[bad.slot]} was not finite before, either", *again.notes)
            )
    if bad.kind == "fresh":
        genuine = _first(tape, follow(tape, fresh=0.0))
        if genuine is not None:
            bad, chain, reaches = genuine
        else:
            return _never_written(tape, bad, chain, reaches)
    return _leaf(tape, bad, chain, reaches) if bad.operation < 0 else _operation(tape, bad, chain, reaches)


def find_never_written(tape: Tape) -> NeverWritten | None:
    """Memory that was never written and yet reaches the loss or a gradient."""
    for index, text in tape.never_written.items():
        operation = tape.operations[index]
        return NeverWritten(
            "fresh memory", operation.module, operation.line, f"{text} were read and never written"
        )
    trace = follow(tape, fresh=math.nan)
    found = _first(tape, trace)
    if found is None or found[0].kind != "fresh":
        return None
    described = _never_written(tape, *found)
    return NeverWritten(described.operator, described.module, described.line, described.why)


def _first(tape: Tape, trace: Trace, in_operations: bool = False) -> tuple[Bad, list[Bad], str] | None:
    """What was bad first, of all that reaches what counts; or what an operation made first, of finite values."""
    groups = [[("the loss", bad) for bad in trace.loss], trace.outputs, trace.gradients, trace.parameters]
    words = ("{}", "{}", "the gradient of {}", "{} after the optimizer's step")
    for targets, word in zip(groups, words, strict=True):
        if not targets:
            continue
        births = origins([bad for _, bad in targets])
        if in_operations:
            births = {index: found for index, found in births.items() if _made_of_finite(trace, found[0])}
        if not births:
            continue
        index = min(births, key=lambda i: (i if i >= 0 else -1, i))
        bad, chain = births[index]
        names = [name for name, target in targets if target is chain[-1]] or [targets[0][0]]
        return bad, chain, word.format(names[0])
    return None


def _made_of_finite(trace: Trace, bad: Bad) -> bool:
    """Whether an operation made it of values that are finite, or infinite on purpose."""
    if bad.operation < 0 or bad.kind != "born":
        return False
    read = [trace.by_slot.get(slot) for slot in trace.tape.operations[bad.operation].reads]
    return all(other is None or other is bad or other.kind == "meant" for other in read)


def _operation(tape: Tape, bad: Bad, chain: list[Bad], reaches: str) -> FirstBad:
    operation = tape.operations[bad.operation]
    origin = tape.operations[operation.made_from] if operation.made_from is not None else operation
    operands, mask, player = _operands_of(tape, operation, bad)
    in_backward = operation.in_backward is not None
    count = int(mask.sum()) if mask is not None else 0
    where = tuple(mask.nonzero()[0].tolist()) if mask is not None and count else ()
    rows = (
        trace_rows(tape, operation, origin, bad.slot, mask)
        if mask is not None and operation.phase != "optimizer"
        else ""
    )
    line = operation.line if operation.line is not None else origin.line
    module = operation.module or origin.module
    if operation.phase == "optimizer":
        module = tape.slots[bad.slot].name or _parameter_of(tape, operation, bad)
    names = [tape.operations[link.operation].name for link in chain[1:] if link.operation >= 0]
    return FirstBad(
        kind="operation",
        index=operation.index,
        operator=_class_name(tape, operation) or (origin.name if in_backward else operation.name),
        phase=operation.phase,
        node=operation.node,
        module=module,
        line=line,
        value="nan" if bad.nan else "inf",
        count=count,
        total=mask.numel() if mask is not None else 0,
        where=where,
        operands=tuple(operands),
        why=_explain(operation, operands, bad),
        chain=tuple(_shorten(names)),
        reaches=reaches,
        rows=rows,
        scaled=bool(tape.scaled) and reaches != "the loss",
        notes=tuple(player.replay.notes.values())[:3],
    )


def _leaf(tape: Tape, bad: Bad, chain: list[Bad], reaches: str) -> FirstBad:
    slot = tape.slots[bad.slot]
    value = tape.leaf_value(bad.slot)
    mask = ~torch.isfinite(value)
    reader = next((op for op in tape.operations if bad.slot in op.reads), None)
    kind = "parameter" if slot.kind == "parameter" else "data"
    words = {"parameter": "before the step already", "data": "as it came in"}[kind]
    where = tuple(mask.nonzero()[0].tolist())
    rows = sorted(set(mask.nonzero()[:, 0].tolist())) if mask.dim() > 0 else []
    return FirstBad(
        kind=kind,
        index=-1,
        operator=slot.kind,
        phase="forward",
        node="",
        module=reader.module if reader is not None else "",
        line=reader.line if reader is not None else None,
        value="nan" if bool(torch.isnan(value).any()) else "inf",
        count=int(mask.sum()),
        total=value.numel(),
        where=where,
        operands=(),
        why=f"{slot} is not finite {words}",
        chain=tuple(
            _shorten([tape.operations[link.operation].name for link in chain[1:] if link.operation >= 0])
        ),
        reaches=reaches,
        rows=f"row {ranges(rows)} of {slot}" if rows and len(rows) < value.shape[0] else "",
        scaled=False,
    )


def _never_written(tape: Tape, bad: Bad, chain: list[Bad], reaches: str) -> FirstBad:
    operation = tape.operations[bad.operation]
    links = [tape.operations[link.operation] for link in chain[1:] if link.operation >= 0]
    reader = next(
        (op for op in links if op.name not in ("detach", "alias", "view", "slice", "select")), operation
    )
    shape = tape.slots[bad.slot].shape
    return FirstBad(
        kind="memory never written",
        index=operation.index,
        operator=_class_name(tape, operation) or operation.name,
        phase=operation.phase,
        node=operation.node,
        module=operation.module,
        line=operation.line
        or (tape.operations[operation.made_from].line if operation.made_from is not None else None),
        value="nan",
        count=0,
        total=math.prod(shape),
        where=(),
        operands=(),
        why=f"{operation.name}{list(shape)} is read by {reader.name} before it is full, {tape.place(reader)}",
        chain=tuple(_shorten([op.name for op in links])),
        reaches=reaches,
        rows="",
        scaled=False,
    )


def _operands_of(
    tape: Tape, operation: Operation, bad: Bad
) -> tuple[list[Operand], torch.Tensor | None, Player]:
    """The arguments of an operation just before it ran, and where its result is bad."""
    player = Player(tape, None, None)
    player.play(tape.operations[: operation.index], keep_for=operation)
    values = []
    for slot in operation.reads:
        try:
            values.append((slot, player.value(slot).detach().clone()))
        except CannotReplay:
            continue
    player.step(operation)
    result = player.env.get(bad.slot)
    mask = ~torch.isfinite(result) if result is not None else None
    where = tuple(mask.nonzero()[0].tolist()) if mask is not None and bool(mask.any()) else None
    operands = []
    for slot, value in values:
        if operation.name.startswith("_f") and value.shape != tape.slots[bad.slot].shape:
            continue  # the other members of a list
        operands.append(_operand(tape, slot, value, mask, where))
    return operands[:6], mask, player


def _operand(
    tape: Tape, slot: int, value: torch.Tensor, mask: torch.Tensor | None, where: tuple | None
) -> Operand:
    entry = tape.slots[slot]
    numbers = value.double() if not value.is_complex() else value.abs().double()
    finite = numbers[torch.isfinite(numbers)]
    at_bad = None
    if mask is not None and where is not None:
        try:
            at_bad = float(numbers.expand(mask.shape)[where]) if numbers.dim() <= mask.dim() else None
        except RuntimeError:
            at_bad = None
    empty = finite.numel() == 0
    return Operand(
        entry.name or "argument",
        entry.shape,
        str(entry.dtype).removeprefix("torch."),
        math.nan if empty else float(numbers.min()),
        math.nan if empty else float(numbers.max()),
        int((numbers == 0).sum()),
        at_bad,
    )


def _explain(operation: Operation, operands: list[Operand], bad: Bad) -> str:
    """In a few words, the operand that did it."""
    first = operands[0] if operands else None
    second = operands[1] if len(operands) > 1 else None
    here = [operand.at_bad for operand in operands]
    name = operation.name.rstrip("_")
    if first is None:
        return ""
    if (
        name in ("div", "addcdiv", "_foreach_div", "_foreach_addcdiv", "true_divide")
        and len(here) > 1
        and 0.0 in here[1:]
    ):
        return "0 / 0" if here[0] == 0 else "division by zero"
    if name in ("log", "log2", "log10", "log1p") and here[0] is not None:
        return f"{name} of {here[0]:.4g}"
    if name in ("sqrt", "rsqrt", "_foreach_sqrt") and here[0] is not None:
        return f"root of {here[0]:.4g}"
    if name in ("reciprocal", "_foreach_reciprocal") and here[0] == 0:
        return "division by zero"
    if name in ("acos", "asin", "atanh", "acosh") and here[0] is not None:
        return f"{name} of {here[0]:.6g}"
    if name.startswith(("pow", "_foreach_pow")) and here[0] is not None:
        return f"power of {here[0]:.4g}"
    if name in ("exp", "expm1", "exp2") and here[0] is not None:
        return f"exp of {here[0]:.4g} is beyond the largest {first.dtype}"
    if name in ("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data") and bad.nan:
        return "a row that is −inf everywhere: nothing is left to attend to"
    if name in ("var", "std", "var_mean", "std_mean"):
        return "the variance of a single sample is 0 / 0"
    if name in ("mul", "_foreach_mul") and second is not None and bad.nan and 0.0 in here:
        return "infinity times zero"
    largest = max((max(abs(o.low), abs(o.high)) for o in operands if o.high == o.high), default=0.0)
    limit = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4e38}.get(first.dtype, 1.8e308)
    if not bad.nan or largest > math.sqrt(limit):
        return f"overflow: arguments up to {largest:.3g}, the largest {first.dtype} is {limit:.3g}"
    return ""


def _class_name(tape: Tape, operation: Operation) -> str:
    """The hand-written function whose backward an operation belongs to."""
    for call in tape.functions:
        if operation.node == f"{call.cls.__name__}Backward":
            return call.cls.__name__
    return ""


def _parameter_of(tape: Tape, operation: Operation, bad: Bad) -> str:
    """The parameter an optimizer operation works for: the one at the same place of its lists."""
    place = operation.writes.index(bad.slot) if bad.slot in operation.writes else None
    if place is None and isinstance(operation.results, (list, tuple)):
        place = next(
            (i for i, ref in enumerate(operation.results) if ref is not None and ref.slot == bad.slot), None
        )
    stepped = [tape.slots[slot].name for slot in tape.stepped]
    if place is not None and place < len(stepped):
        return stepped[place]
    shape = tape.slots[bad.slot].shape
    return next((tape.slots[s].name for s in tape.stepped if tape.slots[s].shape == shape), "")


def _shorten(names: list[str]) -> list[str]:
    """The chain without repetitions and views, at most eight links."""
    plain = [
        n
        for n in names
        if n not in ("view", "detach", "t", "alias", "transpose", "_unsafe_view", "expand", "unsqueeze")
    ]
    unique = [name for i, name in enumerate(plain) if i == 0 or plain[i - 1] != name]
    return unique if len(unique) <= 8 else [*unique[:4], "…", *unique[-3:]]
