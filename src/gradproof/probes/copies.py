"""Looks at the running statistics of models that follow the trained one, where those are evaluated.

An average of the weights, or a copy of them, has BatchNorm of its own: whose statistics are copied by nobody stay
what they were when the copy was made.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.probes.names import line_of, user_frames
from gradproof.probes.session import Session
from gradproof.tape.living import Living
from gradproof.tape.modes import unseen_by_modes

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
MOST_LOOKS = 100  # steps at which one copy is looked at; after those every 16th


@dataclass
class Copy:
    """A model that is called without gradient, and the trained one of the same shapes."""

    trained: weakref.ref[nn.Module]
    facts: dict[str, Any]
    statistics: list[Tensor]  # of the copy, when it was first called
    weight: Tensor  # its largest, then


def look_at_copy(session: Session, module: nn.Module) -> None:
    """Called with every module that has children, before its forward without gradient; the outermost comes first."""
    known = session.facts.setdefault("_followers", Living())  # each a Copy, or None for what is no copy
    if module not in known:
        known[module] = None
        trained = find_trained(session, module)
        if trained is None:
            return
        for part in module.modules():
            known[part] = None
        known[module] = begin(session, module, trained)
    copy: Copy | None = known[module]
    trained = copy.trained() if copy is not None else None
    if copy is None or trained is None or any(norm.training for norm in norms(module)):
        return
    facts = copy.facts
    if facts["called"] == session.step:
        return
    facts.update(called=session.step, times=facts["times"] + 1)
    if facts["times"] > MOST_LOOKS and session.step % 16:
        return
    with torch.no_grad(), unseen_by_modes():  # no part of a step that is taped
        look(copy, module, trained)
    facts["step"] = session.step


def find_trained(session: Session, module: nn.Module) -> nn.Module | None:
    """The part of what trains that has the same shapes of weights, and the same BatchNorms with running statistics."""
    if not norms(module) or is_trained(session, module):
        return None
    own, shapes = {id(part) for part in module.modules()}, [norm.num_features for norm in norms(module)]
    for root in session.names.roots.values():
        for part in root.modules():
            if id(part) in own or not part._modules or signature(part) != signature(module):
                continue
            if [norm.num_features for norm in norms(part)] == shapes and is_trained(session, part):
                return part
    return None


def is_trained(session: Session, module: nn.Module) -> bool:
    return any(p.requires_grad and session.names.of_parameter(p) is not None for p in module.parameters())


def begin(session: Session, module: nn.Module, trained: nn.Module) -> Copy:
    kept = session.facts.setdefault("copies", [])
    facts = {"class": type(module).__name__, "shapes": signature(module), "line": line_outside_forward()}
    kept.append(facts | {"called": -1, "step": -1, "times": 0})
    with unseen_by_modes():
        statistics = [tensor.detach().clone() for tensor in running(module)]
        return Copy(weakref.ref(trained), kept[-1], statistics, largest(module).detach().clone())


def look(copy: Copy, module: nn.Module, trained: nn.Module) -> None:
    """How far the copy's statistics are from the trained ones, and what has changed since the copy was first called."""
    shift, ratio, worst = 0.0, 1.0, 0
    for place, (old, new) in enumerate(zip(norms(module), norms(trained), strict=True)):
        scale = new.running_var.double().clamp_min(1e-12)
        off = float(((old.running_mean - new.running_mean).double().abs() / scale.sqrt()).median())
        times = float((old.running_var.double().clamp_min(1e-12) / scale).log().abs().median().exp())
        if max(off, times - 1) > max(shift, ratio - 1):
            shift, ratio, worst = off, times, place
    weight = largest(module)
    names = [name for name, part in trained.named_modules() if is_norm(part)]
    copy.facts.update(
        norm=names[worst],
        shift=shift,
        ratio=ratio,
        untouched=all(
            bool((n.running_mean == 0).all() and (n.running_var == 1).all()) for n in norms(module)
        ),
        still=all(torch.equal(a, b) for a, b in zip(copy.statistics, running(module), strict=True)),
        follows=not torch.equal(weight, copy.weight) or torch.equal(weight, largest(trained)),
    )


def is_norm(module: nn.Module) -> bool:
    return (
        isinstance(module, BATCH_NORMS) and module.running_mean is not None and module.running_var is not None
    )


def norms(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if is_norm(part)]


def running(module: nn.Module) -> Iterable[Tensor]:
    return [tensor for norm in norms(module) for tensor in (norm.running_mean, norm.running_var)]


def largest(module: nn.Module) -> Tensor:
    return max(module.parameters(), key=lambda parameter: parameter.numel())


def signature(module: nn.Module) -> str:
    """One number for the shapes of a model's parameters, whatever their order."""
    return signature_of(module.parameters())


def signature_of(tensors: Iterable[Tensor]) -> str:
    shapes = sorted(tuple(tensor.shape) for tensor in tensors)
    return str(zlib.crc32(repr(shapes).encode()))


def line_outside_forward() -> str:
    """The line outside of every forward that began this pass."""
    for frame in user_frames():
        if frame.f_code.co_name != "forward":
            return line_of(frame)
    return ""
