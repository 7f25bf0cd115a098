"""The command line: one function a command, which parses, calls and prints; imports stay inside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import gradproof
from gradproof.errors import UserError

EXIT_OWN_ERROR = 2  # gradproof could not do what was asked; a script's own exit code passes through unchanged


def main(argv: Sequence[str] | None = None) -> int:
    """The `gradproof` command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gradproof", description="Finds out why a neural network does not train, and proves it."
    )
    parser.add_argument("--version", action="version", version=f"gradproof {gradproof.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(argv)
    try:
        return args.function(args)
    except UserError as error:
        print(f"gradproof: {error}", file=sys.stderr)
        return EXIT_OWN_ERROR
    except BrokenPipeError:  # `gradproof diagnose RUN | head`
        sys.stderr.close()
        return 0


# each adds its subparser and names the function that runs it: parser.set_defaults(function=...)
COMMANDS: tuple = ()
