"""What a person is told when something goes wrong: an exception without a traceback, a warning that never raises."""

import contextlib
import io
import os
import sys
import warnings


class UserError(Exception):
    """What was asked for cannot be done: what, where, and what to do instead, in one or two sentences."""


def plain(text: str, *, lines: bool = False) -> str:
    """Text from a run as it can be printed: control characters and marks of direction are spelled out.

    `lines` lets ends of lines and tabs through, for text of several lines.

    >>> plain("a\\nb\\x1b[31m")
    'a\\\\nb\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


EXIT_OWN_ERROR = 2  # gradproof could not do what was asked; a script's own exit code passes through unchanged


def warn(message: str, stacklevel: int) -> None:
    """A warning from inside somebody's training: under `python -W error` it is printed, for raising would end that."""
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except UserWarning:
        print_instead(f"warning: {message}")


def print_instead(message: str) -> None:
    """On stderr; a script that has none left is told nothing, for print() would take its stdout instead."""
    with contextlib.suppress(ValueError, OSError):
        if sys.stderr is not None:
            print(message, file=sys.stderr)


def open_stderr_again() -> None:
    """After a script that has closed its stderr, or set it to None, there is still something to be said."""
    if sys.stderr is not None and not sys.stderr.closed:
        return
    try:
        sys.stderr = open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    except OSError:  # the descriptor is gone, too
        sys.stderr = io.StringIO()
