"""Sees trained weights that are put back, between two steps, to what they have been before.

Weights are compared with what the last step left; who wrote over them, and how, does not matter. What is put back
before the next step (an average that was lent for a validation, a perturbation) is never seen.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradproof.probes.copies import signature_of
from gradproof.probes.guard import raised_by_signal
from gradproof.probes.optimizer import parameters_of
from gradproof.probes.session import Session
from gradproof.probes.tensors import local
from gradproof.tape.living import Living

MOST_STATES = 32  # different ones: whoever clamps or averages weights never comes back to the same
NUMPYS = (torch.float32, torch.float64, torch.float16)
SAMPLE = 16  # numbers that show whether anything was written
COPIES = re.compile(r"\.copy_\(|\.data\s*=(?!=)")


def returns(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Compares the trained weights before each step with what the step before it left, as the session's events come."""
    session.returns = Returns(session)
    stack.callback(setattr, session, "returns", None)


class Returns:
    """What was written over the trained weights of one run, and how often they became the same."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.over = False
        self.first: Living[tuple[float, ...]] = (
            Living()
        )  # a fingerprint of the weights each optimizer began with
        self.left: Living[list[float]] = Living()  # some numbers, as its last step left them
        self.begun: Living[None] = Living()  # parameters that some optimizer has begun with
        self.states: dict[tuple, list[int]] = {}  # what all weights became, and at which steps
        self.views: Living[View] = Living()  # where those numbers lie
        self.loaded = 0  # states of optimizers, until the last writing
        self.base: Living[list[float]] = Living()  # some numbers, as the last writing left them

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        try:
            left, view = self.left.get(optimizer), self.views.get(optimizer)
            if left is not None and view is not None and view.numbers(optimizer) == left:
                return  # as nearly always
            if optimizer not in self.first:
                self._begin(optimizer)
            elif left is not None and self._is_overwritten(optimizer, left):
                self._note_what_is_taken_back(optimizer)
                self._note()
        except Exception as error:
            self._give_up(error)

    def after(self, optimizer: Optimizer) -> None:
        try:
            view = self.views.get(optimizer)
            found = view.numbers(optimizer) if view is not None else None
            self.left[optimizer] = self._some_numbers(optimizer) if found is None else found
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Sharded, sparse, on another device: weights of a kind not known here."""
        if raised_by_signal(error):
            raise error
        self.over = True

    def _some_numbers(self, optimizer: Optimizer) -> list[float]:
        """Of its last matrix, which is near the loss: all of it moves at every step. None of what is on a GPU."""
        view = self.views.get(optimizer)
        found = view.numbers(optimizer) if view is not None else None
        if found is not None:
            return found
        if not last_matrix(optimizer).is_cpu:
            return []
        view = self.views[optimizer] = View(optimizer)
        return view.entries.tolist()

    def _begin(self, optimizer: Optimizer) -> None:
        """One that is made anew over the same weights starts training anew, and may start where it began."""
        if any(p in self.begun for p in parameters_of(optimizer)):
            self._it_is_meant()
        for parameter in parameters_of(optimizer):
            self.begun[parameter] = None
        self.first[optimizer] = fingerprint(optimizer, self.session)
        if now := self._some_numbers(optimizer):
            self.base[optimizer] = now

    def _it_is_meant(self) -> None:
        self.over = True
        self.session.facts.pop("returns", None)

    def _is_overwritten(self, optimizer: Optimizer, left: list[float]) -> bool:
        now = self._some_numbers(optimizer)
        return now != left if now else self._loaded() is not None

    def _loaded(self) -> str | None:
        """The line of a load_state_dict since the last step."""
        step, line = self.session.facts.get("_last_load", (-1, ""))
        return line if step == self.session.step else None

    def _note_what_is_taken_back(self, optimizer: Optimizer) -> None:
        """Of the way that the weights have gone since they were last written over: the share that is lost."""
        now, base = self._some_numbers(optimizer), self.base.get(optimizer)
        if not now:
            return
        self.base[optimizer] = now
        if base is not None:
            way = [left - start for left, start in zip(self.left[optimizer], base, strict=True)]
            back = [left - here for left, here in zip(self.left[optimizer], now, strict=True)]
            length = sum(x * x for x in way)
            facts = self.session.facts.setdefault("taken_back", {"shares": [], "steps": []})
            if length > 0 and len(facts["shares"]) < 200:
                facts["shares"].append(sum(x * y for x, y in zip(way, back, strict=True)) / length)
                facts["steps"].append(self.session.step)
                facts["line"] = self._loaded() or self._copying_line()

    def _note(self) -> None:
        if self._optimizer_is_put_back():
            self._it_is_meant()
            return
        state = [fingerprint(optimizer, self.session) for optimizer in self.first]
        for optimizer in self.left:
            self.after(optimizer)  # one writing is seen once, whatever number of optimizers it is about
        steps = self.states.setdefault(tuple(state), [])
        steps.append(self.session.step)
        if len(self.states) > MOST_STATES:
            self._it_is_meant()
        elif len(steps) >= 2 and len(steps) == max(map(len, self.states.values())):
            self._describe(steps, state == self.first.values())
        if "returns" in self.session.facts:
            self.session.facts["returns"]["writes"] = sum(map(len, self.states.values()))

    def _optimizer_is_put_back(self) -> bool:
        loaded = self.session.facts.get("optimizer_states", {}).get("loaded", 0)
        before, self.loaded = self.loaded, loaded
        return loaded > before or any(has_moments(o) and not o.state for o in self.first)

    def _describe(self, steps: list[int], initial: bool) -> None:
        facts = self.session.facts.setdefault("returns", {})
        if not facts:
            line = self._loaded()
            facts["loaded"] = line is not None
            facts["line"] = self._copying_line() if line is None else line
            facts["source"] = find_source(list(self.first))
        facts.update(
            steps=steps[:20],
            times=len(steps),
            initial=initial,
            moments=any(map(has_moments, self.first)),
        )

    def _copying_line(self) -> str:
        """The one line of the script that copies into tensors, if there is one."""
        found = list(self.session.lines.find_lines("step", COPIES))
        return found[0] if len(found) == 1 else ""


class View:
    """Some numbers of an optimizer's last matrix, where they lie: at each step they are read twice."""

    def __init__(self, optimizer: Optimizer) -> None:
        matrix = last_matrix(optimizer)
        flat = local(matrix).reshape(-1)
        entries = flat[:: max(1, flat.numel() // SAMPLE)]
        # the same memory: NumPy reads it in a tenth of the time
        self.entries = entries.numpy() if entries.dtype in NUMPYS else entries
        self._held = optimizer.param_groups[-1]["params"]
        self._count, self._groups = len(self._held), len(optimizer.param_groups)
        self._place = next(place for place, p in enumerate(self._held) if p is matrix)
        self._address = matrix.data_ptr()

    def numbers(self, optimizer: Optimizer) -> list[float] | None:
        """As they are now; None where another matrix, or other memory, has taken their place."""
        held, groups = self._held, optimizer.param_groups
        same = len(groups) == self._groups and groups[-1]["params"] is held and len(held) == self._count
        if same and held[self._place].data_ptr() == self._address:
            return self.entries.tolist()
        return None


def has_moments(optimizer: Optimizer) -> bool:
    return any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)


def last_matrix(optimizer: Optimizer) -> Tensor:
    tensors = optimizer.param_groups[-1]["params"]
    for parameter in reversed(tensors[-4:]):
        if parameter.dim() >= 2:
            return parameter
    return tensors[-1]


def fingerprint(optimizer: Optimizer, session: Session) -> tuple[float, ...]:
    """Sums over every tensor that it trains, and over the buffers that are no running statistics: masks, say."""
    tensors = [local(p) for p in parameters_of(optimizer)]
    for root in session.names.roots.values():
        for part in root.modules():
            if not hasattr(part, "running_mean"):
                tensors += [b for b in part.buffers(recurse=False) if b.numel() and not b.is_complex()]
    sums = [torch.sum(t, dtype=torch.float64) for t in tensors]
    squares = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors if t.is_floating_point()]
    device = sums[0].device
    return tuple(torch.stack([number.to(device) for number in (*sums, *squares)]).tolist())


def find_source(optimizers: list[Optimizer]) -> dict[str, str] | None:
    """Another model that is alive and holds exactly what the trained weights were put back to."""
    trained = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    own, shapes = {id(p) for p in trained}, signature_of(trained)
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module) or not module.__dict__.get("_modules"):
            continue
        tensors: list[Tensor] = list(module.parameters())
        if len(tensors) != len(trained) or any(id(p) in own for p in tensors):
            continue
        if signature_of(tensors) == shapes and all(map(torch.equal, tensors, trained)):
            return {"class": type(module).__name__, "shapes": shapes}
    return None
