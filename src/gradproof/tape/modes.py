"""Modes that look into what runs: ours stands below the script's own, and theirs see nothing of what we do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode

NOTHING = nullcontext()


def unseen_by_modes() -> AbstractContextManager[None]:
    """What is done meanwhile is seen by no mode, be it of dispatch or of functions."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _without_modes()
    return NOTHING


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def below_all(mode: TorchDispatchMode) -> Iterator[None]:
    """A mode that sees what all others have made of the operations, whoever comes and goes meanwhile.

    Entered in the usual way it would stand above those that the script has entered before, and taking it away would
    take away one that the script has entered since.
    """
    with _disable_current_modes():  # what stood there is put back above
        _push_mode(mode)
    try:
        yield
    finally:
        _take_out(mode)


def _take_out(mode: TorchDispatchMode) -> None:
    above = []
    for _ in range(torch._C._len_torch_dispatch_stack()):
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def without_trace(function: Callable, *args: Any) -> Any:
    """A call that no mode sees and autograd does not follow."""
    with unseen_by_modes():
        return without_gradient(function, *args)


def without_gradient(function: Callable, *args: Any) -> Any:
    """A call that autograd does not follow; not by torch.no_grad, which is listened to, and costs more than a call."""
    outer = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # inside: when it returns, a signal handler may raise
        return function(*args)
    finally:
        torch._C._set_grad_enabled(outer)
