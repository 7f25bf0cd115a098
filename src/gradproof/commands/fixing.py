"""The command that writes a finding's fix down, and tries it: fix."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gradproof.errors import UserError, plain

if TYPE_CHECKING:
    from gradproof.ask.trial import Trial
    from gradproof.diagnosis.edits import Edit
    from gradproof.diagnosis.findings import Diagnosis
    from gradproof.record.run import Run

PATCH = "fix.diff"  # in the run's directory


def add_fix(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "fix",
        help="the fix of a finding as a diff, applied to a copy and tried",
        description="Where a finding has a fix that can be written in one way only, shows it as a diff, applies it to "
        "a copy of the script, runs both, and says whether the finding is gone and the loss is better. The script "
        "itself stays as it is, unless --in-place says otherwise.",
        epilog="example: gradproof fix runs/a. "
        "Exit code 0: fixed or better; 1: no difference, worse, or nothing to write; 2: it could not be tried.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--diff", action="store_true", help="only show it")
    parser.add_argument(
        "--in-place", action="store_true", help="change the script, too, once the fix has helped"
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each (default: 100)")
    parser.add_argument("--links", action="store_true", help="share files over 10 MB with the original")
    parser.add_argument("--within", type=int, default=600, help="seconds for each of both (default: 600)")
    parser.set_defaults(function=fix)


def fix(args: argparse.Namespace) -> int:
    import tempfile

    from gradproof.ask.trial import BETTER, FIXED, find_program, try_patch
    from gradproof.diagnosis.edits import find_edit
    from gradproof.diagnosis.ranking import diagnose
    from gradproof.files import replace_file
    from gradproof.record.run import open_run

    if args.steps < 1:
        raise UserError(f"at least one step has to be made, not {args.steps}: --steps 100")
    run = open_run(args.run)
    found = diagnose(run)
    edit = find_edit(found, run)
    if edit is None:
        print(why_there_is_none(found))
        return 1
    directory, script, _ = find_program(run)
    diff = edit.diff(script.as_posix())
    if args.diff or not args.quiet:
        print(f"{plain(str(edit.finding))}\n\n{painted(diff)}")
    if args.diff:
        return 0
    patch = run.path / PATCH
    replace_file(patch, diff.encode())
    if not args.quiet:
        print(f"gradproof: {script} as it was and with this, {args.steps} steps each …", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="gradproof-fix-") as temporary:
        trial = try_patch(run, patch, Path(temporary), args.steps, args.links, args.within)
    helped = trial.verdict in (FIXED, BETTER)
    print(said_of(trial, edit))
    if helped and args.in_place:
        change(directory / script, edit, run)
        print(f"{script} is changed; `git diff` shows it, {patch} keeps it")
    else:
        print(f"{script} is as it was; to change it: cd {directory} && patch -p1 < {patch.absolute()}")
    return 0 if helped else 1


def why_there_is_none(found: Diagnosis) -> str:
    """One sentence, and the advice in words."""
    grave = [cause for cause in found.causes if cause.level != "note"]
    if not grave:
        return f"There is nothing to fix: {found.conclusion}"
    advice = "".join(f"\n  {plain(cause.id)}: {plain(cause.fix)}" for cause in grave)
    return f"No finding has a fix that could be written in one way only; what to do, in words:{advice}"


def painted(diff: str) -> str:
    from gradproof.report.text import wants_color

    if not wants_color():
        return plain(diff, lines=True)
    colors = {"-": "31", "+": "32", "@": "36"}
    return "\n".join(
        f"\x1b[{colors[line[0]]}m{plain(line, lines=True)}\x1b[0m"
        if line[:1] in colors
        else plain(line, lines=True)
        for line in diff.splitlines()
    )


def said_of(trial: Trial, edit: Edit) -> str:
    lines = [f"{trial.verdict}: {plain(trial.sentence)}"]
    lines += [f"  new: {plain(text)}" for text in trial.new_findings]
    lines += [f"  not looked at: {plain(text)}" for text in trial.not_looked_at]
    return "\n".join(lines)


def change(script: Path, edit: Edit, run: Run) -> None:
    """The script itself, if it is still what the fix was written for."""
    try:
        now = script.read_bytes()
        if now != edit.before.encode():
            raise UserError(
                f"{script} has changed since {run.path} was recorded and stays as it is: watch it again, fix that run"
            )
        script.write_bytes(edit.after.encode())
    except OSError as error:
        raise UserError(f"{script} cannot be changed: {error}; the fix is in {run.path / PATCH}") from None
