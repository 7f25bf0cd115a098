"""The command that counts what is named rightly: scoreboard, end to end or on a corpus of recorded runs."""

from __future__ import annotations

import argparse
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradproof.errors import UserError

if TYPE_CHECKING:
    from gradproof.examination.process import WorkerProcess
    from gradproof.faults.confusion import Answered
    from gradproof.faults.corpus import Entry

CORPUS = "~/.cache/gradproof/corpus"
MOST_NAMED = 8  # questions in a line


def add_scoreboard(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "scoreboard",
        help="plant every fault, and count how many are named rightly",
        description="Runs every planted fault, every healthy twin and every healthy-but-odd training through "
        "`gradproof run`, and prints top-1, top-3, places and false alarms. With --record they are recorded once, "
        "into a corpus; with --specimens what was recorded is asked, without any training.",
        epilog="examples: gradproof scoreboard --only 'lr-too|healthy' --jobs 2; gradproof scoreboard --record; "
        "gradproof scoreboard --specimens --questions shapes --again",
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="names or cause ids to run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", metavar="FILE", help="write the table to a file, too")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="record what the corpus does not have yet")
    what.add_argument("--specimens", action="store_true", help="ask the corpus every question, and count")
    parser.add_argument("--corpus", metavar="DIR", default=CORPUS, help=f"where it is (default: {CORPUS})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that is recorded on")
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "compiled"), default="", help="in autocast, or compiled"
    )
    parser.add_argument("--questions", metavar="REGEX", default="", help="ask only questions so named")
    parser.add_argument(
        "--again", action="store_true", help="forget the answers of these questions, and ask anew"
    )
    parser.add_argument(
        "--ask-on", choices=("cpu", "cuda"), help="ask on this device (default: the recorded one)"
    )
    parser.set_defaults(function=scoreboard)


def scoreboard(args: argparse.Namespace) -> int:
    if args.record:
        return record(args)
    if args.specimens:
        return ask(args)
    for name in ("questions", "again", "precision", "ask_on"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} is for a corpus: with --record or --specimens")
    from gradproof.faults.scoreboard import render_scoreboard, score_all

    table = render_scoreboard(score_all(args.only, args.jobs, (lambda score: None) if args.quiet else show))
    return put(table, args.out)


def show(score) -> None:
    mark = "ok  " if score.top1 else "top3" if score.top3 else "MISS"
    print(f"{mark} {score.name} · {score.family} · said {score.said} · {score.seconds:.0f} s", flush=True)


def put(table: str, out: str | None) -> int:
    print(f"\n{table}", end="")
    if out:
        Path(out).write_text(table, encoding="utf-8")
    return 0


def find_entries(args: argparse.Namespace) -> list[Entry]:
    from gradproof.faults.corpus import Elsewhere, entries_of

    try:
        found = entries_of(Path(args.corpus).expanduser(), Elsewhere(args.device, args.precision), args.only)
    except re.error as error:
        raise UserError(f"--only {args.only!r} is no regular expression: {error}") from None
    if not found:
        raise UserError(
            f"no fault and no healthy run is named like {args.only!r}; `gradproof demo --list` names the faults"
        )
    return found


def record(args: argparse.Namespace) -> int:
    """Every script that the corpus does not have, or has in another text, run and taped."""
    import torch

    from gradproof.faults.corpus import Elsewhere, record_all
    from gradproof.record.schema import FORMAT
    from gradproof.tape.specimen import VERSION

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device to record on; leave --device away")
    counts = {"recorded": 0, "there already": 0, "without a specimen": 0}

    def done(entry: Entry, label, fresh: bool) -> None:
        counts["recorded" if fresh else "there already"] += 1
        counts["without a specimen"] += bool(label.reason)
        if (fresh or label.reason) and not args.quiet:
            said = f" · {label.reason}" if label.reason else ""
            print(f"{entry.case.name} · {label.end} · {label.seconds:.0f} s{said}", flush=True)

    made_with = f"run {FORMAT}, specimen {VERSION}, torch {torch.__version__}"
    record_all(find_entries(args), Elsewhere(args.device, args.precision), made_with, args.jobs, done)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 0


def ask(args: argparse.Namespace) -> int:
    """Every question of every entry, by one worker a job; then the tables."""
    from gradproof.experiments.table import QUESTIONS
    from gradproof.faults.confusion import render
    from gradproof.faults.corpus import changed_since, code_of

    entries = find_entries(args)
    names = [question.name for question in QUESTIONS if re.search(args.questions, question.name)]
    if not names:
        raise UserError(f"no question is named like {args.questions!r}; docs/questions.md lists them")
    codes = {question.name: code_of(question.module) for question in QUESTIONS}
    began = time.monotonic()
    found, complaints = Asking(args, names, codes).ask_all(entries)
    changed = {name for entry in entries for name in changed_since(entry, codes)}
    if changed:
        named = ", ".join(sorted(changed)) if len(changed) <= MOST_NAMED else f"{len(changed)} questions"
        complaints.append(f"answers of earlier code, which --again asks anew: {named}")
    return put(render(found, complaints, time.monotonic() - began), args.out)


class Asking:
    """Lanes of workers over the entries of a corpus; interrupted, it keeps what is known."""

    def __init__(self, args: argparse.Namespace, names: list[str], codes: dict[str, str]) -> None:
        self._args, self._names, self._codes = args, names, codes
        self._stop = threading.Event()
        self._free: list[WorkerProcess] = []  # started, and without work

    def ask_all(self, entries: list[Entry]) -> tuple[list[Answered], list[str]]:
        """What was answered, in the order of the entries, and a line for each that could not be asked."""
        from concurrent.futures import ThreadPoolExecutor

        found, complaints = [], []
        with ThreadPoolExecutor(max(1, self._args.jobs)) as pool:
            futures = [pool.submit(self._ask_safely, entry) for entry in entries]
            try:
                for future in futures:
                    answered = future.result()
                    if isinstance(answered, str):
                        if not self._args.quiet:
                            print(answered, flush=True)
                        complaints.append(answered)
                    else:
                        if not self._args.quiet:
                            show(answered.score)
                        found.append(answered)
            except KeyboardInterrupt:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                complaints.append(
                    "it was interrupted: the same command goes on where it was (without --again)"
                )
        for worker in self._free:
            worker.close()
        return found, complaints

    def _ask_safely(self, entry: Entry) -> Answered | str:
        """The answers of one entry, or one line that says why there are none."""
        label = entry.label
        if label is None:
            return f"{entry.case.name}: not recorded; gradproof scoreboard --record records it"
        if label.reason:
            return f"{entry.case.name}: nothing to ask: {label.reason}"
        try:
            return self._ask(entry)
        except Exception as error:  # a damaged entry must not end the others
            return f"{entry.case.name}: damaged, {type(error).__name__}: {str(error).splitlines()[0]}"

    def _ask(self, entry: Entry) -> Answered:
        from gradproof.diagnosis.ranking import diagnose
        from gradproof.examination.examiner import Examiner, Locked
        from gradproof.examination.process import WorkerProcess
        from gradproof.faults.confusion import Answered
        from gradproof.faults.corpus import forget, read_events
        from gradproof.record.run import open_run
        from gradproof.record.schema import EXAMINATION_FILE

        class Patient(Examiner):
            """All of it will be asked: in which order is all the same, and symptoms cost more than labels."""

            def _suspected(self) -> list[str]:
                return []

        open_run(entry.run)  # says what is wrong with it
        file = entry.run / EXAMINATION_FILE
        worker = self._free.pop() if self._free else WorkerProcess()
        try:
            with Locked(entry.run):
                forget(file, self._names if self._args.again else ())
                examiner = Patient(
                    entry.run, [Kept(worker)], only=self._names, device=self._args.ask_on, threads=1
                )
                before = len(read_events(file))
                left = examiner.ask_all(until=self._stop.is_set)
                examiner.end(None, left)
        finally:
            self._free.append(worker)
        events = read_events(file)
        asked = {event["question"] for event in events[before:] if event.get("event") == "asked"}
        entry.note_asked({name: self._codes[name] for name in asked})
        causes = diagnose(entry.run).as_data()["causes"]
        seconds = sum(event.get("seconds", 0.0) for event in events if event.get("event") == "asked")
        return Answered(entry.case.judge(causes, seconds), entry.case.right, causes, events)


class Kept:
    """A worker that outlives the examination of one run: its torch is there already for the next."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        return self._worker.ask(limit, **request)

    def warm_up(self) -> None:
        self._worker.warm_up()

    def close(self) -> None:
        pass
