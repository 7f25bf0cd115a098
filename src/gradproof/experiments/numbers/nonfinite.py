"""Where was a NaN or Inf born? The first operation that made one from good operands, if it reaches the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gradproof.errors import UserError
from gradproof.experiments.verdict import Verdict, confirmed, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.update import groups_of
from gradproof.tape.bundle import write_bundle
from gradproof.tape.locate import FirstBad, find_first_bad_operation
from gradproof.tape.operations import Operation
from gradproof.tape.trace import came_from_others

HALF = {"float16", "bfloat16"}
OTHER_KINDS = {"data": "data", "memory never written": "never-written-memory"}  # than an operation's
HUGE_WEIGHT, HUGE = 1e4, 1e15  # no initialisation makes such weights, nor layers of usual weights such values
# finite where their derivative is infinite; a power below 1, too
STEEP = ("sqrt", "std", "acos", "asin", "acosh")


def where_was_it_born(evidence: Evidence) -> Iterator[Verdict]:
    """On every taped step, and before the update of a bad one; silent while loss and gradients are finite."""
    again = evidence.specimen.again
    bad_again = again["eager"] or again["compiled"] if again is not None else step_is_nonfinite(evidence)
    if evidence.memory.get("located") or not bad_again:
        return
    bad = find_first_bad_operation(evidence.tape)
    if bad is None or (evidence.tape.compiled and bad.kind != "operation"):
        said = "the step is not finite, but its replay is: no operation can be named"
        yield born_in_the_compiler(evidence) or undecided("forward-nonfinite", said)
    elif bad.kind == "parameter":  # what made them so was not taped
        said = f"the weights were not finite before step {evidence.step}: what made them so was not taped"
        yield born_in_the_backward_before(evidence) or undecided("forward-nonfinite", said)
    elif bad.kind == "operation" and came_from_others(evidence.tape, bad.index):
        said = f"the first value of step {evidence.step} that is not finite came from another rank"
        yield undecided("forward-nonfinite", f"{said}: its own specimen has where it was born")
    elif not bad.scaled:  # or a GradScaler skips this step: that is its work
        evidence.memory["located"] = True
        yield from born_here(evidence, bad)


def born_here(evidence: Evidence, bad: FirstBad) -> Iterator[Verdict]:
    """The operation; where numbers grew until they overflowed, it is the end of their story."""
    found, grown = verdict_of(bad), what_has_grown(evidence, bad)
    if grown:
        said = f"after {evidence.step} updates {grown}, and overflows"
        yield confirmed("lr-too-high/diverged", said, confidence="likely")
    bundle = keep_for_later(evidence, bad)
    more = [f"reproduce  python {bundle}/reproduce.py"] if bundle else []
    more += ["found    in the model's calls, made again"] if evidence.specimen.before_update else []
    level = "note" if grown or diverged(evidence.losses) else found.level
    yield replace(found, level=level, evidence=(*found.evidence, *more))


def born_in_the_backward_before(evidence: Evidence) -> Verdict | None:
    """The loss of the step before, which was not taped, was finite and no larger than usual, and the weights after it
    are not finite: its gradients were not. None where its update could have made them so by itself."""
    losses = evidence.losses
    if len(losses) < 2 or not math.isfinite(losses[-2]) or diverged(losses):
        return None
    half = any(str(slot.dtype).removeprefix("torch.") in HALF for slot in evidence.tape.parameters)
    if half or any(group.get("eps", 1.0) == 0 for group in groups_of(evidence)):
        return None
    evidence.memory["located"] = True
    before = evidence.step - 1
    steep = {place_of(op.module, op.line): op.name for op in evidence.forward if is_steep(evidence, op)}
    listed = ", ".join(f"{name} at {place}" for place, name in list(steep.items())[:3])
    return confirmed(
        "backward-nonfinite/not-taped",
        f"the loss of step {before} is {losses[-2]:.4g}, and after its update the weights are not finite: its "
        "gradients were not",
        f"derivatives of this step that can be infinite: {listed or 'none that is known by its operator'}",
        where=next(iter(steep)) if len(steep) == 1 else None,
        fix=f"`gradproof run --until {before} SCRIPT` tapes that step and names the operation. Where it is a root or a "
        "norm, add a small constant inside: torch.sqrt(x + 1e-12)",
        confidence="likely",  # the step itself was not seen
    )


def is_steep(evidence: Evidence, op: Operation) -> bool:
    """Whether an operation through which gradient flows has an infinite derivative where it is finite itself."""
    if evidence.flow.tracked.isdisjoint(op.reads) or op.line is None:
        return False
    power = op.args[1] if op.name == "pow" and len(op.args) > 1 else None
    return op.name in STEEP or (isinstance(power, (int, float)) and 0 < power < 1)


def not_finite_when_compiled(evidence: Evidence) -> str:
    """What compiled code made of the step, or of its calls made again: the output, a gradient, or nothing."""
    if evidence.specimen.again is not None:
        return evidence.specimen.again["compiled"]
    if not evidence.tape.compiled:
        return ""
    return "output" if evidence.losses and not math.isfinite(evidence.losses[-1]) else "gradient"


def born_in_the_compiler(evidence: Evidence) -> Verdict | None:
    """The same call, from the same numbers: finite operation by operation, not finite by the compiled code."""
    what = not_finite_when_compiled(evidence)
    if not what:
        return None
    evidence.memory["located"] = True
    family = "forward-nonfinite" if what == "output" else "backward-nonfinite"
    called = [call.path or call.kind for call in evidence.tape.modules if call.kind != "OptimizedModule"]
    return confirmed(
        f"{family}/born-in-the-compiler",
        f"the {what} of the compiled model is not finite at step {evidence.step}, nor when its code is run again",
        "run operation by operation, from the same inputs, weights and random numbers, it is finite",
        "found    before the bad update was written",
        where=called[0] if called else None,
        fix='compile with backend="aot_eager": if the NaN goes, the generated code makes it; then keep parts of the '
        "model out with torch.compiler.disable until it goes",
        confidence="proven",  # made again, both ways
    )


def keep_for_later(evidence: Evidence, bad: FirstBad) -> Path | None:
    """The bad operation with its operands, beside the run: it can be looked at without the model or the data."""
    if evidence.directory is None or bad.kind != "operation":
        return None
    try:
        return write_bundle(evidence.tape, bad, evidence.directory / "first_bad_operation")
    except (UserError, OSError, ImportError):
        return None


def diverged(losses: Sequence[float]) -> bool:
    """The loss had grown a hundredfold over its usual size before it stopped being finite."""
    finite = [abs(loss) for loss in losses if math.isfinite(loss)]
    if len(finite) < 3:
        return False
    usual = sorted(finite)[len(finite) // 2] if len(finite) > 8 else finite[0]
    return finite[-1] > 100 * usual + 1e-12 or max(finite[-3:]) > 100 * finite[0] + 1e-12


def what_has_grown(evidence: Evidence, bad: FirstBad) -> str:
    """Of an operation that overflows after updates, the operand that no initialisation made so large, else nothing."""
    if evidence.step < 1 or bad.value != "inf" or bad.kind != "operation":
        return ""
    parameters = {slot.name for slot in evidence.tape.parameters}
    for operand in bad.operands:
        largest = max(abs(operand.low), abs(operand.high))
        if largest > (HUGE_WEIGHT if operand.name in parameters else HUGE) and math.isfinite(largest):
            return f"{operand.name} of {bad.operator} has entries up to {largest:.3g}"
    return ""


def step_is_nonfinite(evidence: Evidence) -> bool:
    """From the losses seen; else from the gradients of the step, and what it did to the weights."""
    if evidence.losses and not math.isfinite(evidence.losses[-1]):
        return True
    after = evidence.aftermath
    tensors = [*after.gradients.values(), *after.updates.values()]
    return any(not bool(torch.isfinite(tensor.sum())) for tensor in tensors)


def verdict_of(bad: FirstBad) -> Verdict:
    """The family follows from the phase and the precision in which the value was born."""
    families = {"forward": "forward-nonfinite", "backward": "backward-nonfinite"}
    family, what = families.get(bad.phase, "optimizer-config"), bad.operator
    if any(operand.dtype in HALF for operand in bad.operands):
        if bad.value == "inf" and bad.kind == "operation":
            family, what = "low-precision-error", f"overflow-in-{bad.operator}"
        if bad.phase == "optimizer":  # ε and squares of gradients are zero in half precision
            family, what = "low-precision-error", "optimizer-in-half"
    return confirmed(
        f"{family}/{OTHER_KINDS.get(bad.kind, what)}",
        *map(str.strip, str(bad).splitlines()),
        where=place_of(bad.module, bad.line),
        confidence="proven",  # the operation was replayed
    )
