"""The planted faults and the healthy runs, recorded once: what a change to a question is judged on, without training.

An entry is a folder with the planted script, its run with the specimens, and a label that says of which text, which
torch and which formats it was made. What did not change is not run again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gradproof import children
from gradproof.faults import accelerated
from gradproof.faults.catalogue import FAULTS, HEALTHY
from gradproof.faults.elsewhere import why_not
from gradproof.faults.fault import Fault, Healthy, plant
from gradproof.faults.scoreboard import Score, judge, text_of_place

LABEL_FILE, ANSWERS_FILE, SCRIPT_FILE = "entry.json", "answers.json", "train.py"
LIMIT = 300.0  # seconds for one recording
SOURCE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Elsewhere:
    """Where a script is trained, and in which numbers: as it stands, or moved from outside."""

    device: str = "cpu"
    precision: str = ""  # bf16, fp16 or compiled

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.device, self.precision)))


@dataclass(frozen=True)
class Case:
    """One script to record, and what is true of it."""

    name: str
    id: str  # family/what, or healthy
    script: str
    source: str
    of: Fault | Healthy | accelerated.Planted | accelerated.Sound

    @property
    def accelerated(self) -> bool:
        """Whether it chooses its device and its numbers itself."""
        return isinstance(self.of, (accelerated.Planted, accelerated.Sound))

    @property
    def right(self) -> frozenset[str]:
        """The families that describe it truly; none for a healthy one."""
        also = getattr(self.of, "also", ())
        return frozenset(id.partition("/")[0] for id in (self.id, *also)) - {"healthy"}

    def judge(self, causes: list[dict[str, Any]], seconds: float) -> Score:
        """Compare a diagnosis with what was planted."""
        if isinstance(self.of, accelerated.Sound):
            return judge(Healthy(self.name, self.script, ("", 0, 0)), causes, self.source, seconds)
        if not isinstance(self.of, accelerated.Planted):
            return judge(self.of, causes, self.source, seconds)
        fault = Fault(self.id, self.script, (), (), ("", 0), self.of.also)
        hit = next((cause for cause in causes if cause["family"] in self.right), None)
        place = None
        if hit and self.of.place:
            place = bool(re.search(self.of.place, text_of_place(hit, self.source)))
        return replace(judge(fault, causes, self.source, seconds), name=self.name, place=place)


def choose(elsewhere: Elsewhere, only: str = "") -> list[Case]:
    """The scripts of a corpus. The trainings that are written for a GPU are in one that is recorded there.

    Every script as it stands is among the healthy ones already.
    """
    small: list[Fault | Healthy] = [*FAULTS, *HEALTHY]
    large: list[accelerated.Planted | accelerated.Sound] = [*accelerated.FAULTS, *accelerated.HEALTHY]
    cases = [Case(each.name, _id(each), each.script, plant(each), each) for each in small]
    if elsewhere == Elsewhere("cuda"):
        cases += [
            Case(f"accelerated-{each.name}", _id(each), each.script, accelerated.plant(each), each)
            for each in large
        ]
    return [case for case in cases if re.search(only, f"{case.name} {case.id}")]


def _id(case: Any) -> str:
    return getattr(case, "id", "healthy")


# recording -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Label:
    """What is written beside a recorded run, once it is there."""

    key: str  # of all that it was made of
    end: str  # ok, exit N, signal N, limit, or skipped
    seconds: float
    reason: str = ""  # where there is nothing to ask


@dataclass(frozen=True)
class Entry:
    """One case in a corpus."""

    case: Case
    folder: Path

    @property
    def run(self) -> Path:
        """The run that is diagnosed: of a training in several processes, that of the first."""
        first = self.folder / "run.rank0"
        return first if first.exists() else self.folder / "run"

    @property
    def label(self) -> Label | None:
        """What was recorded; None if nothing was, or not to its end."""
        try:
            return Label(**json.loads((self.folder / LABEL_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def asked(self) -> dict[str, str]:
        """By question: the code that gave its answers."""
        try:
            return dict(json.loads((self.folder / ANSWERS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def note_asked(self, codes: dict[str, str]) -> None:
        _write(self.folder / ANSWERS_FILE, {**self.asked, **codes})


def entries_of(corpus: Path, elsewhere: Elsewhere, only: str = "") -> list[Entry]:
    return [Entry(case, corpus / elsewhere.name / case.name) for case in choose(elsewhere, only)]


def record_all(
    entries: list[Entry],
    elsewhere: Elsewhere,
    made_with: str,
    jobs: int = 1,
    done: Callable[[Entry, Label, bool], None] = lambda entry, label, fresh: None,
) -> None:
    """Runs what is not there yet, or was made of something else; `done` hears of each, and whether it was run now."""

    def record(entry: Entry) -> tuple[Entry, Label, bool]:
        key = key_of(entry.case, elsewhere, made_with)
        label = entry.label
        if label is not None and label.key == key:
            return entry, label, False
        return entry, record_one(entry, elsewhere, key), True

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for found in pool.map(record, entries):
            done(*found)


def key_of(case: Case, elsewhere: Elsewhere, made_with: str) -> str:
    """A name for all that a recording is made of: the text, the place, the versions of torch and the formats."""
    return hashlib.sha256("\0".join((case.source, elsewhere.name, made_with)).encode()).hexdigest()[:16]


def record_one(entry: Entry, elsewhere: Elsewhere, key: str) -> Label:
    """One script under `gradproof run`, in a folder of its own; the label is written last."""
    shutil.rmtree(entry.folder, ignore_errors=True)
    entry.folder.mkdir(parents=True)
    (entry.folder / SCRIPT_FILE).write_text(entry.case.source, encoding="utf-8")
    if entry.case.accelerated:
        elsewhere = Elsewhere()
    reason = why_not(entry.case.source, elsewhere.device, elsewhere.precision)
    label = Label(key, "skipped", 0.0, reason) if reason else _run(entry, elsewhere, key)
    _write(entry.folder / LABEL_FILE, asdict(label))
    return label


def _run(entry: Entry, elsewhere: Elsewhere, key: str) -> Label:
    moved = ["-m", "gradproof.faults.elsewhere", elsewhere.device, elsewhere.precision or "as-it-is"]
    command = [sys.executable, *(["-m", "gradproof"] if elsewhere == Elsewhere() else moved)]
    command += ["run", "--quiet", "--examine", "off", "--out", "run", SCRIPT_FILE]
    began, said = time.monotonic(), entry.folder / "stderr.txt"
    environment = {"OMP_NUM_THREADS": "1", **children.environment()}
    del environment["GRADPROOF"]  # this one is to be watched
    with said.open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=entry.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
            end = "ok" if code == 0 else f"exit {code}" if code > 0 else f"signal {-code}"
        except subprocess.TimeoutExpired:
            end = "limit"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes it has started
            process.wait()
    (entry.run / "examination.jsonl").unlink(missing_ok=True)  # ranks are asked at once, whatever was wished
    taped = next(entry.run.glob("specimens/step-*"), None)
    reason = "" if taped else last_words(said.read_text(errors="replace")) or "no step was taped"
    return Label(key, end, round(time.monotonic() - began, 2), reason)


ERROR = re.compile(
    r"^\s*(?:[\w.]*(?:Error|Exception)\b.*|gradproof: nothing.*|.*Segmentation fault.*)", re.MULTILINE
)


def last_words(said: str) -> str:
    """The last line of a script's complaints that names an error."""
    found = ERROR.findall(said)
    return found[-1].strip()[:200] if found else ""


def _write(file: Path, data: dict[str, Any]) -> None:
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(data), encoding="utf-8")
    draft.replace(file)


# which code answered ---------------------------------------------------------------------------------------


@cache
def code_of(module: str) -> str:
    """A name for the text of an experiment and of all of gradproof that it imports.

    >>> code_of("network.shapes") == code_of("network.shapes") != code_of("data.memory")
    True
    """
    found: set[Path] = set()
    _collect(SOURCE / "experiments" / f"{module.replace('.', '/')}.py", found)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(found))).hexdigest()[:16]


def _collect(file: Path, found: set[Path]) -> None:
    if file in found:
        return
    found.add(file)
    for other in _imports(file):
        _collect(other, found)


@cache
def _imports(file: Path) -> tuple[Path, ...]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = (
        SOURCE.parent / f"{name.replace('.', '/')}.py" for name in names if name.startswith("gradproof.")
    )
    return tuple(path for path in files if path.exists())


def changed_since(entry: Entry, codes: dict[str, str]) -> Iterator[str]:
    """Questions that this entry was asked in other words, or by another tape, than there are now."""
    return (name for name, code in entry.asked.items() if name in codes and codes[name] != code)


# forgetting ------------------------------------------------------------------------------------------------


def forget(file: Path, questions: Iterable[str]) -> None:
    """Takes the answers of some questions out of an examination, so that they are asked anew and nothing old stands.

    Facts that an answer has noted stay: an examination does not say whose they are, and a later one counts more.
    """
    gone, kept = set(questions), []
    for event in read_events(file):
        kind, about = event.get("event"), event.get("question") or event.get("experiment")
        if about not in gone and kind not in ("table", "examination_ended"):
            kept.append(event)
    known = {event.get("id") for event in kept if event.get("event") == "verdict"}
    kept = [event for event in kept if event.get("event") != "proven" or event.get("id") in known]
    draft = file.with_suffix(".draft")
    draft.write_text(
        "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept), encoding="utf-8"
    )
    draft.replace(file)


def read_events(file: Path) -> list[dict[str, Any]]:
    """The events of an examination; lines that are damaged are left out."""
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if file.exists() else ():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                found.append(event)
    return found
