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


def add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="run a training script, watched, and say what is wrong",
        usage="gradproof run [options] SCRIPT [ARGS ...]\n       gradproof run [options] -m MODULE [ARGS ...]",
        description="Runs a PyTorch training script exactly as `python SCRIPT ARGS` would, watches every step, and "
        "ends with a diagnosis. The script needs no change; the exit code is its own.",
        epilog="example: gradproof run train.py --lr 3e-4",
    )
    parser.add_argument("--out", metavar="DIR", help="where the run is written (default: runs/SCRIPT-DATE-TIME)")
    parser.add_argument("--json", metavar="FILE", help="write the diagnosis as JSON, too")
    parser.add_argument("--quiet", action="store_true", help="no progress line; print only the end")
    parser.add_argument("--budget", metavar="SHARE", help="what watching may cost, e.g. 2%% (the default)")
    parser.add_argument(
        "--schedule",
        metavar="RULES",
        help="what is measured when, e.g. 'all every 10th step' or 'first batch of epochs 1-5 and 8, rank 0; "
        "all from the first non-finite value on' (default: as much as the budget affords)",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER)
    parser.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    from gradproof.probes import script
    from gradproof.probes.schedule import parse_budget

    words = args.module if args.module is not None else args.script
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise UserError("which script? for example: gradproof run train.py --lr 3e-4")
    program = script.load_module(words[0]) if args.module is not None else script.load_script(words[0])
    budget = parse_budget(args.budget) if args.budget else None
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UserError("PyTorch is not installed in this environment; there is nothing to watch") from None
    outcome = script.run_program(
        program, words[1:], out=args.out, schedule=args.schedule, budget=budget, quiet=args.quiet
    )
    exit_code = finish_run(outcome, words[0], args.json)
    if outcome.interrupted:
        sys.stdout.flush()
        script.die_by_interrupt()
    return exit_code


def finish_run(outcome, name: str, json_file: str | None) -> int:
    """The report at the end of a watched script; the exit code."""
    from gradproof.diagnosis.ranking import diagnose as diagnose_run
    from gradproof.report.text import render_text, wants_color

    if outcome.rank != 0:
        return outcome.exit_code
    if outcome.broken and outcome.steps == 0:
        print(f"gradproof: nothing was recorded: {outcome.broken}", file=sys.stderr)
        return outcome.exit_code
    try:
        found = diagnose_run(outcome.path)
    except UserError as error:  # the record could not be written
        print(f"gradproof: {error}", file=sys.stderr)
        return outcome.exit_code
    if json_file:
        write_json(found.as_data(), json_file)
    if outcome.steps:
        print(f"\n{render_text(found, wants_color(sys.stderr))}", file=sys.stderr, end="")
    problem = why_nothing_was_trained(outcome, name)
    if problem:
        print(f"gradproof: {problem}", file=sys.stderr)
    return outcome.exit_code or (EXIT_OWN_ERROR if problem else 0)


def why_nothing_was_trained(outcome, name: str) -> str | None:
    """One sentence about a script in which no optimizer stepped."""
    if outcome.steps:
        return None
    ended = f"raised {type(outcome.error).__name__}" if outcome.error else "ended"
    if outcome.backwards:
        return (
            f"{name} called backward {outcome.backwards} times, but no torch optimizer took a step; for updates by "
            "hand, hand the numbers in with gradproof.watch() and monitor.log(loss=…, grad_norm=…)"
        )
    return f"{name} {ended} without training: backward was never called. Does training hide behind an argument?"


def add_diagnose(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="what is wrong with a recorded run, and what is not",
        description="Reads a run (finished, growing or killed; needs no torch) and prints ranked causes.",
        epilog="example, in CI: gradproof diagnose runs/nightly --fail-on problem",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="the same as data")
    parser.add_argument("--fail-on", choices=("warning", "problem"), help="exit with 1 if there is one")
    parser.set_defaults(function=diagnose)


def diagnose(args: argparse.Namespace) -> int:
    from gradproof.diagnosis.findings import LEVELS
    from gradproof.diagnosis.ranking import diagnose as diagnose_run
    from gradproof.report.text import render_text, wants_color

    found = diagnose_run(args.run)
    if args.json:
        write_json(found.as_data(), None)
    else:
        print(render_text(found, wants_color()), end="")
    if args.fail_on and found.worst and LEVELS.index(found.worst) <= LEVELS.index(args.fail_on):
        return 1
    return 0


def write_json(data: dict, file: str | None) -> None:
    """Standard JSON to a file, or to the terminal."""
    import json

    from gradproof.record.schema import json_line

    text = json.dumps(json.loads(json_line(data)), indent=2, ensure_ascii=False)
    if file is None:
        print(text)
        return
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error}") from None


# each adds its subparser and names the function that runs it
COMMANDS = (add_run, add_diagnose)
