"""The command line: a command is a pair of functions in commands/, which parse, call and print.

What a command needs is imported inside it: `gradproof --help` must not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import gradproof
from gradproof.commands.checking import add_check, add_check_loss, add_precision
from gradproof.commands.exporting import add_compare, add_export, add_show
from gradproof.commands.training import add_generate, add_train
from gradproof.commands.viewing import add_live, add_report
from gradproof.commands.watching import add_demo, add_diagnose, add_run, add_scoreboard
from gradproof.errors import EXIT_OWN_ERROR, UserError


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


# each adds its subparser and names the function that runs it
COMMANDS = (
    add_run,
    add_diagnose,
    add_report,
    add_live,
    add_show,
    add_compare,
    add_export,
    add_demo,
    add_scoreboard,
    add_check,
    add_check_loss,
    add_precision,
    add_train,
    add_generate,
)
