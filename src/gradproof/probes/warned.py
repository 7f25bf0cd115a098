"""Shows a warning at the place that it has without us: our own frames, between PyTorch and the script, do not count.

`warnings.warn(text, stacklevel=2)` names whoever has called a function of PyTorch's; that would be a wrapper of ours.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from gradproof.probes.replacing import replace
from gradproof.probes.script import execute
from gradproof.probes.session import Session

BEYOND = 1 << 20  # frames: more than there are, so that it is nobody's place, as at the top of a script


def warned(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Counts past our frames; nothing else about a warning changes."""

    def wrapper(original: Callable) -> Callable:
        def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not isinstance(stacklevel, int):
                return original(message, category, stacklevel, *args, **kwargs)
            more = 1 + frames_of_ours(sys._getframe(1), stacklevel)
            return original(message, category, stacklevel + more, *args, **kwargs)

        return warn

    replace(stack, warnings, "warn", wrapper)


def frames_of_ours(caller: FrameType, stacklevel: int) -> int:
    """How many lie between whoever warns and the place that is meant; a warning of our own counts them itself."""
    found, left, frame = 0, stacklevel - 1, caller.f_back
    if is_ours(caller):
        return 0
    while left > 0 and frame is not None:
        if frame.f_code is execute.__code__:  # the script begins here
            return BEYOND
        if is_ours(frame):
            found += 1
        elif not is_import(frame):
            left -= 1
        frame = frame.f_back
    return found


def is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == "gradproof"


def is_import(frame: FrameType) -> bool:
    """Those are never counted by Python itself."""
    file = frame.f_code.co_filename
    return "importlib" in file and "_bootstrap" in file
