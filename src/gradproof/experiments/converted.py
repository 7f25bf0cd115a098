"""Is what the model holds still a parameter? nn.Parameter(…).to(…) is a plain tensor, and the Parameter is nobody's."""

from __future__ import annotations

import gc
import linecache
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.owners import has_gradient, line_that_sets, named_parameters
from gradproof.tape.frames import locals_of

DEEPEST = 16  # autograd nodes between a tensor that is kept and the Parameter that it was made of
TIMES = 2  # looks in which its gradient is not zero and its values stay


@dataclass(frozen=True)
class Kept:
    """A tensor with a history that somebody holds, and the Parameter at its end."""

    name: str
    tensor: Tensor
    parameter: nn.Parameter
    line: str


def are_converted_parameters_trained(evidence: Evidence) -> Iterator[Verdict]:
    """Parameters with a gradient that nothing reads but a tensor made of them once, in no module and no optimizer."""
    if not reached_unread(evidence):
        return
    held = {id(p) for o in evidence.optimizers for g in o.param_groups for p in g["params"]}
    known = held | {id(p) for p in named_parameters(evidence).values()}
    found = [kept for kept in kept_tensors(evidence) if id(kept.parameter) not in known]
    found = [kept for kept in found if has_gradient(kept.parameter)]
    if not found:
        return
    owned = {id(p) for m in gc.get_objects() if issubclass(type(m), nn.Module) for p in own_parameters(m)}
    seen = evidence.memory.setdefault("converted", {})
    for kept in found:
        if id(kept.parameter) in owned:
            continue  # a weight of another model
        values = float(kept.parameter.detach().double().norm())
        looks, before = seen.get(kept.name, (0, values))
        seen[kept.name] = (looks + 1, values)
        if before != values:
            seen[kept.name] = (-(10**9), values)  # somebody changes it by hand
        elif looks + 1 >= TIMES:
            yield verdict_of(kept)
            return


def verdict_of(kept: Kept) -> Verdict:
    node = kept.tensor.grad_fn
    how = node.name().partition("Backward")[0] if node is not None else ""
    shape = list(kept.tensor.shape)
    gradient = kept.parameter.grad
    size = float(gradient.norm()) if gradient is not None else 0.0
    return confirmed(
        "param-not-updated/plain-tensor",
        f"{kept.name} {shape} is a plain tensor that {how} made of an nn.Parameter: model.parameters() does not list "
        "it, and the Parameter is in no module and no optimizer",
        f"the Parameter has a gradient (norm {size:.3g}) and never changes",
        where=f"{kept.name} ({kept.line})" if kept.line else kept.name,
        fix=f"convert first, then wrap: {kept.name.rpartition('.')[2]} = nn.Parameter(values.to(...)), or move the "
        "whole model with model.to(...)",
        lasting=True,
    )


def reached_unread(evidence: Evidence) -> bool:
    """Whether a gradient reached a leaf of no known name that no operation of the step reads."""
    known = set(named_parameters(evidence))
    calls = [call for call in evidence.tape.backwards if call.accumulates]
    got = {
        slot for call in calls for _, slot, _ in call.contributions if evidence.slot(slot).name not in known
    }
    return bool(got) and bool(got.difference(*(op.reads for op in evidence.forward)))


def kept_tensors(evidence: Evidence) -> Iterator[Kept]:
    """Tensors made of Parameters that modules keep as attributes, and scripts as variables."""
    for prefix, root in evidence.models.items():
        for path, module in root.named_modules():
            for name, tensor in tensors_among(vars(module)):
                parameter = only_parameter_behind(tensor)
                if parameter is not None:
                    whole = ".".join(part for part in (prefix, path, name) if part)
                    yield Kept(whole, tensor, parameter, line_that_sets(type(module), name))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "gradproof"):
            for name, tensor in (*tensors_among(locals_of(frame)), *tensors_among(frame.f_globals)):
                parameter = only_parameter_behind(tensor)
                if parameter is not None:
                    yield Kept(name, tensor, parameter, line_that_wraps(frame.f_code.co_filename, name))
        frame = frame.f_back


def tensors_among(values: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Tensors that carry history, and those in lists and dicts, each with the name that holds it."""
    found = []
    for name, value in list(values.items()):
        if name.startswith("__") or name in ("_parameters", "_buffers", "_modules"):
            continue
        members = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )
        found += [(name, m) for m in list(members)[:64] if isinstance(m, Tensor) and m.grad_fn is not None]
    return found


def only_parameter_behind(tensor: Tensor) -> nn.Parameter | None:
    """The one nn.Parameter that a short history leads to; None where it leads to more, or to anything else."""
    leaves: dict[int, Tensor] = {}
    waiting: list[Any] = [tensor.grad_fn]
    nodes = 0
    while waiting:
        node = waiting.pop()
        nodes += 1
        if nodes > DEEPEST:
            return None
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        waiting += [child for child, _ in node.next_functions if child is not None]
    (leaf,) = leaves.values() if len(leaves) == 1 else (None,)
    return leaf if isinstance(leaf, nn.Parameter) else None


def own_parameters(module: nn.Module) -> list[Tensor]:
    return [p for p in module.__dict__.get("_parameters", {}).values() if p is not None]


def line_that_wraps(file: str, name: str) -> str:
    """The line of a script that gives a variable a Parameter."""
    made = re.compile(rf"\b{re.escape(name)}\b[^=]*=.*Parameter\(")
    number = next((i for i, text in enumerate(linecache.getlines(file), 1) if made.search(text)), None)
    return f"{os.path.basename(file)}:{number}" if number is not None else ""
