"""Sees loaded weights that are written over before they are used: initialised again, after the checkpoint was read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradproof.probes.aside import is_recorded
from gradproof.probes.guard import quietly
from gradproof.probes.names import user_line
from gradproof.probes.session import Session
from gradproof.tape.modes import unseen_by_modes

SAMPLE = 256  # entries kept of each matrix
FEWEST = 64  # entries of a matrix that can be told from another
STRANGERS = 0.3  # cosine of two samples that have nothing to do with one another: 1 / √entries, and to spare
MOST = 50  # loads that are looked at


@dataclass(frozen=True)
class Loaded:
    """What a module's matrices held right after a load."""

    line: str
    name: str
    samples: list[tuple[Any, Tensor]]  # weak reference to the parameter, its first entries

    def overwritten(self) -> tuple[int, int]:
        """How many of the matrices that are still there hold something that does not resemble what was loaded."""
        present = [(p, sample) for reference, sample in self.samples if (p := reference()) is not None]
        return sum(not resembles(first_entries(p), sample) for p, sample in present), len(present)


def overwritten_loads(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Whether what load_state_dict brought is still there when the next optimizer step begins."""
    waiting: list[Loaded] = []
    original = nn.Module.load_state_dict
    left = iter(range(MOST))

    @functools.wraps(original)
    def load_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if session.alive and not is_recorded() and next(left, None) is not None:
            with quietly(), unseen_by_modes():  # a look is not worth a training
                matrices = [
                    p for p in self.parameters() if p.dim() >= 2 and p.numel() >= FEWEST and is_here(p)
                ]
                samples = [(weakref.ref(p), first_entries(p)) for p in matrices]
                waiting.append(Loaded(user_line(), type(self).__name__, samples))
                if look not in session.looks_before:
                    session.looks_before.append(look)
        return result

    def look(optimizer: Optimizer) -> bool:
        while waiting and not is_recorded():
            loaded = waiting.pop()
            with quietly(), unseen_by_modes():
                gone, of = loaded.overwritten()
                if of and gone == of:
                    session.facts.setdefault("overwritten_loads", []).append(
                        {"step": session.step, "line": loaded.line, "class": loaded.name, "matrices": of}
                    )
        return not waiting

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    stack.callback(setattr, nn.Module, "load_state_dict", original)
    stack.callback(session.looks_before.clear)


def is_here(parameter: Tensor) -> bool:
    """Its entries can be read without asking another rank, or a device that holds none."""
    return not hasattr(parameter, "to_local") and parameter.device.type != "meta"


@torch.no_grad()
def first_entries(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten()[:SAMPLE].float().cpu().clone()


def resembles(now: Tensor, then: Tensor) -> bool:
    """The same direction still; an all-zero matrix resembles whatever is there."""
    if now.shape != then.shape or not then.any():
        return True
    return float(torch.nn.functional.cosine_similarity(now, then, dim=0)) > STRANGERS
