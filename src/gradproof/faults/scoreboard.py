"""Runs every planted fault and every healthy run through `gradproof run`, and counts what was named rightly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradproof.faults.catalogue import FAULTS, HEALTHY
from gradproof.faults.fault import Fault, Healthy, plant

LIMIT = 240  # seconds for one run


@dataclass(frozen=True)
class Score:
    """How gradproof did on one run; for a healthy run `top1` means: no problem was reported."""

    name: str
    family: str
    healthy: bool
    top1: bool
    top3: bool
    place: bool | None  # None: there is no place to name, or the family was missed
    seconds: float
    said: str
    where: str = ""


def score_all(
    only: str = "", jobs: int = 1, done: Callable[[Score], None] = lambda score: None
) -> list[Score]:
    """Every fault, every healthy twin once, every healthy-but-odd run, whose name matches."""
    twins = [
        Healthy(f"{script}-as-it-is", script, ("", 0, 0)) for script in sorted({f.script for f in FAULTS})
    ]
    cases: list[Fault | Healthy] = [*FAULTS, *twins, *HEALTHY]
    chosen = [case for case in cases if re.search(only, f"{case.name} {getattr(case, 'id', 'healthy')}")]
    scores = []
    with ThreadPoolExecutor(jobs) as pool:
        for score in pool.map(score_one, chosen):
            done(score)
            scores.append(score)
    return scores


def score_one(case: Fault | Healthy) -> Score:
    """Run one planted script in a directory of its own and look at the diagnosis."""
    source = plant(case)
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "train.py"
        script.write_text(source)
        start = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "gradproof",
            "run",
            "--quiet",
            "--out",
            "run",
            "--json",
            "d.json",
            "train.py",
        ]
        with suppress(subprocess.TimeoutExpired):
            # several runs at a time, each on all cores, wait for one another more than they compute
            one_thread = {"OMP_NUM_THREADS": "1", **os.environ}
            subprocess.run(
                command, cwd=directory, capture_output=True, timeout=LIMIT, check=False, env=one_thread
            )
        seconds = time.perf_counter() - start
        file = Path(directory) / "d.json"
        causes = json.loads(file.read_text())["causes"] if file.exists() else []
    return judge(case, causes, source, seconds)


def judge(case: Fault | Healthy, causes: list[dict[str, Any]], source: str, seconds: float) -> Score:
    """Compare a diagnosis with what was planted."""
    problems = [cause for cause in causes if cause["level"] == "problem"]
    if isinstance(case, Healthy):
        said = problems[0]["id"] if problems else "nothing"
        return Score(case.name, "healthy", True, not problems, not problems, None, seconds, said)
    right = {case.family, *(name.partition("/")[0] for name in case.also)}
    families = list(dict.fromkeys(cause["family"] for cause in causes))
    hit = next((cause for cause in causes if cause["family"] in right), None)
    place = names_place(case.where, hit, source) if hit and case.where else None
    said = causes[0]["id"] if causes else "nothing"
    return Score(
        case.name, case.family, False, families[:1] != [] and families[0] in right, bool(right & set(families[:3])),
        place, seconds, said, str((hit or {}).get("where") or ""),
    )  # fmt: skip


MOST_LINES = 6  # a finding that names more lines than this names none


def names_place(pieces: Iterable[str], cause: dict[str, Any], source: str) -> bool:
    """Whether a finding names the place: in its words, or by the number of a line that contains one of the pieces."""
    text = text_of_place(cause, source)
    return any(piece in text for piece in pieces)


def text_of_place(cause: dict[str, Any], source: str) -> str:
    """The words of a finding, and the lines of the source that it names by number."""
    text = " ".join([str(cause.get("where") or ""), *cause.get("evidence", [])])
    lines = source.splitlines()
    numbers = {int(number) for number in re.findall(r"train\.py:(\d+)", text)}
    if len(numbers) > MOST_LINES:
        numbers = {int(number) for number in re.findall(r"train\.py:(\d+)", str(cause.get("where") or ""))}
    return text + " ".join(lines[number - 1] for number in numbers if 0 < number <= len(lines))


def render_scoreboard(scores: list[Score]) -> str:
    """The table by family, then what was missed."""
    rows = ["| family | runs | top-1 | top-3 | place | seconds |", "|---|---|---|---|---|---|"]
    for family in dict.fromkeys(score.family for score in scores):
        rows.append(_row(family, [score for score in scores if score.family == family]))
    faults = [score for score in scores if not score.healthy]
    if faults:
        rows.append(_row("**all faults**", faults))
    healthy = [score for score in scores if score.healthy]
    lines = ["\n".join(rows)]
    if healthy:
        alarms = [score for score in healthy if not score.top1]
        lines.append(f"False alarms: {len(alarms)} of {len(healthy)} healthy runs.")
    lines += list(_misses(scores))
    return "\n\n".join(lines) + "\n"


def _row(name: str, scores: list[Score]) -> str:
    placed = [score.place for score in scores if score.place is not None]
    place = f"{sum(placed)}/{len(placed)}" if placed else "–"
    top1, top3 = sum(s.top1 for s in scores), sum(s.top3 for s in scores)
    seconds = sum(s.seconds for s in scores) / len(scores)
    return f"| {name} | {len(scores)} | {top1} | {top3} | {place} | {seconds:.0f} |"


def _misses(scores: list[Score]) -> Iterator[str]:
    missed = [s for s in scores if not s.top1]
    if missed:
        yield "Missed:\n" + "\n".join(f"- {s.name} ({s.family}): said {s.said}" for s in missed)
    unplaced = [s for s in scores if s.place is False]
    if unplaced:
        yield "Place not named:\n" + "\n".join(f"- {s.name}: said {s.where or 'none'}" for s in unplaced)
