"""The command line: a command is a pair of functions in commands/, which parse, call and print.

What a command needs is imported inside it: `gradproof --help` must not wait for torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import gradproof
from gradproof.commands.asking import add_agents, add_ask, add_brief, add_checkpoint, add_mcp, add_schema
from gradproof.commands.attach import add_attach
from gradproof.commands.checking import add_check, add_check_dump, add_check_loss, add_precision
from gradproof.commands.completing import add_completion
from gradproof.commands.examining import add_examine
from gradproof.commands.exporting import add_compare, add_export, add_show
from gradproof.commands.fixing import add_fix
from gradproof.commands.header import add_header
from gradproof.commands.helping import add_doctor, add_explain
from gradproof.commands.scoring import add_scoreboard
from gradproof.commands.training import add_generate, add_train
from gradproof.commands.trying import add_check_run, add_try
from gradproof.commands.viewing import add_live, add_report
from gradproof.commands.watching import add_demo, add_diagnose, add_run
from gradproof.errors import EXIT_OWN_ERROR, UserError, plain


def main(argv: Sequence[str] | None = None) -> int:
    """The `gradproof` command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        code = args.function(args)
        if argv is None and "leaves_at_once" in args:  # taking PyTorch down takes as long as the answer did
            sys.stdout.flush()
            os._exit(code)
        return code
    except UserError as error:
        print(f"gradproof: {plain(str(error), lines=True)}", file=sys.stderr)
        return EXIT_OWN_ERROR
    except BrokenPipeError:  # `gradproof diagnose RUN | head`
        sys.stderr.close()
        return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradproof", description="Finds out why a neural network does not train, and proves it."
    )
    parser.add_argument("--version", action="version", version=f"gradproof {gradproof.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(commands)
    for command in commands.choices.values():  # every command can be told to; most say nothing but their end
        command.add_argument("--quiet", action="store_true", help="no progress; print only the end")
    return parser


# each adds its subparser and names the function that runs it
COMMANDS = (
    add_run,
    add_examine,
    add_ask,
    add_brief,
    add_checkpoint,
    add_try,
    add_fix,
    add_diagnose,
    add_report,
    add_live,
    add_show,
    add_compare,
    add_export,
    add_explain,
    add_doctor,
    add_completion,
    add_demo,
    add_scoreboard,
    add_check,
    add_check_dump,
    add_check_loss,
    add_check_run,
    add_precision,
    add_agents,
    add_mcp,
    add_schema,
    add_header,
    add_attach,
    add_train,
    add_generate,
)
