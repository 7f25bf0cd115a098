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


def add_check(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check",
        help="is this backward the derivative of its forward?",
        description="Checks a gradient. NAME is a function, an autograd.Function, a module, or the common "
        "part of a hand-written pair: NAME_forward(...) -> (out, cache) and NAME_backward(dout, cache).",
        epilog="example: gradproof check kernels.py:attention --input 'float64[2,8,4]'. Without --input the "
        "file's example_inputs is used: a tuple, a function that returns one, or a dict of them by NAME. "
        "Exit code 0: right; 1: wrong; 2: could not be checked or decided.",
    )
    parser.add_argument("target", metavar="FILE.py:NAME")
    parser.add_argument(
        "--input", action="append", metavar="SPEC", help="float64[4,8] or int64[4]<50; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs that --input draws")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.set_defaults(function=run_check)


def run_check(args: argparse.Namespace) -> int:
    from gradproof.check.file import check_file

    found = check_file(args.target, args.input, args.seed)
    print(found.as_json() if args.json else found)
    return found.exit_code


# each adds its subparser and names the function that runs it: parser.set_defaults(function=...)
COMMANDS: tuple = (add_check,)
