"""Steps that a CUDA graph holds: what a step consists of is noted while it is captured, and measured at each replay.

While it is captured nothing is computed. Tensors are kept by reference: memory that is referred to is not used again
by the graph, so after a replay the loss of that replay stands in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradproof.tape.living import Living

LETTERS = {"zero_grad": "z", "unscaled": "u", "scheduler_stepped": "l"}


@dataclass
class Captured:
    """What happened while one graph was captured."""

    order: list[str] = field(default_factory=list)
    optimizers: Living[float | None] = field(default_factory=Living)  # and its learning rate
    losses: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    clip_limit: float | None = None
    norm_before_clip: Tensor | None = None

    @property
    def leaves_gradients(self) -> bool:
        """Whether after a replay the gradients are there that its step has used."""
        return "z" not in "".join(self.order).rpartition("s")[2]


class Graphs:
    """The graphs of a process that hold a backward or a step; `starts_clean` says that no parameter has a gradient."""

    def __init__(self, starts_clean: Callable[[], bool]) -> None:
        self._starts_clean = starts_clean
        self._captured: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()
        self._open: Captured | None = None
        self._unscaled: dict[int, Tensor] = {}  # id of a scaled loss -> the loss

    def begin(self) -> None:
        self._open = Captured()

    def end(self, graph: Any) -> None:
        if self._open is not None and self._open.order:
            self._captured[graph] = self._open
        self._open = None
        self._unscaled.clear()

    def of(self, graph: Any) -> Captured | None:
        return self._captured.get(graph)

    def note(self, event: str, args: tuple) -> None:
        """An event of a step that is being captured."""
        step = self._open
        if step is None:
            return
        if event in LETTERS:
            step.order.append(LETTERS[event])
        elif event == "scaled":
            self._unscaled[id(args[1])] = args[0]
        elif event == "backward_begins":
            self._note_backward(step, *args)
        elif event == "clipped":
            how, limit, before = args
            step.order.append("c" if how == "norm" else "v")
            step.clip_limit = float(limit)
            step.norm_before_clip = None if before is None else before.detach()
        elif event == "after_update":
            step.order.append("s")
            step.optimizers[args[0]] = rate_that_is_captured(args[0])

    def _note_backward(self, step: Captured, roots: list[Any], weights: list[Tensor | None]) -> None:
        if not step.order and self._starts_clean():
            step.order.append("z")  # each replay writes its gradients, and adds to none
        step.order.append("b")
        for root, weight in zip(roots, weights, strict=True):
            loss = self._unscaled.pop(id(root), root)
            if isinstance(loss, Tensor):
                step.losses.append((loss.detach(), weight))


def rate_that_is_captured(optimizer: torch.optim.Optimizer) -> float | None:
    """A number is written into the graph, whatever a schedule sets later; a tensor is read at each replay."""
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    return None if any(isinstance(rate, Tensor) for rate in rates) else max(map(float, rates), default=0.0)
