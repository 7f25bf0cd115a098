"""The commands about gradients and kernels: check, check-dump, check-loss, precision."""

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
        raise UserError(f"cannot import {place}: {error}; name its file instead: file.py:function") from error
    if not callable(getattr(module, name, None)):
        raise UserError(f"{place} has no function {name!r}; write module:function, with a name that it has")
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
        help="is this backward the derivative of its forward? and is this kernel right, seen from outside?",
        description="Checks a gradient. NAME is a function, an autograd.Function, a module, or the common "
        "part of a hand-written pair: NAME_forward(...) -> (out, cache) and NAME_backward(dout, cache). "
        "With --kernel all of a kernel is tried as a black box, in its own precision (NAME may also be an "
        "optimizer, and reference_NAME in the file is what it should compute); with --device alone, PyTorch's "
        "own operators on that device.",
        epilog="example: gradproof check kernels.py:attention --input 'float64[2,8,4]'. Without --input the "
        "file's example_inputs is used: a tuple, a function that returns one, or a dict of them by NAME. "
        "Exit code 0: right; 1: wrong; 2: could not be checked or decided.",
    )
    parser.add_argument("target", metavar="FILE.py:NAME", nargs="?")
    parser.add_argument("--kernel", action="store_true", help="memory, layouts, sizes, modes, precision, too")
    parser.add_argument("--device", metavar="cpu|cuda|mps", help="try PyTorch's own operators there")
    parser.add_argument(
        "--input", action="append", metavar="SPEC", help="float64[4,8] or int64[4]<50; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs that --input draws")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.set_defaults(function=run_check)


def run_check(args: argparse.Namespace) -> int:
    if (args.target is None) == (args.device is None):
        raise UserError("say what to check: FILE.py:NAME, or --device cpu for PyTorch's own operators")
    if args.kernel or args.device:
        return _run_check_kernel(args)
    from gradproof.check.file import check_file

    found = check_file(args.target, args.input, args.seed)
    print(found.as_json() if args.json else found)
    return found.exit_code


# reference of `gradproof check-dump --against` -> the function of lm.reference that makes it
OWN_MODELS = {"gpt": "gpt_reference", "cascade": "cascade_reference"}


def add_check_dump(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check-dump",
        help="a training step that another program dumped, against a reference",
        description="Runs a reference in float64 from the weights and the batch of a dumped step (written by gp_dump "
        "of gradproof.h, or by gradproof.dump_step) and names the first activation and the first gradient that is "
        "wrong, and how. The reference is loss(weights, batch), dicts of tensors, and returns the loss or (loss, "
        "activations by name).",
        epilog="examples: gradproof check-dump step-000012.safetensors --against reference.py:loss · "
        "gradproof check-dump step-000012.safetensors --against gpt --heads 4. "
        "Exit code 0: right; 1: wrong; 2: could not be checked or decided.",
    )
    parser.add_argument("step", metavar="STEP", help="the safetensors file of one step")
    parser.add_argument(
        "--against",
        required=True,
        metavar="FILE.py:FUNCTION",
        help=f"or one of our own: {', '.join(OWN_MODELS)}",
    )
    parser.add_argument(
        "--heads", type=int, default=4, help="of our own model; its other sizes are the weights'"
    )
    parser.add_argument(
        "--before", metavar="STEP", help="the dump of the step before: shows what was not computed anew"
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.set_defaults(function=run_check_dump)


def run_check_dump(args: argparse.Namespace) -> int:
    from gradproof.check.against import check_dump
    from gradproof.check.dump import read_dump

    dump = read_dump(args.step)
    before = read_dump(args.before) if args.before else None
    found = check_dump(dump, _find_reference(args), name=args.against, before=before)
    print(found.as_json() if args.json else found)
    return found.exit_code


def _find_reference(args: argparse.Namespace) -> Callable:
    from gradproof.check.file import load_file

    if args.against in OWN_MODELS:
        from gradproof.lm import reference

        return getattr(reference, OWN_MODELS[args.against])(args.heads)
    path, _, name = args.against.rpartition(":")
    if not path or not name:
        own = ", ".join(OWN_MODELS)
        raise UserError(f"cannot read --against {args.against}; write FILE.py:FUNCTION, or one of {own}")
    try:
        module = load_file(Path(path))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{path} has no function {name}; it has {', '.join(names[:12]) or 'none at all'}")
    return getattr(module, name)


def _run_check_kernel(args: argparse.Namespace) -> int:
    from gradproof.check.device import check_device
    from gradproof.check.file import check_kernel_file

    if args.device:
        found = check_device(args.device)
    else:
        found = check_kernel_file(args.target, args.input, args.seed)
    print(found.as_json() if args.json else found)
    return found.exit_code
