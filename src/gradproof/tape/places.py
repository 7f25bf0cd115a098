"""Which line of the user's code is running: the innermost frame that is neither torch nor gradproof."""

from __future__ import annotations

import os
import sys
from functools import cache
from types import CodeType

import torch

from gradproof.tape.operations import Line

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (
    os.path.dirname(os.path.abspath(torch.__file__)),
    *(
        os.path.join(_OWN, room)
        for room in ("tape", "probes", "experiments", "integrations", "commands", "cli.py")
    ),
    "<",
)


_kinds: dict[str, str] = {}  # file name -> whose it is


@cache
def _line(file: str, number: int, function: str) -> Line:
    """One object for each: a step has thousands of operations, and few lines."""
    return Line(file, number, function)


def _kind_of(file: str) -> str:
    if not file.startswith(_HIDDEN):
        return "theirs"
    return "scaler" if file.endswith("grad_scaler.py") else "hidden"


def user_line(outermost: CodeType | None = None) -> tuple[Line | None, bool]:
    """(line, was it called through a GradScaler?); frames from `outermost` on outwards do not count."""
    frame = sys._getframe(1)
    scaled = False
    while frame is not None:
        code = frame.f_code
        if outermost is not None and code is outermost:
            return None, False
        kind = _kinds.get(code.co_filename)
        if kind is None:
            kind = _kinds[code.co_filename] = _kind_of(code.co_filename)
        if kind == "theirs":
            return _line(code.co_filename, frame.f_lineno, code.co_name), scaled
        scaled = scaled or kind == "scaler"
        frame = frame.f_back  # type: ignore[assignment]
    return None, False
