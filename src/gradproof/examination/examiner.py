"""Asks the specimens of a run every question, and writes what came of each into the run. Needs no torch itself.

What is suspected and what is cheap is asked first. Everything is appended as it comes: an examination that is cut off
goes on where it was, and a question that cost a worker its life costs nothing else.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from gradproof.diagnosis.symptoms import SYMPTOMS
from gradproof.diagnosis.verdicts import standing
from gradproof.errors import UserError
from gradproof.examination.process import CUT_OFF, WorkerLost
from gradproof.examination.sightings import Sightings
from gradproof.experiments.table import BY_NAME, EVERY, QUESTIONS, Question, order_of
from gradproof.files import open_to_append, replace_file
from gradproof.record.door import Damaged, flag, name, read_json, record, whole
from gradproof.record.run import open_run, read_events
from gradproof.record.schema import DOES_NOT_APPLY, EXAMINATION_FILE, OUT_OF_REACH, PROGRESS_FILE, json_line
from gradproof.tape.label import LABEL_FILE, LARGEST_LABEL, find_specimens

SUSPICION_LASTS = 5.0  # seconds
LARGE = 256 << 20  # bytes of a specimen
COPIES = 12  # times its size that a large one takes on a GPU while it is replayed in float64
EARLY = 316  # steps: up to here all are asked in their order; later ones are many in a long training
APART = 1.02  # times the step before: landmarks are farther from each other, steps in trouble nearer
LONGEST_ANSWER = 120.0  # seconds: a worker that takes longer hangs
ALL = 0.9  # of a GPU's free memory, where nobody trains
MOST_LOSSES = 3  # workers that one specimen may cost
MOST_GAINS, MOST_SHADOWS = 64, 12  # steps that the page shows
LOCK_FILE = "examination.lock"
IN_LABEL = {"step": whole, "landmark": flag, "operations": whole, "bytes": whole, "device": name}
LABEL = record(IN_LABEL)
LANES = {question.name: place for place, question in enumerate(QUESTIONS)}


class Asks(Protocol):
    """Who answers: a worker in a process of its own, or one right here."""

    def ask(self, limit: float, **request: Any) -> dict[str, Any]: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


class Guest(Protocol):
    """How to behave on a machine that somebody trains on."""

    def wait_for(self, question: Question) -> None:
        """Until there is time for a question."""

    def was_asked(self, seconds: float) -> None:
        """A question took so long, up to now."""


@dataclass(frozen=True)
class Shelved:
    """A specimen as its label tells."""

    path: Path
    step: int
    landmark: bool
    operations: int
    bytes: int
    device: str


@dataclass
class Job:
    question: Question
    specimen: Shelved
    before: list[str] = field(default_factory=list)  # specimens that it has to have seen


def read_shelf(run: Path) -> list[Shelved]:
    """The specimens of a run that are complete, by step."""
    found = []
    for path in find_specimens(run):
        try:
            label = LABEL(read_json(path / LABEL_FILE, LARGEST_LABEL))
        except (OSError, Damaged):
            continue
        found.append(Shelved(path, **{part: label[part] for part in IN_LABEL}))
    return found


def by_worth(shelf: list[Shelved]) -> list[Shelved]:
    """The first steps in their order; of the later ones the newest first, and of those that lie close together the one
    where trouble began before the others.

    Of a large model landmarks come first: they are asked everything.

    >>> shelf = [Shelved(Path(), step, True, 1, 1, "cpu") for step in (0, 100, 400, 450, 506, 520, 521, 522)]
    >>> [shelved.step for shelved in by_worth(shelf)]
    [0, 100, 520, 506, 450, 400, 521, 522]
    """
    if any(shelved.bytes > LARGE for shelved in shelf):
        shelf = sorted(shelf, key=lambda shelved: not shelved.landmark)
    first = [shelved for shelved in shelf if shelved.step <= EARLY]
    late = sorted((shelved for shelved in shelf if shelved.step > EARLY), key=lambda shelved: shelved.step)
    steps = [0, *(shelved.step for shelved in late)]
    begins = [shelved for before, shelved in zip(steps, late, strict=False) if shelved.step > APART * before]
    return [*first, *begins[::-1], *(shelved for shelved in late if shelved not in begins)]


class Examiner:
    """The examination of one run; `ask_all` asks what has not been asked yet."""

    def __init__(
        self,
        run: Path,
        workers: Sequence[Asks],
        *,
        only: Iterable[str] = (),
        steps: Iterable[int] = (),
        device: str | None = None,
        threads: int = 0,
        again: bool = False,
    ) -> None:
        self.run, self.device, self.threads = run, device, threads
        self.workers = list(
            workers
        )  # a question always goes to the same one, which remembers the steps before
        self._lock = threading.Lock()
        self._only, self._steps = set(only), set(steps)
        self._events = _Events(run)
        self._said: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by question and family
        self._sightings = Sightings()
        self._asked: dict[tuple[str, int], str] = {}
        self._lost: dict[Path, int] = {}
        self._gains = self._shadows = 0
        self._known: set[int] = set()
        self._announced: set[str] = set()
        self._later: dict[tuple[str, int], str] = {}  # (question, step) -> why it had to wait
        self._crowded: list[tuple[Job, Asks]] = []  # what the GPU had no room for beside the other workers
        self.share = ALL  # of a GPU's free memory, for all workers together
        self.complete = True  # no more steps will come
        # bytes that were free there when a large step was first asked about
        self._gpu_room: int | None = None
        self._suspicion: list[str] = []
        self._urgent: set[tuple[str, int]] = set()  # (family, step) of what the record shows to be a problem
        self._suspected_at = -SUSPICION_LASTS
        self.on_progress: Callable[[dict[str, Any]], None] | None = None
        self._remember(again)

    def _remember(self, again: bool) -> None:
        """What an earlier examination has asked and said."""
        known = self._events.read()
        for event in known if not again else ():
            kind = event.get("event")
            if kind == "asked" and was_asked(event):
                self._asked[(event.get("question", ""), event.get("step", -1))] = event.get("outcome", "")
            elif kind == "verdict":
                key = (event.get("experiment", ""), event.get("family", ""))
                self._said[key] = standing(self._said.get(key, []), event)
            elif kind == "seen":
                self._sightings.remember(event)
            elif kind == "specimen":
                self._known.add(event.get("step", -1))
            self._gains += kind == "gains"
            self._shadows += kind == "shadow"
        if not any(event.get("event") == "table" for event in known):
            self._events.write("table", questions=[question.as_data() for question in QUESTIONS])

    def jobs(self) -> list[Job]:
        """What is left to ask, in order: of each specimen, what is suspected and cheap first.

        Before all others: of the very step at which the record shows a problem, what may be its cause.
        """
        shelf = [s for s in read_shelf(self.run) if not self._steps or s.step in self._steps]
        if self.complete and shelf and not any(shelved.landmark for shelved in shelf):
            shelf[-1] = replace(shelf[-1], landmark=True)  # of a short training nothing else was recorded
        for shelved in shelf:
            if shelved.step not in self._known:
                self._known.add(shelved.step)
                self._events.write("specimen", step=shelved.step, operations=shelved.operations)
        order = order_of(self._suspected())
        newest: dict[str, int] = {}  # question -> the last step that it was asked about
        for asked, step in self._asked:
            newest[asked] = max(step, newest.get(asked, 0))
        found = [
            Job(question, shelved, self._seen_before(question, shelved, shelf, newest))
            for shelved in by_worth(shelf)
            for question in order
            if self._is_open(question, shelved)
        ]
        return sorted(found, key=lambda job: not self._is_urgent(job))

    def _is_urgent(self, job: Job) -> bool:
        return any((family, job.specimen.step) in self._urgent for family in job.question.families)

    def _is_open(self, question: Question, shelved: Shelved) -> bool:
        if self._only and question.name not in self._only:
            return False
        if not shelved.landmark and question.steps != EVERY:
            return False
        if not shelved.path.exists():
            return False  # newer ones have pushed it out
        key = (question.name, shelved.step)
        if key in self._asked or key in self._later or self._lost.get(shelved.path, 0) >= MOST_LOSSES:
            return False
        return not any(self._is_settled(question.name, family) for family in question.families)

    def _is_settled(self, question: str, family: str) -> bool:
        said = self._said.get((question, family), ())
        return any(verdict["verdict"] == "confirmed" and verdict.get("lasting") for verdict in said)

    def _seen_before(
        self, question: Question, shelved: Shelved, shelf: list[Shelved], newest: dict[str, int]
    ) -> list[str]:
        """What a question has to have seen: all early steps, and those late ones that it was asked about.

        A late step that was passed over, because there were newer ones, is asked about by itself.
        """
        if shelved.step > EARLY and shelved.step < newest.get(question.name, 0):
            return []
        return [
            str(other.path)
            for other in shelf
            if other.step < shelved.step
            and other.path.exists()
            and (other.landmark or question.steps == EVERY)
            and (other.step <= EARLY or (question.name, other.step) in self._asked)
            and self._lost.get(other.path, 0) < MOST_LOSSES
        ]

    def _suspected(self) -> list[str]:
        """The causes that the record's symptoms suggest, gravest first; looked up now and then."""
        if time.monotonic() - self._suspected_at < SUSPICION_LASTS:
            return self._suspicion
        self._suspected_at = time.monotonic()
        try:
            run = open_run(self.run)
            symptoms = [symptom for find in SYMPTOMS for symptom in find(run)]
        except Exception:  # a run that has just begun
            return []
        grave = sorted(symptoms, key=lambda s: ("problem", "warning", "note").index(s.level))
        self._suspicion = [suspect for symptom in grave for suspect in symptom.suspects]
        self._urgent = {
            (suspect.partition("/")[0], symptom.step)
            for symptom in symptoms
            if symptom.level == "problem" and symptom.step is not None
            for suspect in symptom.suspects[:1]
        }
        return self._suspicion

    def ask_all(self, until: Callable[[], bool] = lambda: False, guest: Guest | None = None) -> int:
        """Asks what there is to ask, until it is told to stop; how many questions are left."""
        while True:
            waiting = self.jobs()
            if not waiting:
                return 0
            here = waiting[0].specimen
            batch = list(next(itertools.groupby(waiting, key=lambda job: job.specimen))[1])
            others = len(waiting) - len(batch)
            if not self._ask_batch(batch, others, until, guest):
                return len(self.jobs())
            self._write_extras(here)

    def _ask_batch(
        self,
        batch: list[Job],
        others: int,
        until: Callable[[], bool],
        guest: Guest | None,
    ) -> bool:
        """The questions of one specimen, each worker its own; whether all were asked."""
        lanes: list[list[Job]] = [[] for _ in range(self._lanes(batch[0].specimen))]
        for job in batch:
            lanes[LANES[job.question.name] % len(lanes)].append(job)
        left = [others + len(batch)]

        def run(lane: int) -> bool:
            for job in lanes[lane]:
                if guest is not None:
                    guest.wait_for(job.question)
                if until():
                    return False
                if self._is_open(job.question, job.specimen):
                    seconds = self._ask(job, self.workers[lane])
                    left[0] -= 1
                    with self._lock:
                        self._show(left=left[0], question=job.question.sentence, step=job.specimen.step)
                    if guest is not None:
                        guest.was_asked(seconds)
            return True

        if len(lanes) == 1:
            return run(0)
        with ThreadPoolExecutor(len(lanes)) as pool:
            whole = all(list(pool.map(run, range(len(lanes)))))
        return whole and self._ask_alone(until)

    def _ask_alone(self, until: Callable[[], bool]) -> bool:
        """What the GPU had no room for beside other workers, one by one, while those hold nothing there."""
        crowded, self._crowded = self._crowded, []
        for job, worker in crowded:
            for other in self.workers:
                if other is not worker and not until():
                    with suppress(WorkerLost):
                        other.ask(LONGEST_ANSWER, what="rest")
            if until():
                return False
            self._ask(job, worker, beside=0)
        return True

    def _ask(self, job: Job, worker: Asks, beside: int | None = None) -> float:
        """`beside`: how many other workers are on the same GPU."""
        if beside is None:
            beside = self._lanes(job.specimen) - 1
        name, shelved = job.question.name, job.specimen
        device = self.device or (None if shelved.device != "cpu" else "cpu")
        began = time.monotonic()
        request = {
            "what": "ask",
            "question": name,
            "specimens": [*job.before, str(shelved.path)],
            "device": device,
            "threads": self.threads,
            "share": self.share / (1 + beside),
        }
        try:
            answer = worker.ask(LONGEST_ANSWER, **request)
        except WorkerLost as lost:
            if str(lost) == CUT_OFF:  # no failure: who examines later asks it again
                answer = {"not_asked": CUT_OFF, "seconds": time.monotonic() - began}
            else:
                self._lost[shelved.path] = self._lost.get(shelved.path, 0) + 1
                answer = {"error": str(lost), "seconds": time.monotonic() - began}
        with self._lock:
            if beside and self.share >= ALL and has_no_room(answer):
                self._crowded.append((job, worker))
            else:
                self._note(job, answer)
        return float(answer.get("seconds", 0.0))

    def _note(self, job: Job, answer: dict[str, Any]) -> None:
        """What came of a question, into the run."""
        name, shelved = job.question.name, job.specimen
        # a training has the rest of the GPU
        if "later" in answer or (self.share < ALL and has_no_room(answer)):
            self._later[(name, shelved.step)] = answer.get("later") or answer["error"]
            return
        outcome, reason = self._hear(job.question, shelved.step, answer)
        self._asked[(name, shelved.step)] = outcome
        self._events.write(
            "asked",
            question=name,
            step=shelved.step,
            outcome=outcome,
            reason=reason,
            seconds=answer.get("seconds", 0.0),
        )

    def _hear(self, question: Question, step: int, answer: dict[str, Any]) -> tuple[str, str]:
        """The verdicts of an answer go into the run; what they come to, in one word, and why."""
        if "error" in answer:
            place = f" ({answer['place']})" if answer.get("place") else ""
            return "failed", f"{answer['error']}{place}"
        if "not_asked" in answer:
            return "not asked", answer["not_asked"]
        for fact, value in answer.get("noted", {}).items():
            self._events.write("fact", name=fact, value=value)
        verdicts, counts = self._sightings.hear(question, answer["verdicts"])
        for count in counts:
            self._events.write("seen", step=step, **count)
        families = [verdict["family"] for verdict in verdicts]
        for verdict in verdicts:
            self._say(question.name, step, verdict, alone=families.count(verdict["family"]) == 1)
        for kind in ("confirmed", "undecided", "excluded"):
            reasons = [verdict["reason"] for verdict in verdicts if verdict["verdict"] == kind]
            if reasons:
                return kind, reasons[0] if kind == "undecided" else ""
        return "nothing", ""

    def _say(self, name: str, step: int, verdict: dict[str, Any], alone: bool) -> None:
        before = self._said.get((name, verdict["family"]), [])
        event = {"experiment": name, "step": step, **verdict}
        now = standing(before, event)
        # what is said again need not be written again, unless it stands beside something new
        same = alone and len(before) == 1 and all(before[0].get(part) == v for part, v in verdict.items())
        if now is before or same:
            return
        fresh = all(said["verdict"] != "confirmed" for said in before)
        self._said[(name, verdict["family"])] = now
        self._events.write("verdict", **event)
        proven = (verdict["verdict"], verdict["level"], verdict["confidence"]) == (
            "confirmed",
            "problem",
            "proven",
        )
        if proven and fresh and not verdict.get("if_troubled") and verdict["id"] not in self._announced:
            self._announced.add(verdict["id"])  # for whoever is still training
            self._events.write(
                "proven", **{key: event.get(key) for key in ("id", "step", "where", "evidence")}
            )

    def _write_extras(self, shelved: Shelved) -> None:
        if not shelved.landmark or self._gains >= MOST_GAINS or self._lost.get(shelved.path):
            return
        try:
            # who made the shadow
            worker = self.workers[LANES["is_the_gradient_right"] % self._lanes(shelved)]
            found = worker.ask(LONGEST_ANSWER, what="extras", path=str(shelved.path), device=self.device)
        except WorkerLost:
            self._lost[shelved.path] = self._lost.get(shelved.path, 0) + 1
            return
        if found.get("gains"):
            self._gains += 1
            self._events.write("gains", step=shelved.step, modules=found["gains"])
        if found.get("shadow") and self._shadows < MOST_SHADOWS:
            self._shadows += 1
            self._events.write("shadow", step=shelved.step, **found["shadow"])

    def ask_again_what_had_to_wait(self) -> None:
        """There may be room now: the training has ended."""
        self._later.clear()

    def _lanes(self, shelved: Shelved) -> int:
        """How many workers share a step: of a large one, as many copies as a GPU has room for once nobody trains.

        It stays so: a question remembers the steps before in one worker.
        """
        if shelved.device == "cpu" or shelved.bytes <= LARGE or len(self.workers) == 1:
            return len(self.workers)
        if self._gpu_room is None:
            try:
                self._gpu_room = int(self.workers[0].ask(LONGEST_ANSWER, what="room").get("free", 0))
            except WorkerLost:
                self._gpu_room = 0
        return min(len(self.workers), max(1, int(ALL * self._gpu_room) // (COPIES * shelved.bytes)))

    def show_start(self) -> None:
        self._show()

    def warm_up(self) -> None:
        """The workers start and import what they need, all at once, before the first of them is asked."""
        for worker in self.workers:
            worker.warm_up()

    def _show(self, **facts: Any) -> None:
        """For whoever waits for the end."""
        now = {"pid": os.getpid(), "asked": len(self._asked), "ended": False, **facts}
        _replace(self.run / PROGRESS_FILE, now)
        if self.on_progress is not None:
            self.on_progress(now)

    def end(self, limit: float | None, left: int) -> None:
        """What was not asked is said."""
        if left:
            why = (
                f"the time that was given ({limit:g} s) was over"
                if limit is not None
                else "it was interrupted"
            )
            self._say_not_asked(self.jobs(), why)
        for (question, step), why in self._later.items():
            self._events.write(
                "asked", question=question, step=step, outcome="not asked", reason=why, seconds=0.0
            )
        given_up = [path for path, lost in self._lost.items() if lost >= MOST_LOSSES]
        for path in given_up:
            self._lost[path] = 0  # what was left of it
            left_of_it = [job for job in self.jobs() if job.specimen.path == path]
            self._say_not_asked(left_of_it, f"{MOST_LOSSES} workers were lost over this step")
            self._lost[path] = MOST_LOSSES
        self._events.write("examination_ended", limit=limit, left=left)
        for worker in self.workers:
            worker.close()
        self._show(left=left, ended=True)

    def _say_not_asked(self, jobs: list[Job], why: str) -> None:
        for job in jobs:
            self._events.write(
                "asked",
                question=job.question.name,
                step=job.specimen.step,
                outcome="not asked",
                reason=why,
                seconds=0.0,
            )


class _Events:
    """The file that an examination appends to; whole lines only."""

    def __init__(self, run: Path) -> None:
        self._file = run / EXAMINATION_FILE

    def read(self) -> list[dict[str, Any]]:
        return read_events(self._file, [])

    def write(self, event: str, /, **facts: Any) -> None:
        line = json_line({"event": event, "time": round(time.time(), 3), **facts}) + "\n"
        descriptor = open_to_append(self._file)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def note(run: Path, event: str, /, **facts: Any) -> None:
    """What was found out beside the questions, as an event of the examination."""
    _Events(run).write(event, **facts)


def has_no_room(answer: dict[str, Any]) -> bool:
    return "later" in answer or str(answer.get("error")).startswith("OutOfMemoryError")


def was_asked(event: dict[str, Any]) -> bool:
    """Whether an `asked` event settles its question for its step; what does not apply to a step never will."""
    settled = (DOES_NOT_APPLY, OUT_OF_REACH)
    return event.get("outcome") != "not asked" or str(event.get("reason")).startswith(settled)


def _replace(file: Path, data: dict[str, Any]) -> None:
    replace_file(file, json_line(data).encode())


class Locked:
    """One examination of a run at a time."""

    def __init__(self, run: Path) -> None:
        self._file = run / LOCK_FILE

    def __enter__(self) -> Locked:
        try:
            self._descriptor = open_to_append(self._file)
        except OSError as error:
            raise UserError(f"{self._file} cannot be locked: {error}; examine a copy of the run") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise UserError(
                f"{self._file.parent} is being examined by another process; wait until that has ended, and ask again"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def known_questions(names: Iterable[str]) -> Iterator[str]:
    """Names, or parts of them, of questions; UserError for one that fits none."""
    for wanted in names:
        found = [name for name in BY_NAME if wanted in name]
        if not found:
            raise UserError(f"there is no question {wanted!r}; docs/questions.md lists them")
        yield from found
