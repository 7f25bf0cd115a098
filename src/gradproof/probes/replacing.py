"""Puts something of ours in place of what a script calls, so that nobody sees a difference, and takes it away again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def replace(stack: ExitStack, owner: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Put `wrapper(original)` in place of an attribute until the stack closes."""
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))

    def undo() -> None:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    stack.callback(undo)
