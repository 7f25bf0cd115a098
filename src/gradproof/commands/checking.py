"""The commands about gradients and kernels: check, check-loss, precision."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gradproof.errors import UserError


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
