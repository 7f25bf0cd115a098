"""The commands that run somebody's script to judge it: try, check-run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gradproof.errors import EXIT_OWN_ERROR, UserError, plain


def add_try(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "try",
        help="a patch tried beside the original, under the same random numbers",
        description="Runs the script of a run twice, in copies: as it was, and with a patch. One verdict: fixed, "
        "better, no difference or worse, with both loss curves and what the finding says now.",
        epilog="example: gradproof try runs/a --patch fix.diff --steps 100. "
        "Exit code 0: fixed or better; 1: no difference or worse; 2: it could not be tried.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--patch", required=True, metavar="FILE", help="a unified diff (git diff, diff -u)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each (default: 100)")
    parser.add_argument(
        "--from",
        dest="begin",
        type=int,
        metavar="STEP",
        help="begin with the weights and optimizer states of this recorded step (default: at the start)",
    )
    parser.add_argument("--links", action="store_true", help="share files over 10 MB with the original")
    parser.add_argument("--within", type=int, default=600, help="seconds for each of both (default: 600)")
    parser.add_argument("--out", metavar="DIR", help="keep copies and runs here (default: thrown away)")
    parser.add_argument("--json", action="store_true", help="the same as data (schema gradproof/trial/1)")
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(function=try_fix)


def try_fix(args: argparse.Namespace) -> int:
    import tempfile

    from gradproof.ask.opened import OpenedRun
    from gradproof.ask.trial import BETTER, FIXED, try_patch
    from gradproof.commands.watching import write_json
    from gradproof.record.run import open_run

    if args.until_stdin_ends:
        end_with_stdin()
    if args.steps < 1:
        raise UserError(f"at least one step has to be made, not {args.steps}: --steps 100")
    with tempfile.TemporaryDirectory(prefix="gradproof-try-") as temporary:
        out = Path(args.out).absolute() if args.out else Path(temporary)
        if args.out and out.exists():
            raise UserError(f"{out} is there already; choose another --out")
        try:
            run, patch = open_run(args.run), Path(args.patch)
            if args.begin is not None:
                OpenedRun(args.run).specimen(args.begin)  # or it says which there are
            found = try_patch(run, patch, out, args.steps, args.links, args.within, args.begin)
        except OSError as error:
            raise UserError(
                f"the patch could not be tried: {error}; --out DIR puts the copies elsewhere"
            ) from None
    if args.json:
        write_json(found.as_data(), None)
    else:
        sys.stdout.write(str(found))
    return 0 if found.verdict in (FIXED, BETTER) else 1


def add_check_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "check-run",
        help="train a few steps of a script, and fail if there is a finding: for CI",
        description="Runs a script for some optimizer steps, watched and examined, prints the diagnosis, and ends with "
        "an exit code that stays the same from version to version.",
        epilog="example: gradproof check-run train.py --until 50 --sarif found.sarif --args --lr 3e-4. "
        "Exit code 0: no finding of that level; 1: there is one; 2: the script failed, or trained nothing.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("--until", type=int, default=50, metavar="STEP", help="optimizer steps (default: 50)")
    parser.add_argument(
        "--fail-on", choices=("warning", "problem"), default="problem", help="default: problem"
    )
    parser.add_argument(
        "--examine", metavar="TIME", default="120s", help="for the examination (default: 120s)"
    )
    parser.add_argument("--sarif", metavar="FILE", help="findings at their lines, for code review")
    parser.add_argument("--json", metavar="FILE", help="write the diagnosis as JSON, too")
    parser.add_argument("--out", metavar="DIR", help="keep the run here (default: thrown away)")
    parser.add_argument(
        "--args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARG",
        help="the script's own: all that follows",
    )
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(function=check_run)


def check_run(args: argparse.Namespace) -> int:
    import subprocess
    import tempfile

    from gradproof.commands.watching import write_json
    from gradproof.diagnosis.findings import LEVELS
    from gradproof.diagnosis.ranking import diagnose
    from gradproof.report.sarif import as_sarif
    from gradproof.report.text import render_text, wants_color

    if args.until_stdin_ends:
        end_with_stdin()
    if not os.path.exists(args.script):
        raise UserError(
            f"there is no script {args.script} in {os.getcwd()}; name it as `python` would be told"
        )
    with tempfile.TemporaryDirectory(prefix="gradproof-check-") as temporary:
        out = Path(args.out) if args.out else Path(temporary) / "run"
        command = [sys.executable, "-m", "gradproof", "run", "--quiet", "--steps", str(args.until)]
        command += ["--examine", args.examine, "--out", str(out), "--", args.script, *args.args]
        ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, errors="replace")
        if not (out / "run.json").exists():
            raise UserError(
                f"{args.script} could not be watched: {plain(last_line(ended.stderr))}; "
                f"does `python {args.script}` run?"
            )
        found = diagnose(out)
        if args.json:
            write_json({"schema": "gradproof/diagnosis/1", **found.as_data()}, args.json)
        if args.sarif:
            write_json(as_sarif(found, args.script), args.sarif)
        print(render_text(found, wants_color()), end="")
    if not found.steps or found.raised or ended.returncode not in (0, EXIT_OWN_ERROR):
        why = found.raised or (
            last_line(ended.stderr) if ended.returncode else "it made no step that could be seen"
        )
        print(f"gradproof: {plain(args.script)} did not train to the end: {plain(why)}", file=sys.stderr)
        return EXIT_OWN_ERROR
    return int(found.worst is not None and LEVELS.index(found.worst) <= LEVELS.index(args.fail_on))


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def end_with_stdin() -> None:
    """For whoever starts us in a session of our own: who holds the other end is gone when it closes, and so are we."""
    import signal
    import threading

    def wait() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
