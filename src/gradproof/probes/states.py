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

from gradproof.probes.names import user_line
from gradproof.probes.session import Session

MOST = 20  # events kept of one kind


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
        facts = _describe_load(session, self, state_dict) if len(found) < MOST and session.alive else None
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
    trained: dict[
        int, tuple[Any, str]
    ] = {}  # first parameter -> what trained it; parameters live as long as this

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
        if id(first) in trained and trained[id(first)][1] == type(self).__name__ and session.step > 0:
            if len(facts["remade"]) < 1000:
                facts["remade"].append(session.step)
            facts["remade_line"] = user_line()
            facts["remade_class"] = type(self).__name__
        trained[id(first)] = (first, type(self).__name__)

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
    session.lines.note("clip")
    session.facts.setdefault("_clipped", set()).update(id(p) for p in parameters)


def clip_coverage(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Of the parameters that a step changes, how many the clip before it was given."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    facts = session.facts.setdefault("clip", {"steps": 0, "given": 0, "stepped": 0, "foreign": 0})

    def before(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if "sharded" not in session.facts:  # each rank then holds another part of every tensor
            every = [p for group in optimizer.param_groups for p in group["params"]]
            session.facts["sharded"] = any(hasattr(p, "to_local") for p in every)
        given = session.facts.pop("_clipped", None)
        if given is None or facts["steps"] >= 50 or not chosen(optimizer):
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        facts["steps"] += 1
        facts["stepped"] += len(stepped)
        facts["given"] += sum(id(p) in given for p in stepped)
        facts["foreign"] += len(given - {id(p) for p in stepped})

    stack.callback(register_optimizer_step_pre_hook(before).remove)
