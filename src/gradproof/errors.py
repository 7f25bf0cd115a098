"""What a person is told when something goes wrong: an exception without a traceback, a warning that never raises."""

import sys
import warnings


class UserError(Exception):
    """What was asked for cannot be done: what, where, and what to do instead, in one or two sentences."""


EXIT_OWN_ERROR = 2  # gradproof could not do what was asked; a script's own exit code passes through unchanged


def warn(message: str, stacklevel: int) -> None:
    """A warning from inside somebody's training: under `python -W error` it is printed, for raising would end that."""
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except UserWarning:
        print_instead(f"warning: {message}")


def print_instead(message: str) -> None:
    print(message, file=sys.stderr)
