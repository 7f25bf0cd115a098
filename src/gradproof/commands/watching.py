"""The commands about a training: run, diagnose, demo."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gradproof.commands.exporting import SINKS, make_sink
from gradproof.errors import EXIT_OWN_ERROR, UserError

if TYPE_CHECKING:
    from gradproof.diagnosis.findings import Diagnosis


def add_run(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="run a training script, watched, and say what is wrong",
        usage="gradproof run [options] SCRIPT [ARGS ...]\n       gradproof run [options] -m MODULE [ARGS ...]",
        description="Runs a PyTorch training script exactly as `python SCRIPT ARGS` would, watches every step, and "
        "ends with a diagnosis. The script needs no change; the exit code is its own.",
        epilog="example: gradproof run train.py --lr 3e-4",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where the run is written (default: runs/SCRIPT-DATE-TIME)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the diagnosis as JSON, too")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="rerun the script with the fix applied from outside: does it help?",
    )
    parser.add_argument(
        "--fix", metavar="NAME=VALUE", help="apply a fix from outside, e.g. lr=0.1 or zero_grad=1"
    )
    parser.add_argument(
        "--until", type=int, metavar="STEP", help="tape that one step, examine it, and end the script there"
    )
    parser.add_argument("--live", action="store_true", help="a page in the browser that follows the run")
    parser.add_argument("--steps", type=int, help="end the script after so many optimizer steps")
    parser.add_argument(
        "--seed", type=int, help="seed random, NumPy and torch before the script begins, which may seed again"
    )
    parser.add_argument(
        "--from",
        dest="begin",
        metavar="RUN:STEP",
        help="begin with the weights, buffers and optimizer states of a recorded step of another run",
    )
    parser.add_argument(
        "--examine",
        metavar="TIME",
        default="30s",
        help="how long the examination may go on after the script has ended: 30s (the default), all, or off",
    )
    parser.add_argument(
        "--specimens",
        metavar="SIZE",
        help="what the recorded steps may take on disk, e.g. 4GB (default: a quarter of what is free, 32GB at most)",
    )
    parser.add_argument("--no-experiments", action="store_true", help="watch only; tape and test nothing")
    parser.add_argument("--budget", metavar="SHARE", help="what watching may cost, e.g. 2%% (the default)")
    parser.add_argument(
        "--schedule",
        metavar="RULES",
        help="what is measured when, e.g. 'all every 10th step' or 'first batch of epochs 1-5 and 8, rank 0; "
        "all from the first non-finite value on' (default: as much as the budget affords)",
    )
    parser.add_argument(
        "--to", action="append", choices=SINKS, help="show it in TensorBoard or W&B, too, while it trains"
    )
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
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
        raise UserError(
            "PyTorch is not installed in this environment, there is nothing to watch: pip install torch"
        ) from None
    if os.environ.get("GRADPROOF") == "0":
        return script.execute(program, words[1:])[0]
    from gradproof.commands.examining import parse_examine, parse_size
    from gradproof.commands.viewing import served_beside

    if args.seed is not None:
        sow(args.seed)
    directory = os.getcwd()  # a script may leave it
    args.json = os.path.join(directory, args.json) if args.json else None
    with served_beside() as page, begun(args.begin):
        outcome = script.run_program(
            program,
            words[1:],
            out=args.out,
            schedule=args.schedule,
            budget=budget,
            quiet=args.quiet,
            experiments=not args.no_experiments,
            examine=parse_examine(args.examine),
            specimens=parse_size(args.specimens) if args.specimens else None,
            fix=parse_fix(args.fix) if args.fix else None,
            stop_after=args.steps,
            until=args.until,
            on_open=page.open if args.live else None,
            sinks=[make_sink(name) for name in args.to or ()],
        )
        try:
            exit_code = end_run(outcome, args, words, directory)
        except UserError:
            raise
        except Exception as error:  # a script may leave no descriptor, no memory: its exit code stays its own
            print(f"gradproof: no report could be made: {type(error).__name__}: {error}", file=sys.stderr)
            exit_code = outcome.exit_code
        if not outcome.interrupted:
            page.wait_for_reader()
    if outcome.interrupted:
        sys.stdout.flush()
        script.die_by_interrupt()
    return exit_code


@contextmanager
def begun(place: str | None) -> Iterator[None]:
    """The script inside begins with a recorded step's weights, where one is named."""
    if not place:
        yield
        return
    from gradproof.ask.opened import OpenedRun
    from gradproof.probes.snapshot import starting_from

    path, _, step = place.rpartition(":") if place.rpartition(":")[2].isdecimal() else (place, "", "")
    with starting_from(OpenedRun(path).specimen(int(step) if step else None)) as snapshot:
        try:
            yield
        finally:
            print(f"gradproof: {snapshot}", file=sys.stderr)


def sow(seed: int) -> None:
    """The same random numbers for two runs of a script that seeds nothing itself."""
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def end_run(outcome, args: argparse.Namespace, words: Sequence[str], directory: str) -> int:
    """What follows a watched script: its fix tried if that was asked for, its diagnosis, its page; the exit code."""
    if args.verify and outcome.rank == 0 and outcome.steps:
        verify(outcome, args, words, directory)
    return finish_run(outcome, words[0], args.json)


def parse_fix(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value or 1)
    except ValueError:
        raise UserError(f"a fix is NAME=NUMBER, for example lr=0.1, not {text!r}") from None


def verify(outcome, args: argparse.Namespace, words: Sequence[str], directory: str) -> None:
    """Rerun the script with the fix of each cause in turn, until one helps; what was shown goes into the run."""
    import json
    import subprocess
    from dataclasses import asdict

    from gradproof.diagnosis.fixes import compare_runs, find_intervention
    from gradproof.diagnosis.ranking import diagnose as diagnose_run
    from gradproof.record.run import open_run
    from gradproof.record.schema import EVENTS_FILE, json_line

    plain = open_run(outcome.path)
    for cause in diagnose_run(plain).causes[:3]:
        intervention = find_intervention(cause, plain)
        if cause.level == "note" or intervention is None:
            continue
        out = Path(f"{outcome.path}.{intervention.name}").absolute()
        command = [sys.executable, "-m", "gradproof", "run", "--quiet", "--no-experiments", "--out", str(out)]
        command += ["--fix", f"{intervention.name}={intervention.value:g}", "--steps", str(len(plain))]
        command += ["-m", *words] if args.module is not None else list(words)
        if not args.quiet:
            print(f"gradproof: trying {intervention.words} …", file=sys.stderr)
        subprocess.run(command, cwd=directory, capture_output=True, check=False)
        trial = compare_runs(cause.id, intervention.words, plain, open_run(out))
        with open(outcome.path / EVENTS_FILE, "a", encoding="utf-8") as events:
            events.write(json_line({"event": "trial", **json.loads(json_line(asdict(trial)))}) + "\n")
        if trial.helped:
            return


def finish_run(outcome, name: str, json_file: str | None) -> int:
    """The report at the end of a watched script; the exit code."""
    from dataclasses import replace

    from gradproof.commands.viewing import offer_page
    from gradproof.diagnosis.ranking import diagnose as diagnose_run
    from gradproof.report.text import render_text, wants_color

    if outcome.rank != 0:
        return outcome.exit_code
    if outcome.broken and outcome.steps == 0:
        print(f"gradproof: nothing was recorded: {outcome.broken}", file=sys.stderr)
        return outcome.exit_code
    if outcome.hangs:
        print(
            f"gradproof: the disk with {outcome.path} does not answer; once it does: gradproof diagnose {outcome.path}",
            file=sys.stderr,
        )
        return outcome.exit_code
    try:
        found = diagnose_run(outcome.path)
    except UserError as error:  # the record could not be written
        print(f"gradproof: {error}", file=sys.stderr)
        return outcome.exit_code
    if outcome.broken and not found.failure:  # it could not even be written down
        found = replace(found, failure=outcome.broken)
    if json_file:
        write_json({"schema": "gradproof/diagnosis/1", **found.as_data()}, json_file)
    if outcome.elsewhere:
        print(
            f"gradproof: {name} trained in processes that it started, {outcome.elsewhere} of which were watched; "
            f"this is {outcome.path.name}",
            file=sys.stderr,
        )
    if outcome.steps or outcome.elsewhere:
        print(f"\n{render_text(found, wants_color(sys.stderr))}", file=sys.stderr, end="")
        print(offer_page(found, outcome.path) + offer_fix(found, outcome.path), file=sys.stderr)
    problem = why_nothing_was_trained(outcome, name)
    if problem:
        print(f"gradproof: {problem}", file=sys.stderr)
    return outcome.exit_code or (EXIT_OWN_ERROR if problem and not outcome.printed else 0)


def offer_fix(found: Diagnosis, run: Path) -> str:
    """The command that tries a fix, where one of the findings has a certain one."""
    from gradproof.diagnosis.edits import find_edit
    from gradproof.record.run import open_run

    return f"\nfix:  gradproof fix {run}" if find_edit(found, open_run(run)) is not None else ""


HAND_IN = "`with gradproof.watch(parameters=P) as monitor:` and `monitor.step(loss=loss, gradients=G)` at each update"


def why_nothing_was_trained(outcome, name: str) -> str | None:
    """One sentence about a script whose training was not seen, or not the whole of it."""
    if outcome.printed:
        shown = ", ".join(outcome.printed[:4]) + (" …" if len(outcome.printed) > 4 else "")
        return (
            f"{name} trains without backward: {outcome.steps} losses that it printed were recorded, and {shown} "
            f"change between them; say what its gradients are: {HAND_IN}"
        )
    if outcome.steps or outcome.elsewhere:
        return None
    if outcome.backwards and outcome.stepping:
        return (
            f"{name} was within its first step of {outcome.stepping} still, after {outcome.backwards} backward passes: "
            "a step is recorded when it has ended; next: more time, or fewer iterations a step (max_iter)"
        )
    if outcome.backwards:
        return (
            f"{name} called backward {outcome.backwards} times, and nothing that got a gradient has changed since: if "
            f"the update is made where it cannot be seen, say so: {HAND_IN}"
        )
    if isinstance(outcome.error, KeyboardInterrupt):
        return f"{name} was interrupted without training: backward had not been called yet"
    if outcome.error:
        return f"{name} raised {type(outcome.error).__name__} without training: mend what its traceback names first"
    return (
        f"{name} ended without training: backward was never called. Does training hide behind an argument? If it "
        f"computes its gradients itself, say so: {HAND_IN}"
    )


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
        write_json({"schema": "gradproof/diagnosis/1", **found.as_data()}, None)
    else:
        print(render_text(found, wants_color()), end="")
    if args.fail_on and found.worst and LEVELS.index(found.worst) <= LEVELS.index(args.fail_on):
        return 1
    return 0


def add_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="plant a fault in a training script, diagnose it, and try the fix",
        description="Plants one of the catalogue's faults in a small training script, runs it watched, diagnoses it, "
        "and tries the fix. Without a name: a hand-written backward with a wrong sign.",
        epilog="example: gradproof demo cascade-large-learning-rate",
    )
    parser.add_argument("fault", nargs="?", default=DEMO, help="a name, or a part of one (see --list)")
    parser.add_argument("--list", action="store_true", help="the names of all faults")
    parser.set_defaults(function=demo)


DEMO = "custom_ops_autoencoder-gelu-sign"


def demo(args: argparse.Namespace) -> int:

    from gradproof.faults.catalogue import FAULTS, plant

    if args.list:
        print("\n".join(f"{fault.name:48} {fault.family}" for fault in FAULTS))
        return 0
    fault = next((f for f in FAULTS if args.fault in f.name or args.fault in f.id), None)
    if fault is None:
        raise UserError(f"there is no fault {args.fault!r}; `gradproof demo --list` names them")
    script = Path("runs") / "demo" / f"{fault.script}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(plant(fault), encoding="utf-8")
    for old, new in fault.edits if not args.quiet else ():
        print(f"planted in {script}:\n  - {_short(old)}\n  + {_short(new)}", file=sys.stderr)
    from gradproof.cli import main

    return main(["run", "--verify", *["--quiet"] * args.quiet, str(script)])


def _short(text: str) -> str:
    return " ⏎ ".join(line.strip() for line in text.strip().splitlines())[:100] or "(nothing)"


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
        raise UserError(f"cannot write {file}: {error}; choose another place") from None
