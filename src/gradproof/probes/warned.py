"""Warnings: shown at the place that they have without us, and those of PyTorch and NumPy kept as evidence.

`warnings.warn(text, stacklevel=2)` names whoever has called a function of PyTorch's; that would be a wrapper of ours,
so our own frames do not count. What PyTorch says by itself at a line of the script (sizes that broadcast, a schedule
that steps first) is a witness that costs nothing: `facts["said"]` has each text once, with its line.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from gradproof.probes.guard import quietly
from gradproof.probes.names import user_line
from gradproof.probes.replacing import replace
from gradproof.probes.script import execute
from gradproof.probes.session import Session

LIBRARIES = {"torch": "PyTorch", "numpy": "NumPy"}
MOST_SAID = 20  # different texts that are kept
LONGEST = 300  # characters of one
TRIGGERED = re.compile(
    r"\s*\(Triggered internally at .*\)\s*$", re.S
)  # where in PyTorch's C++: nobody's line
BEYOND = 1 << 20  # frames: more than there are, so that it is nobody's place, as at the top of a script


def warned(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Counts past our frames and listens; nothing else about a warning changes."""

    def wrapper(original: Callable) -> Callable:
        def warn(message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or not isinstance(stacklevel, int):
                return original(message, category, stacklevel, *args, **kwargs)
            caller = sys._getframe(1)
            hear(session, LIBRARIES.get(caller.f_globals.get("__name__", "").partition(".")[0]), message)
            more = 1 + frames_of_ours(caller, stacklevel)
            return original(message, category, stacklevel + more, *args, **kwargs)

        return warn

    def shown(original: Callable) -> Callable:
        def show(warning: Any) -> None:  # what C code says does not come by warnings.warn
            hear(session, speaker(warning), warning.message)
            return original(warning)

        return show

    replace(stack, warnings, "warn", wrapper)
    if hasattr(warnings, "_showwarnmsg"):
        replace(stack, warnings, "_showwarnmsg", shown)


def speaker(warning: Any) -> str | None:
    """Whose C code it was: PyTorch's names its own line, NumPy's has one way of saying things."""
    text = str(warning.message)
    if TRIGGERED.search(text):
        return "PyTorch"
    if issubclass(warning.category, RuntimeWarning) and " encountered in " in text:
        return "NumPy"
    return None


def hear(session: Session, who: str | None, message: Any) -> None:
    """Keep what a library said: who, the text, the script's line, the first step, how often."""
    if who is None or not session.alive:
        return
    with quietly():
        text = TRIGGERED.sub("", str(message)).strip()[:LONGEST]
        line = user_line()
        said = session.facts.setdefault("said", [])
        for known in said:
            if known["text"] == text and known["line"] == line:
                known["times"] += 1
                return
        if len(said) < MOST_SAID:
            said.append({"who": who, "text": text, "line": line, "step": session.step, "times": 1})


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
