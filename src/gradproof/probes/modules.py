"""Measures what modules put out, and the gradients that come back to it, on the steps that are due for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.probes.aside import is_recorded
from gradproof.probes.guard import raised_by_signal
from gradproof.probes.lines import Lines
from gradproof.probes.names import Names
from gradproof.probes.tensors import is_measurable
from gradproof.tape.modes import unseen_by_modes

# what is called with (kind, name, tensor, the module's class), and says whether it wants to hear more
Collect = Callable[[str, str, Tensor, str], bool | None]

MOST_TENSORS = 4  # of one module's output


class OutputProbe:
    """A global forward hook that is there only while a step is measured whole: no cost on all the others.

    Gradients come through `tensor.register_hook`: unlike full backward hooks, it disturbs neither in-place
    operations nor functorch, and leaves gradients bit-identical.
    """

    def __init__(
        self, names: Names, lines: Lines, collect: Collect, fail: Callable[[Exception], None]
    ) -> None:
        self._names = names
        self._lines = lines
        self._collect = collect
        self._fail = fail
        self.handle: Any = None  # of the hook, while it is there
        self._last: weakref.ref[Tensor] | None = None

    def attach(self) -> None:
        if self.handle is None:
            self.handle = nn.modules.module.register_module_forward_hook(self._forward)

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def _forward(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            with unseen_by_modes():
                self._listen(module, output)
        except Exception as error:
            if raised_by_signal(error):
                raise
            self._fail(error)

    def _listen(self, module: nn.Module, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or recomputing() or is_recorded():
            return
        name = self._names.of_module(module)
        if name is None:
            return
        if self._names.is_outermost(module):
            self._lines.note("forward")
            if getattr(module, "require_backward_grad_sync", False):  # DDP, outside of no_sync
                self._lines.note("synchronised forward")
        for index, tensor in enumerate(tensors_in(output)):
            if (
                self._last is not None and self._last() is tensor
            ):  # a container hands on what its last child made
                continue
            self._last = weakref.ref(tensor)
            label = name if index == 0 else f"{name}[{index}]"
            heard = self._collect("output", label, tensor, type(module).__name__)
            if heard and tensor.requires_grad:
                tensor.register_hook(self._backward(label, type(module).__name__))

    def _backward(self, label: str, made_by: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            # an output that the loss does not use (an LSTM's state, in a penalty a layer's output) has none
            with unseen_by_modes():
                if gradient is not None and is_measurable(gradient):
                    self._collect("output_gradient", label, gradient, made_by)

        return hook


def recomputing() -> bool:
    """Activation checkpointing runs a forward again inside backward: it was measured the first time."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The measurable tensors of a module's output: a tensor, tuple, list, dict or dataclass of them."""
    found, todo = 0, [output]
    while todo and found < MOST_TENSORS:
        value = todo.pop(0)
        if is_measurable(value) and value.numel():
            found += 1
            yield value
        elif isinstance(value, (list, tuple)):
            todo = [*value[:16], *todo]
        elif isinstance(value, dict):
            todo = [*list(value.values())[:16], *todo]
