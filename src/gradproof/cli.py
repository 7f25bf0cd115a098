"""The command line: one function a command, which parses, calls and prints; imports stay inside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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


def _find_function(spec: str) -> Callable:
    """The function named by `module:function` or `path/file.py:function`."""
    from importlib import import_module
    from importlib.util import module_from_spec, spec_from_file_location

    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise UserError(f"{spec!r} does not name a function; write module:function or file.py:function")
    try:
        if place.endswith(".py"):
            found = spec_from_file_location(Path(place).stem, place)
            assert found is not None and found.loader is not None
            module = module_from_spec(found)
            found.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = import_module(place)
    except (ImportError, FileNotFoundError) as error:
        raise UserError(f"cannot import {place}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{place} has no function {name!r}")
    return getattr(module, name)


def add_check_loss(commands) -> None:
    parser = commands.add_parser(
        "check-loss",
        help="run the test suite of a loss kernel on your cross-entropy",
        description="Runs a cross-entropy through sizes, masks, extremes, layouts beside the float64 formula "
        "and prints what failed, with the worst place. Called as loss(logits, targets), it returns the mean.",
        epilog="example: gradproof check-loss torch.nn.functional:cross_entropy",
    )
    parser.add_argument("spec", metavar="FUNCTION", help="module:function or file.py:function")
    parser.set_defaults(function=run_check_loss)


def run_check_loss(args: argparse.Namespace) -> int:
    from gradproof.kernels.loss_checks import render_outcomes, run_checks

    outcomes = run_checks(_find_function(args.spec))
    print(render_outcomes(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def add_precision(commands) -> None:
    parser = commands.add_parser(
        "precision",
        help="what summation order and format do to a softmax of V entries",
        description="Prints the errors of a cross-entropy computed in different ways against a reference of "
        "40 digits.",
        epilog="example: gradproof precision --vocab 34,50257 --logits adversarial",
    )
    parser.add_argument("--vocab", default="34,2004,50257,131072", help="sizes, separated by commas")
    parser.add_argument("--logits", default="realistic", help="realistic, peaked, adversarial or FILE.npy")
    parser.add_argument("--out", type=Path, help="also write the table into this file")
    parser.set_defaults(function=run_precision)


def run_precision(args: argparse.Namespace) -> int:
    import torch

    from gradproof.kernels.cross_entropy import cross_entropy
    from gradproof.numerics.precision import WAYS, compare_ways, make_logits, read_logits, render_errors

    def ours(logits, target):
        x = logits.clone().requires_grad_()
        loss, lse = cross_entropy(x[None], torch.tensor([target]), return_lse=True)
        loss.backward()
        return torch.exp(lse[0] - logits.max()), loss.detach(), x.grad

    if args.logits.endswith(".npy"):
        rows = [read_logits(args.logits)]
    else:
        rows = [make_logits(args.logits, vocab) for vocab in _sizes(args.vocab)]
    ways = (*WAYS, ("gradproof.cross_entropy", ours))
    table = render_errors([errors for row in rows for errors in compare_ways(row, ways)])
    print(table)
    if args.out:
        args.out.write_text(table + "\n")
    return 0


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise UserError(f"--vocab {text} is not a list of sizes such as 34,50257")
    return sizes


# each adds its subparser and names the function that runs it: parser.set_defaults(function=...)
COMMANDS: tuple = (add_check_loss, add_precision)
