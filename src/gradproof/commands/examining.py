"""The command that asks the specimens of a run: examine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from gradproof.errors import UserError, plain


def add_examine(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "examine",
        help="ask the recorded steps of a run every question, later or elsewhere",
        description="Asks the specimens of a run (its taped steps, as files) every question that has not been asked "
        "yet, in processes of its own, and writes the answers into the run. It can be interrupted, and goes on where "
        "it was.",
        epilog="example: gradproof examine runs/a --step 10 --device cuda --only gradient",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--step", type=int, action="append", default=[], help="only the specimen of this step"
    )
    parser.add_argument("--device", help="cpu or cuda, in place of the one that the step was recorded on")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only questions so named")
    parser.add_argument("--jobs", type=int, default=1, help="questions at a time (default: 1)")
    parser.add_argument("--within", metavar="TIME", help="stop after this time, e.g. 30s")
    parser.add_argument("--again", action="store_true", help="ask what was asked before once more")
    parser.add_argument("--beside", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.set_defaults(function=examine)


def examine(args: argparse.Namespace) -> int:
    from gradproof.record.run import open_run

    run = Path(args.run).absolute()
    limit = parse_time(args.within) if args.within else None
    if args.beside is not None:
        from gradproof.examination.beside import examine_beside
        from gradproof.kernels.warm import warm_up

        warm_up()
        examine_beside(run, args.beside, limit)
        return 0
    open_run(run)  # says in one sentence what is wrong with it
    try:
        return examine_now(run, args, limit)
    except OSError as error:
        raise UserError(
            f"what is asked cannot be written into {run}: {error}; examine a copy of it"
        ) from None


def examine_now(run: Path, args: argparse.Namespace, limit: float | None) -> int:
    import time

    from gradproof.diagnosis.ranking import diagnose
    from gradproof.examination.examiner import known_questions
    from gradproof.examination.parted import do_again
    from gradproof.examination.process import WorkerProcess
    from gradproof.examination.turned import swap_around_the_turn
    from gradproof.report.text import render_text, wants_color

    end = time.monotonic() + limit if limit is not None else None
    stopped = False

    def is_over() -> bool:
        return stopped or (end is not None and time.monotonic() > end)

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True  # for the workers' threads, which no signal reaches
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    examine_one(run, args, known_questions(args.only), is_over, limit)
    other = rank_to_ask(run) if not args.only and not args.step and not stopped else None
    if other is not None:
        examine_one(other, args, known_questions(["where_was_it_born"]), is_over, limit)
    if not args.only and not args.step and not stopped:
        with closing(WorkerProcess(is_over)) as worker:
            do_again(run, worker)
            swap_around_the_turn(run, worker)
    print("\r\x1b[2K" if sys.stderr.isatty() else "", end="", file=sys.stderr)
    print(render_text(diagnose(run), wants_color()), end="")
    return 0


def examine_one(
    run: Path, args: argparse.Namespace, only: Iterable[str], is_over: Callable[[], bool], limit: float | None
) -> None:
    """Ask the specimens of one run, or of one rank of several."""
    from gradproof.examination.examiner import Examiner, Locked, read_shelf
    from gradproof.examination.process import WorkerProcess
    from gradproof.probes.progress import examination_line

    shelves = run / "specimens"
    found = [] if shelves.is_symlink() else sorted(shelves.glob("step-*"))
    damage = {path: said for path in found if (said := damage_of(path))}
    for said in damage.values():
        print(f"gradproof: {plain(said)}", file=sys.stderr)
    shelf = [shelved for shelved in read_shelf(run) if shelved.path not in damage]
    if not shelf:
        why = "none of them can be read" if found else "no step of it was taped, or they were not kept"
        raise UserError(f"{run} has no specimens: {why}; `gradproof run --until STEP train.py` records one")
    steps = {shelved.step for shelved in shelf}
    for step in args.step:
        if step not in steps:
            raise UserError(
                f"step {step} of {run} was not taped; there are {', '.join(map(str, sorted(steps)))}"
            )
    with Locked(run):
        examiner = Examiner(
            run,
            [WorkerProcess(is_over) for _ in range(max(1, args.jobs))],
            only=only,
            steps=args.step or (steps if damage else ()),
            device=args.device,
            threads=max(1, len(os.sched_getaffinity(0)) // max(1, args.jobs)),
            again=args.again,
        )
        if not args.quiet:
            examiner.on_progress = examination_line()
        stopped = False
        try:
            left = examiner.ask_all(until=is_over)
        except KeyboardInterrupt:
            stopped, left = True, len(examiner.jobs())
        examiner.end(None if stopped else limit, left)


def rank_to_ask(run: Path) -> Path | None:
    """Of several ranks, the one whose loss was not finite first: its own step has where that was born."""
    from gradproof.diagnosis.ranks import ranks_first_nonfinite
    from gradproof.record.ranks import read_ranks

    ranks = read_ranks(run)
    found = ranks_first_nonfinite(ranks) if ranks is not None else None
    other = ranks.paths[found[0][0]] if ranks is not None and found is not None else run
    return other if other.name != run.name and (other / "specimens").is_dir() else None


def damage_of(specimen: Path) -> str:
    """What is wrong with a specimen of a run; empty for a sound one."""
    from gradproof.tape.label import find_damage, is_ours

    return find_damage(specimen) if is_ours(specimen) else f"{specimen} is a link, which is not followed"


def parse_time(text: str) -> float:
    """`30s`, `5m`, `90`: seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise UserError(f"a time is written like 30s or 5m, not {text!r}")
    return seconds


def parse_examine(text: str) -> float | None:
    """`30s`, `all` or `off`, as a limit in seconds: None for no limit, 0 for none of it."""
    return None if text == "all" else 0.0 if text == "off" else parse_time(text)


def parse_size(text: str) -> int:
    """`4GB`, `500MB`: bytes."""
    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3}
    unit = text[-2:].upper()
    try:
        return int(float(text[:-2]) * units[unit]) if unit in units else int(text)
    except ValueError:
        raise UserError(f"a size is written like 4GB, not {text!r}") from None
