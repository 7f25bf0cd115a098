"""A script that begins where another run was: with the weights, buffers and optimizer states of a recorded step.

    with starting_from("runs/a/specimens/step-00000300") as snapshot:
        ...  # the script; print(snapshot) says what was taken over

What the script makes is filled as soon as an optimizer holds it, before the first forward. Its data, its schedules and
its own counters begin as they always do. This changes a training, and is done for nobody who does not ask for it.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradproof.tape.replica import derives_from_pytorchs
from gradproof.tape.specimen import Specimen, load


class Snapshot:
    """The weights of a recorded step on their way into a live training."""

    def __init__(self, specimen: Specimen) -> None:
        self.specimen = specimen
        self.taken: dict[int, Tensor] = {}  # id of a live parameter -> what it got its values from
        self.seen: dict[
            int, Tensor
        ] = {}  # live parameters that an optimizer holds, kept so that ids stay theirs
        self.states = 0
        self._records = list(specimen.optimizers)

    def __str__(self) -> str:
        return (
            f"began with step {self.specimen.step}: {len(self.taken)} of {len(self.seen)} parameters, "
            f"{self.states} optimizer states"
        )

    @torch.no_grad()
    def fill(self, optimizer: Optimizer) -> None:
        """The parameters of an optimizer by their names in a model; where there is no model, by their order."""
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.seen |= held
        record = self._record_of(optimizer)
        for module in modules_with(held):
            for skeleton in self.specimen.models.values():
                self._fill_module(module, skeleton)
        theirs = [p for group in record.param_groups for p in group["params"]] if record is not None else []
        mine = list(held.values())
        if not any(key in self.taken for key in held) and [p.shape for p in theirs] == [
            p.shape for p in mine
        ]:
            for live, kept in zip(mine, theirs, strict=True):
                self._copy(live, kept)
        if record is not None:
            handle = optimizer.register_step_pre_hook(
                lambda *_: self._give_states(
                    optimizer, record, handle
                )  # what a class makes in __init__ is there now
            )

    def _record_of(self, optimizer: Optimizer) -> Any:
        """The first of the recorded ones of that class that no other has taken."""
        kind = type(optimizer).__name__
        found = next((record for record in self._records if type(record).__name__ == kind), None)
        self._records = [record for record in self._records if record is not found]
        return found

    def _fill_module(self, module: nn.Module, skeleton: nn.Module) -> None:
        kept = dict(skeleton.named_parameters())
        for name, live in module.named_parameters():
            if name in kept and kept[name].shape == live.shape:
                self._copy(live, kept[name])
        buffers = dict(skeleton.named_buffers())
        for name, buffer in module.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape and not buffers[name].is_meta:
                buffer.copy_(buffers[name])

    def _copy(self, live: Tensor, kept: Tensor) -> None:
        if not kept.is_meta and id(live) not in self.taken:
            live.copy_(kept)
            self.taken[id(live)] = kept

    def _give_states(self, optimizer: Optimizer, record: Any, handle: Any) -> None:
        handle.remove()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kept = self.taken.get(id(parameter))
                state = record.state.get(kept) if kept is not None else None
                if state:
                    optimizer.state[parameter] = {
                        k: live_state(k, v, parameter, optimizer) for k, v in state.items()
                    }
                    self.states += 1


def live_state(name: str, value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """A copy on the parameter's device; PyTorch's optimizers, and those made from one, count steps in a tensor."""
    if isinstance(value, Tensor):
        return value.detach().clone().to(parameter.device if value.dim() else value.device)
    count = name == "step" and derives_from_pytorchs(type(optimizer))
    return torch.tensor(float(value)) if count else value


def modules_with(held: dict[int, Tensor]) -> list[nn.Module]:
    """Live modules that hold one of these parameters and are no part of another: the models."""
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    found = [m for m in found if "gradproof_skeleton" not in m.__dict__ and "_modules" in m.__dict__]
    inside = {id(child) for module in found for child in module._modules.values()}
    roots = [module for module in found if id(module) not in inside]
    return [module for module in roots if any(id(p) in held for p in module.parameters())]


@contextmanager
def starting_from(path: str | os.PathLike) -> Iterator[Snapshot]:
    """While it is open, every optimizer that is made gets what the recorded step had."""
    snapshot = Snapshot(load(path, "cpu"))
    classes = {kind for kind in subclasses(Optimizer) if "__init__" in vars(kind)}
    originals = {kind: vars(kind)["__init__"] for kind in (*classes, Optimizer)}
    depth = 0

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                original(self, *args, **kwargs)
            finally:
                depth -= 1
            if not depth:  # the outermost: all of it is made
                snapshot.fill(self)

        return __init__

    for kind, original in originals.items():
        kind.__init__ = wrapped(original)  # type: ignore[misc]
    try:
        yield snapshot
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[misc]


def subclasses(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for child in below:
        yield child
        yield from subclasses(child)
