"""Is the gradient right? The step's gradients against those of its float64 replay, down to the culprit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from gradproof.experiments.numbers.nonfinite import step_is_nonfinite
from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of, with_line
from gradproof.instruments.update import ids_held, named_parameters
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
        yield blamed(found)
        return
    yield from islice(piled_up(evidence, found), 1)
    open_ = [p for p in found.parameters if p.verdict in ("wrong", "undecided")]
    if open_ and not found.accumulation:
        yield undecided("wrong-gradient", "\n".join((str(open_[0]), *asked_nodes(found))))
    elif found.right and (by_nodes(found) or (found.worst is not None and not found.notes)):
        yield excluded("wrong-gradient", reason_of(found), confidence="proven")
    elif found.notes:
        yield undecided("wrong-gradient", found.notes[0])


def blamed(found: Shadow) -> Verdict:
    """The first culprit. Two witnesses prove it; one may be mistaken, and then it does not last either."""
    culprit = found.culprits[0]
    others = {other.module for other in found.culprits[1:] if other.what == culprit.what} - {
        culprit.module,
        "",
    }
    sure = culprit.confidence == "proven" and not found.departed
    return confirmed(
        FAMILY_OF.get(culprit.kind, "wrong-gradient/backward"),
        *map(str.strip, str(culprit).splitlines()),
        *([f"the same in {', '.join(sorted(others))}"] if others else []),
        where=place_of(culprit.module, culprit.line),
        confidence="proven" if sure else "likely",
        lasting=sure,
    )


def piled_up(evidence: Evidence, found: Shadow) -> Iterator[Verdict]:
    """Gradients that hold something else than what the backwards of the step brought: the same tensors, added up.

    What no optimizer has, none clears; and of a GAN's two networks only the one that steps has to be clean.
    """
    idle, stepped = names_without_optimizer(evidence), names_updated(evidence)
    for mismatch in found.accumulation:
        id, name = accumulated_wrongly(mismatch.how), mismatch.parameter
        if id and name not in idle and (not stepped or name in stepped):
            line, why = call_to_blame(evidence, name)
            where = with_line(name, line)
            yield confirmed(id, str(mismatch), *why, where=where, confidence="proven", lasting=False)


def lost_in_a_copy(evidence: Evidence, found: Shadow) -> Iterator[Verdict]:
    """At some steps, and not at others, what is read behind one copy is not what was copied.

    Code that writes past PyTorch, or that nobody can replay, does so at every step.
    """
    seen = evidence.memory.setdefault("departed", {"fine": 0, "at": {}})
    copy = None if found.departs_at is None else copy_read_by(evidence.tape, found.departs_at)
    if copy is None:
        seen["fine"] += not found.departed
        return
    steps = seen["at"].setdefault(place_of(copy.module, copy.line), [])
    steps.append(evidence.step)
    recorded = evidence.losses[-1] if evidence.losses else math.nan
    if len(steps) >= LOST and seen["fine"] >= WHOLE:
        yield confirmed(
            "aliasing-or-inplace/lost-in-a-copy",
            f"at {len(steps)} of {len(steps) + seen['fine']} replayed steps (last {evidence.step}) what is read behind "
            f"this copy is not what was copied; at the others every operation makes what was recorded",
            f"{evidence.tape.operations[found.departs_at or 0].name} is the first to make something else; the loss was "
            f"{recorded:.4g}, and is {found.loss:.4g} with what was copied",
            at=copy,
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
    owners = [optimizer for optimizer in evidence.optimizers if id(tensor) in ids_held(optimizer)]
    if owners and any(o.clears for o in evidence.optimizers) and not any(o.clears for o in owners):
        return clears[0], [f"zero_grad at {', '.join(clears)} clears the gradients of another optimizer"]
    return clears[0], []


def names_without_optimizer(evidence: Evidence) -> set[str]:
    """By both names of a parameter: its model's, and the tape's, which does not know a layer that came late."""
    trained = ids_held(*evidence.optimizers)
    models = [
        (prefix, *each) for prefix, model in evidence.models.items() for each in model.named_parameters()
    ]
    named = [(f"{prefix}.{name}" if prefix else name, p) for prefix, name, p in models]
    on_tape = ((evidence.slot(slot), p) for slot, p in evidence.specimen.skeletons.by_slot().items())
    taped = [(slot.name, p) for slot, p in on_tape if slot.kind == "parameter"]
    return {name for name, parameter in (*named, *taped) if id(parameter) not in trained}


def accumulated_wrongly(how: str) -> str:
    """The cause that a mismatch of .grad and its backwards proves; empty where it proves none."""
    if "earlier step" in how:
        return "zero-grad-error/stale"
    if "cleared" in how:
        return "zero-grad-error/before-step"
    return "grad-accumulation-error/overwritten" if "overwritten" in how else ""
