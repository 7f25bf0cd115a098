"""Does the optimizer hold what the loss wants to change? Judged by the identity of tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.tape.operations import references

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
TIMES = 2  # taped steps with a gradient and without an update before it is said


def does_the_optimizer_hold_everything(evidence: Evidence) -> Iterator[Verdict]:
    """Parameters that get a gradient and belong to no optimizer that steps, and why."""
    held = {id(p) for o in evidence.optimizers for g in o.param_groups for p in g["params"]}
    named = named_parameters(evidence)
    wanting = {name: p for name, p in named.items() if has_gradient(p) and id(p) not in held}
    unknown = unknown_parameters(evidence, set(named))
    count = evidence.memory.setdefault("owners", {})
    for name in {*wanting, *unknown}:
        count[name] = count.get(name, 0) + 1
    missing = [name for name in (*wanting, *unknown) if count[name] >= TIMES]
    missing = [name for name in missing if not is_copy(evidence, named, name)]
    if not missing:
        return
    orphans = [p for o in evidence.optimizers for g in o.param_groups for p in g["params"]]
    orphans = [p for p in orphans if p.grad is None and id(p) not in {id(q) for q in named.values()}]
    places = [unknown.get(name, name) for name in missing]
    shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    lines = [f"{shown} get a gradient at every step and no optimizer changes them"]
    if orphans:
        id_, fix = "replaced", "make the optimizer after the model has its final layers"
        lines.append(f"{len(orphans)} tensors that the optimizer holds are no longer part of the model")
    elif any(name in unknown for name in missing):
        id_, fix = (
            "unregistered",
            "keep submodules in nn.ModuleList or nn.ModuleDict, parameters in nn.Parameter",
        )
        lines.append("model.parameters() does not list them: they are kept in a plain list or dict")
    else:
        id_, fix = "not-in-optimizer", f"give the optimizer {shown} too"
    yield confirmed(f"param-not-updated/{id_}", *lines, where=places[0], fix=fix, lasting=True)


def named_parameters(evidence: Evidence) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for prefix, root in evidence.models.items():
        for name, parameter in root.named_parameters():
            clean = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            found[f"{prefix}.{clean}" if prefix else clean] = parameter
    return found


def has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return gradient is not None and (gradient.is_sparse or bool((gradient != 0).any()))


def unknown_parameters(evidence: Evidence, known: set[str]) -> dict[str, str]:
    """Parameters on the tape that a module reads, that got a gradient, and that no model lists: name -> place."""
    tape = evidence.tape
    got = {slot for call in tape.backwards for _, slot, _ in call.contributions}
    found = {}
    for slot in tape.parameters:
        if slot.index not in got or slot.index in tape.stepped or slot.name in known:
            continue
        for operation in tape.operations:
            if operation.phase == "forward" and any(
                ref.slot == slot.index for ref in references((operation.args, operation.kwargs))
            ):
                if operation.module:
                    found[slot.name] = operation.module
                break
    return found


def is_copy(evidence: Evidence, named: dict[str, Tensor], name: str) -> bool:
    """A teacher or target network: another part with the same names and shapes is trained, and this one follows it."""
    part = name.partition(".")[0]
    mine = shapes_of(named, part)
    held = {id(p) for o in evidence.optimizers for g in o.param_groups for p in g["params"]}
    others = {other.partition(".")[0] for other, parameter in named.items() if id(parameter) in held}
    return len(mine) >= 2 and any(other != part and shapes_of(named, other) == mine for other in others)


def shapes_of(named: dict[str, Tensor], part: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes below a part with layers of its own; empty for a single layer."""
    found = {n[len(part) + 1 :]: tuple(p.shape) for n, p in named.items() if n.startswith(f"{part}.")}
    return found if any("." in name for name in found) else {}
