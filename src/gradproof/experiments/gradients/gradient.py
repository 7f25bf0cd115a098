"""Is the gradient right? The step's gradients against those of its float64 replay, down to the culprit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.numbers.nonfinite import step_is_nonfinite
from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.instruments.update import named_parameters
from gradproof.tape.execute import is_foreign
from gradproof.tape.operations import Operation, Tape
from gradproof.tape.operators import is_view
from gradproof.tape.shadow import Shadow

COPIES = ("copy_", "_to_copy", "clone")
# replayed steps that lost something, and that did not: both happen, so it is neither code nor chance
LOST, WHOLE = 2, 3

FAMILY_OF = {
    "wrong backward": "wrong-gradient/backward",
    "stale activation": "aliasing-or-inplace/saved-activation",
    "recomputed differently": "wrong-gradient/recomputed-differently",
    "memory never written": "aliasing-or-inplace/never-written",
    "changed by a hook": "wrong-gradient/hook",
}


def is_the_gradient_right(evidence: Evidence) -> Iterator[Verdict]:
    """Wrong backwards, cut paths and gradients that are not what backward brought; or, just as loudly, right."""
    if step_is_nonfinite(evidence):
        return
    if hidden := what_is_hidden(evidence.tape):
        yield undecided("wrong-gradient", hidden)
        return
    found = evidence.shadow
    yield from lost_in_a_copy(evidence, found)
    if found.culprits:
        culprit = found.culprits[0]
        lines = [line.strip() for line in str(culprit).splitlines()]
        others = {other.module for other in found.culprits[1:] if other.what == culprit.what} - {
            culprit.module,
            "",
        }
        if others:
            lines.append(f"the same in {', '.join(sorted(others))}")
        id = FAMILY_OF.get(culprit.kind, "wrong-gradient/backward")
        where = place_of(culprit.module, culprit.line)
        # two witnesses prove it; one may be mistaken, and then it does not last either
        sure = culprit.confidence == "proven" and not found.departed
        yield confirmed(id, *lines, where=where, confidence="proven" if sure else "likely", lasting=sure)
        return
    # what no optimizer has, none clears; and of a GAN's two networks only the one that steps has to be clean
    idle = names_without_optimizer(evidence)
    stepped = names_updated(evidence)
    for mismatch in found.accumulation:
        if mismatch.parameter in idle or (stepped and mismatch.parameter not in stepped):
            continue
        if id := accumulated_wrongly(mismatch.how):
            line, why = call_to_blame(evidence, mismatch.parameter)
            where = f"{mismatch.parameter} ({line})" if line else mismatch.parameter
            # .grad against the sum of what backward brought: the same tensors
            yield confirmed(id, str(mismatch), *why, where=where, confidence="proven", lasting=False)
            break
    open_ = [p for p in found.parameters if p.verdict in ("wrong", "undecided")]
    if open_ and not found.accumulation:
        yield undecided("wrong-gradient", "\n".join((str(open_[0]), *asked_nodes(found))))
    elif found.right and (by_nodes(found) or (found.worst is not None and not found.notes)):
        yield excluded("wrong-gradient", reason_of(found), confidence="proven")
    elif found.notes:
        yield undecided("wrong-gradient", found.notes[0])


def lost_in_a_copy(evidence: Evidence, found: Shadow) -> Iterator[Verdict]:
    """At some steps, and not at others, what is read behind one copy is not what was copied.

    Code that writes past PyTorch, or that nobody can replay, does so at every step.
    """
    seen = evidence.memory.setdefault("departed", {"fine": 0, "at": {}})
    copy = None if found.departs_at is None else copy_read_by(evidence.tape, found.departs_at)
    if copy is None:
        seen["fine"] += not found.departed
        return
    where = place_of(copy.module, copy.line)
    steps = seen["at"].setdefault(where, [])
    steps.append(evidence.step)
    recorded = evidence.losses[-1] if evidence.losses else math.nan
    if len(steps) >= LOST and seen["fine"] >= WHOLE:
        yield confirmed(
            "aliasing-or-inplace/lost-in-a-copy",
            f"at {len(steps)} of {len(steps) + seen['fine']} replayed steps (last {evidence.step}) what is read behind "
            f"this copy is not what was copied; at the others every operation makes what was recorded",
            f"{evidence.tape.operations[found.departs_at or 0].name} is the first to make something else; the loss was "
            f"{recorded:.4g}, and is {found.loss:.4g} with what was copied",
            where=where,
            confidence="likely",
        )


def copy_read_by(tape: Tape, index: int) -> Operation | None:
    """The copy, of numbers as they are, that last wrote memory an operation reads.

    Behind an operation that made what was recorded nothing was lost: it has read what was copied.
    """
    read = {tape.slots[slot].storage for slot in tape.operations[index].reads}
    for operation in reversed(tape.operations[:index]):
        written = {tape.slots[slot].storage for slot in (*operation.makes, *operation.writes)} & read
        if not written or operation.name == "alias" or is_view(operation.func):
            continue
        kinds = {tape.slots[slot].dtype for slot in (*operation.reads, *operation.makes)}
        if operation.name in COPIES and len(kinds) == 1:
            return operation
        read -= written
    return None


def what_is_hidden(tape: Tape) -> str:
    """Why a replay's derivative is not that of the step; empty where it is."""
    if tape.drawn_apart:
        return "compiled code draws its random numbers in its own way: an eager replay drops other units"
    calls = [call for call in tape.functions if call.opaque and is_foreign(call.cls)]
    if calls:
        return f"{calls[0].cls.__name__} is code of the training's own ({calls[0].opaque}): no derivative leads through"
    outside = [op.name for op in tape.operations if op.kept is not None and is_foreign(op.func)]
    return f"{outside[0]} comes from outside PyTorch and is not installed here" if outside else ""


def by_nodes(found: Shadow) -> bool:
    """Every node was asked in a replay of this very step; what float64 could not replay as a whole does not matter."""
    return found.nodes is not None and found.nodes.right and not found.departed


def asked_nodes(found: Shadow) -> list[str]:
    return [f"node by node, {found.nodes}"] if found.nodes is not None else []


def reason_of(found: Shadow) -> str:
    """Why the gradient is right: as a whole, or operation by operation."""
    whole = "" if found.worst is None else f"every gradient agrees with float64 to {found.worst.error:.0e}"
    if whole and found.surrogates:
        functions = ", ".join(dict.fromkeys(a.call.cls.__name__ for a in found.surrogates))
        whole += f", but for what comes through {functions}, whose backward means to be no derivative"
    if found.nodes is None or not found.nodes.right:
        return whole
    each = f"each of {found.nodes.judged} operations returned the derivative of its forward"
    return f"{whole}, and {each}" if whole else each


def names_updated(evidence: Evidence) -> set[str]:
    """Parameters changed by what their gradients say; a critic whose weights are clipped at another's turn has none."""
    tape = evidence.tape
    arrived = max((call.last for call in tape.top_backwards if call.accumulates), default=0)
    updates = [op for op in tape.operations if op.phase == "optimizer" or op.index >= arrived]
    written = {
        evidence.slot(slot).storage for op in updates for slot in op.writes
    }  # `p.data` is another slot
    return {evidence.slot(slot).name for slot in tape.stepped if evidence.slot(slot).storage in written}


def call_to_blame(evidence: Evidence, parameter: str) -> tuple[str, list[str]]:
    """The line that clears gradients, or where nothing does, that calls backward; and whose gradients it clears."""
    lines = evidence.facts.lines
    clears = lines.get("zero_grad", [])
    if not clears:
        return next(iter(lines.get("backward", [])), ""), []
    tensor = named_parameters(evidence).get(parameter)
    owners = [o for o in evidence.optimizers if any(p is tensor for g in o.param_groups for p in g["params"])]
    if owners and any(o.clears for o in evidence.optimizers) and not any(o.clears for o in owners):
        return clears[0], [f"zero_grad at {', '.join(clears)} clears the gradients of another optimizer"]
    return clears[0], []


def names_without_optimizer(evidence: Evidence) -> set[str]:
    """By both names of a parameter: its model's, and the tape's, which does not know a layer that came late."""
    trained = {id(p) for o in evidence.optimizers for group in o.param_groups for p in group["params"]}
    named = {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, model in evidence.models.items()
        for name, parameter in model.named_parameters()
    }
    on_tape = evidence.specimen.skeletons.by_slot().items()
    taped = {evidence.slot(slot).name: p for slot, p in on_tape if evidence.slot(slot).kind == "parameter"}
    return {name for name, parameter in (*named.items(), *taped.items()) if id(parameter) not in trained}


def accumulated_wrongly(how: str) -> str:
    """The cause that a mismatch of .grad and its backwards proves; empty where it proves none."""
    if "earlier step" in how:
        return "zero-grad-error/stale"
    if "cleared" in how:
        return "zero-grad-error/before-step"
    return "grad-accumulation-error/overwritten" if "overwritten" in how else ""
