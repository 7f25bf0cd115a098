"""Does the optimizer hold what the loss wants to change? Judged by the identity of tensors."""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.tape.frames import locals_of
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
    where, line = places[0], line_of_optimizer(evidence)
    if orphans:
        id_, fix = "replaced", "make the optimizer after the model has its final layers"
        lines.append(f"{len(orphans)} tensors that the optimizer holds are no longer part of the model")
    elif all(name in unknown for name in missing) and (holder := find_plain_holder(evidence)) is not None:
        id_ = "unregistered"
        fix = "keep submodules in nn.ModuleList or nn.ModuleDict, parameters in nn.Parameter"
        lines.append(f"model.parameters() does not list them: {holder[0]} is a plain {holder[1]}")
        where, line = holder[0], holder[2]
    elif all(name in unknown for name in missing):
        shapes = {tuple(slot.shape) for slot in evidence.tape.parameters if slot.name in missing}
        strangers = find_strangers({id(p) for p in named.values()}, held, shapes)
        if strangers and not any(module.training for _, module in strangers):
            return  # a model that only judges, in eval mode: nobody meant to train it
        where = strangers[0][0] if strangers else places[0]
        id_, fix = "not-in-optimizer", f"give an optimizer the parameters of {where} too"
        lines += ["two optimizers hold the same parameters"] if doubles(evidence) else []
    else:
        id_, fix = "not-in-optimizer", f"give the optimizer {shown} too"
    where = f"{where} ({line})" if line else where
    yield confirmed(f"param-not-updated/{id_}", *lines, where=where, fix=fix, lasting=True)


def line_of_optimizer(evidence: Evidence) -> str:
    """Where the optimizer was made; of several, one that holds what another holds already, or one that stepped."""
    made: dict[int, str] = evidence.memory.get("facts", {}).get("_optimizers_made", {})
    ordered = (*doubles(evidence), *at_work(evidence), *evidence.optimizers)
    return next((line for o in ordered if (line := made.get(id(o), ""))), "")


def at_work(evidence: Evidence) -> list[torch.optim.Optimizer]:
    """The optimizers that stepped on this tape."""
    named = named_parameters(evidence)
    stepped = {id(named[name]) for s in evidence.tape.stepped if (name := evidence.slot(s).name) in named}
    return [
        o for o in evidence.optimizers if any(id(p) in stepped for g in o.param_groups for p in g["params"])
    ]


def doubles(evidence: Evidence) -> list[torch.optim.Optimizer]:
    """Optimizers that were made later and hold tensors of an earlier one."""
    seen: set[int] = set()
    found = []
    order = list(evidence.memory.get("facts", {}).get("_optimizers_made", {}))
    for optimizer in sorted(evidence.optimizers, key=lambda o: order.index(id(o)) if id(o) in order else 0):
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own & seen:
            found.append(optimizer)
        seen |= own
    return found


def find_plain_holder(evidence: Evidence) -> tuple[str, str, str] | None:
    """A list or dict of modules that is an attribute of a module: its path, what it is, where the class sets it."""
    for prefix, root in evidence.models.items():
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                    continue
                members = value.values() if isinstance(value, dict) else value
                if any(isinstance(member, (nn.Module, nn.Parameter)) for member in members):
                    whole = ".".join(part for part in (prefix, path, name) if part)
                    return whole, type(value).__name__, line_that_sets(type(module), name)
    return None


def line_that_sets(owner: type, name: str) -> str:
    """The line of a class's source that gives `self.name` its value."""
    try:
        lines, first = inspect.getsourcelines(owner)
        file = inspect.getsourcefile(owner) or ""
    except (OSError, TypeError):
        return ""
    number = next(
        (i for i, text in enumerate(lines, first) if re.search(rf"self\.{name}\b[^=]*=", text)), None
    )
    return f"{os.path.basename(file)}:{number}" if number is not None else ""


def find_strangers(
    known: set[int], held: set[int], shapes: set[tuple[int, ...]]
) -> list[tuple[str, nn.Module]]:
    """Models with gradients of these shapes whose parameters nobody knows or holds, as the script names them."""
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Module)]
    inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
    found = []
    for module in modules:
        own = [p for p in module.parameters() if has_gradient(p)] if id(module) not in inner else []
        fits = bool(own) and not shapes.isdisjoint(tuple(p.shape) for p in own)
        if fits and not any(id(p) in known or id(p) in held for p in own):
            found.append((variable_of(module) or type(module).__name__, module))
    return found


def variable_of(value: object) -> str | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "gradproof"):
            for name, found in (*locals_of(frame).items(), *frame.f_globals.items()):
                if found is value and not name.startswith("_"):
                    return name
        frame = frame.f_back
    return None


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
