"""Is the gradient right? The step's gradients against those of its float64 replay, down to the culprit."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded, undecided
from gradproof.experiments.nonfinite import place_of, step_is_nonfinite
from gradproof.experiments.owners import named_parameters

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
    found = evidence.shadow
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
        yield confirmed(id, *lines, where=place_of(culprit.module, culprit.line), lasting=True)
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
            yield confirmed(id, str(mismatch), *why, where=where)
            break
    wrong = [p for p in found.parameters if p.verdict == "wrong"]
    if wrong and not found.accumulation:
        yield undecided("wrong-gradient", str(wrong[0]))
    elif found.right and found.worst is not None and not found.notes:
        yield excluded("wrong-gradient", f"every gradient agrees with float64 to {found.worst.error:.0e}")


def names_updated(evidence: Evidence) -> set[str]:
    """Parameters changed by what their gradients say; a critic whose weights are clipped at another's turn has none."""
    tape = evidence.tape
    arrived = max((call.last for call in tape.top_backwards if call.accumulates), default=0)
    updates = [op for op in tape.operations if op.phase == "optimizer" or op.index >= arrived]
    written = {slot for op in updates for slot in op.writes}
    return {evidence.slot(slot).name for slot in tape.stepped if slot in written}


def call_to_blame(evidence: Evidence, parameter: str) -> tuple[str, list[str]]:
    """The line that clears gradients, or where nothing does, that calls backward; and whose gradients it clears."""
    facts = evidence.memory.get("facts", {})
    lines = facts.get("lines", {})
    clears = lines.get("zero_grad", [])
    if not clears:
        return next(iter(lines.get("backward", [])), ""), []
    tensor = named_parameters(evidence).get(parameter)
    owners = [o for o in evidence.optimizers if any(p is tensor for g in o.param_groups for p in g["params"])]
    if facts.get("_cleared") and owners and not any(id(o) in facts["_cleared"] for o in owners):
        return clears[0], [f"zero_grad at {', '.join(clears)} clears the gradients of another optimizer"]
    return clears[0], []


def names_without_optimizer(evidence: Evidence) -> set[str]:
    trained = {id(p) for o in evidence.optimizers for group in o.param_groups for p in group["params"]}
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, model in evidence.models.items()
        for name, parameter in model.named_parameters()
        if id(parameter) not in trained
    }


def accumulated_wrongly(how: str) -> str:
    """The cause that a mismatch of .grad and its backwards proves; empty where it proves none."""
    if "earlier step" in how:
        return "zero-grad-error/stale"
    if "cleared" in how:
        return "zero-grad-error/before-step"
    return "grad-accumulation-error/overwritten" if "overwritten" in how else ""
