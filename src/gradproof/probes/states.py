"""Sees what is loaded into models, which optimizers replace others, and which parameters a clip is given."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradproof.probes.aside import is_recorded
from gradproof.probes.guard import quietly
from gradproof.probes.masters import are_copies
from gradproof.probes.names import user_line
from gradproof.probes.session import Session
from gradproof.tape.living import Living
from gradproof.tape.modes import unseen_by_modes, without_trace

MOST = 20  # events kept of one kind
LOOKS = (0, 1, 3, 10, 30)  # clips at which other tensors than those that are stepped are looked at


def loads(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Every load_state_dict that the script calls: how many keys fit, and whether the tensors are the model's own."""
    found: list[dict[str, Any]] = session.facts.setdefault("loads", [])
    original, take = nn.Module.load_state_dict, nn.Module.state_dict
    taken: dict[int, tuple[Any, str]] = {}  # the last states that were taken, and where

    @functools.wraps(take)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = take(self, *args, **kwargs)
        if not args and "destination" not in kwargs and session.alive:  # not a child's part of one
            with suppress(TypeError):  # a hook may hand out a plain dict, which cannot be referred to
                taken[id(result)] = (weakref.ref(result), user_line())
            if len(taken) > MOST:
                del taken[next(iter(taken))]
        return result

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        facts = None
        if len(found) < MOST and session.alive:
            facts = without_trace(_describe_load, session, self, state_dict)
        known = taken.get(id(state_dict))
        if facts is not None and known is not None and known[0]() is state_dict:
            facts["taken"] = known[1]
        result = original(self, state_dict, *args, **kwargs)
        if facts is not None:
            found.append(facts)
        if session.alive and any(session.names.of_parameter(p) is not None for p in self.parameters()):
            session.facts["_last_load"] = (session.step, user_line())
        return result

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    nn.Module.state_dict = state_dict  # type: ignore[method-assign]
    stack.callback(setattr, nn.Module, "load_state_dict", original)
    stack.callback(setattr, nn.Module, "state_dict", take)


def _describe_load(session: Session, module: nn.Module, given: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        own.update(module.named_buffers(remove_duplicate=False))
        return {
            "step": session.step,
            "line": user_line(),
            "model": session.names.of_module(module),
            "class": type(module).__name__,
            "keys": len(own),
            "given": len(given),
            "fitting": sum(name in own for name in given),
            "same_memory": sum(name in own and shares_memory(t, own[name]) for name, t in given.items()),
            "strange": next((name for name in given if name not in own), ""),
            "missing": next((name for name in own if name not in given), ""),
        }
    except (AttributeError, TypeError, RuntimeError):  # not a plain state: the original will say so
        return None


def shares_memory(tensor: Any, other: Tensor) -> bool:
    """Whether two tensors are the same memory: what is written to one is then in the other."""
    return (
        isinstance(tensor, Tensor)
        and tensor.numel() > 0
        and tensor.layout == other.layout == torch.strided
        and tensor.device == other.device
        and tensor.data_ptr() == other.data_ptr() != 0
    )


def optimizer_states(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Whether an optimizer's state is restored where a checkpoint holds one, and whether optimizers are made anew."""
    facts = session.facts.setdefault("optimizer_states", {"in_files": 0, "loaded": 0, "remade": []})
    restore, load = Optimizer.load_state_dict, torch.load
    trained: Living[str] = Living()  # the first parameter of each -> what trained it

    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        facts["loaded"] += 1
        return restore(self, *args, **kwargs)

    def load_file(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        if isinstance(result, dict) and any(_is_optimizer_state(value) for value in result.values()):
            facts["in_files"] += 1
            facts.setdefault("line", user_line())
        return result

    make = Optimizer.__init__

    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        first = next((p for group in self.param_groups for p in group["params"]), None)
        if first is None:
            return
        if trained.get(first) == type(self).__name__ and session.step > 0:
            if len(facts["remade"]) < 1000:
                facts["remade"].append(session.step)
            facts["remade_line"] = user_line()
            facts["remade_class"] = type(self).__name__
        trained[first] = type(self).__name__

    for owner, name, new in (
        (Optimizer, "load_state_dict", functools.wraps(restore)(load_state_dict)),
        (torch, "load", functools.wraps(load)(load_file)),
        (Optimizer, "__init__", functools.wraps(make)(init)),
    ):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, new)


def _is_optimizer_state(value: Any) -> bool:
    return isinstance(value, dict) and {"state", "param_groups"} <= value.keys() and bool(value["state"])


def note_clip(session: Session, parameters: Iterable[Tensor]) -> None:
    """Which parameters the next optimizer step finds clipped."""
    if session.owner.elsewhere():
        return
    session.lines.note("clip")
    if session.look_at_clip is not None and session.look_at_clip not in session.looks_before:
        session.looks_before.append(session.look_at_clip)
    clipped = session.facts.setdefault("_clipped", Living())
    for parameter in parameters:
        clipped[parameter] = None


def clip_coverage(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Of the parameters that a step changes, how many the clip before it was given.

    A clip may be meant for the second optimizer that steps: one that changes nothing of what was clipped counts only
    if none does before the next clip.
    """
    facts = session.facts.setdefault(
        "clip", {"steps": 0, "given": 0, "stepped": 0, "foreign": 0, "copies": 0}
    )
    refuted = False  # once what is stepped is no copy of what is clipped, it never was
    passed: tuple[Living, int] | None = (
        None  # what was clipped, and tensors of a step that has changed none of it
    )

    def look(optimizer: Optimizer) -> bool:
        if session.owner.elsewhere():
            return False
        look_at_clip(optimizer)
        return passed is None

    def look_at_clip(optimizer: Optimizer) -> None:
        nonlocal refuted, passed
        if "sharded" not in session.facts:  # each rank then holds another part of every tensor
            every = [p for group in optimizer.param_groups for p in group["params"]]
            flat = any(getattr(p, "_is_flat_param", False) for p in every)  # FSDP1
            session.facts["sharded"] = flat or any(hasattr(p, "to_local") for p in every)
        given = session.facts.pop("_clipped", None)
        if given is not None:
            passed = None
        elif passed is not None:
            given = passed[0]
        if given is None or facts["steps"] >= 50 or not chosen(optimizer):
            return
        if session.facts["sharded"] and not any(hasattr(p, "to_local") for p in given):
            return  # the parts of parameters that lie here: other tensors, and the same memory
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        missed = [p for p in stepped if p not in given]
        if passed is not None:
            if len(missed) == len(stepped):
                return
            facts["steps"] -= 1
            facts["stepped"] -= passed[1]
            facts["foreign"] -= len(given)
            passed = None
        elif stepped and len(missed) == len(stepped):
            passed = given, len(stepped)
        if missed and not refuted and not is_recorded():
            facts["copies"] += len(missed)
            if facts["steps"] in LOOKS and not _are_copies(missed, list(given)):
                facts["copies"], refuted = 0, True
        facts["steps"] += 1
        facts["stepped"] += len(stepped)
        facts["given"] += len(stepped) - len(missed)
        facts["foreign"] += len(set(map(id, given)) - set(map(id, stepped)))

    session.look_at_clip = look
    session.looks_before.append(look)
    stack.callback(session.looks_before.clear)


def _are_copies(stepped: list[Tensor], clipped: list[Tensor]) -> bool:
    with quietly(), unseen_by_modes():
        return are_copies(stepped, clipped)
    return True  # nothing is said of tensors of a kind that is not known here
