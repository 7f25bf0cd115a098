"""Tries a patch: the script as it ran beside the script with the patch, in copies, under the same random numbers.

Neither copy touches the original: both are run by `gradproof run` in a directory of their own, and examined.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.ask.answer import cleaned, say, table
from gradproof.ask.patching import LARGEST, FilePatch, apply_patch, parse_patch
from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.diagnosis.ranking import PROOFS, diagnose
from gradproof.diagnosis.series import trend
from gradproof.errors import UserError, plain
from gradproof.experiments.table import QUESTIONS
from gradproof.files import has_file, read_file
from gradproof.record.run import Run
from gradproof.record.source import LARGEST_COPY, SCRIPT_COPY
from gradproof.record.whole import open_whole

MOST_COPIED = 500 << 20  # bytes of the script's directory
SHARED = 10 << 20  # bytes: files from this size on may be links, where that is allowed
NOT_COPIED = {
    ".git",
    "__pycache__",
    "node_modules",
    ".venv",
    "venv",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
}
EXAMINE = "all"  # of both trainings, whatever it takes
DIFFERENT = 0.02  # of a loss
NOISES = 4.0  # times what two windows of the same curve differ by chance
BEGAN = "gradproof: began with"  # what a training says that begins with a recorded step
FIXED, BETTER, SAME, WORSE = "fixed", "better", "no difference", "worse"


@dataclass(frozen=True)
class Trial:
    """What trying showed; `losses` are both curves at some steps."""

    verdict: str
    sentence: str
    steps: int
    before: float
    after: float
    losses: dict[str, list[int] | list[float]]
    finding: str | None
    finding_now: str | None
    new_findings: tuple[str, ...]
    other_changes: tuple[str, ...]
    not_looked_at: tuple[str, ...]
    original: str
    patched: str

    def as_data(self) -> dict[str, Any]:
        return {"schema": "gradproof/trial/1", **cleaned(asdict(self))}

    def __str__(self) -> str:
        data = self.as_data()
        rows = [dict(zip(self.losses, row, strict=True)) for row in zip(*self.losses.values(), strict=True)]
        lines = [f"{self.verdict}: {data['sentence']}", *table(rows)] if rows else [data["sentence"]]
        lines += [
            f"  the finding was  {say(data['finding'])}",
            f"  the finding now  {say(data['finding_now'])}",
        ]
        lines += [f"  new: {text}" for text in data["new_findings"]]
        lines += [f"  also changed: {text}" for text in data["other_changes"]]
        lines += [f"  not looked at: {text}" for text in data["not_looked_at"]]
        lines += [f"  runs: {plain(self.original)} {plain(self.patched)}"]
        return "\n".join(lines) + "\n"


def try_patch(
    run: Run,
    patch: Path,
    out: Path,
    steps: int = 100,
    links: bool = False,
    within: int = 600,
    begin: int | None = None,
    examine: str = EXAMINE,
) -> Trial:
    """Both trainings, below `out`, from the start or from the recorded step `begin`, and what came of them."""
    patches = parse_patch(read_file(patch, LARGEST).decode("utf-8", "replace"))
    directory, script, arguments = find_program(run)
    notes: list[str] = []
    for name in ("original", "patched"):
        copy_directory(directory, out / name, links)
        notes = put_script_back(run, out / name / script)
    changed = apply_patch(fitting(patches, out / "patched"), out / "patched")
    runs = []
    place = f"{run.path.absolute()}:{begin}" if begin is not None else ""
    for name in ("original", "patched"):
        said = start(out / name, script, arguments, out / f"run-{name}", steps, within, place, examine)
        runs.append(open_whole(out / f"run-{name}"))
        if begin is not None:
            notes = [*notes, f"{name} {said}; data and schedules begin anew"]
    return judge(runs[0], runs[1], finding_of(diagnose(run)), changed, notes)


def find_program(run: Run) -> tuple[Path, Path, list[str]]:
    """The directory that the script was started in, the script below it, and its arguments."""
    command, directory = run.info.get("command") or [], run.info.get("directory")
    if not command or not directory or not Path(directory).is_dir():
        raise UserError(
            f"{run.path} does not say which script ran, or its directory is gone: {directory}; "
            "run the script again, watched"
        )
    script = Path(directory) / str(command[0])
    if not has_file(script) or not script.resolve().is_relative_to(Path(directory).resolve()):
        raise UserError(
            f"the script {script} is not there any more, or not below the directory that it was started in; "
            "run it again from there"
        )
    return (
        Path(directory),
        script.resolve().relative_to(Path(directory).resolve()),
        [str(a) for a in command[1:]],
    )


def copy_directory(source: Path, target: Path, links: bool) -> None:
    """Everything but runs, environments and caches; nothing at all where it is too much."""
    files = list(files_below(source, target.parent))
    size = sum(file.stat().st_size for file in files)
    shared = {file for file in files if links and file.stat().st_size >= SHARED}
    if size - sum(file.stat().st_size for file in shared) > MOST_COPIED:
        raise UserError(
            f"{source} holds {size / 1e9:.1f} GB, too much to be copied; --links lets the copies share files over "
            "10 MB with the original (a script that writes into them changes them)"
        )
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file in shared:
            place.symlink_to(file.resolve())
        else:
            shutil.copy2(file, place)


def files_below(source: Path, besides: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(source):
        here = Path(folder)
        folders[:] = [
            name
            for name in folders
            if name not in NOT_COPIED
            and here / name != besides
            and not has_file(here / name / "run.json")
            and not has_file(here / name / "pyvenv.cfg")
        ]
        yield from (here / name for name in files if (here / name).is_file())


def put_script_back(run: Run, script: Path) -> list[str]:
    """The script as it was when it ran; it may have been worked on since."""
    try:
        kept = read_file(run.path / SCRIPT_COPY, LARGEST_COPY)
    except OSError:
        return ["the script as it ran was not kept: the one that is there now was taken"]
    if script.read_bytes() == kept:
        return []
    script.write_bytes(kept)
    return ["the script has changed since the run: both trials use it as it was then"]


def fitting(patches: list[FilePatch], directory: Path) -> list[FilePatch]:
    """Paths from the root of a repository, or absolute ones, as paths from the script's directory."""
    for patch in patches:
        for side in ("old", "new"):
            parts = Path(getattr(patch, side)).parts
            known = next(
                (parts[i:] for i in range(len(parts)) if has_file(directory.joinpath(*parts[i:]))), None
            )
            if known and getattr(patch, side) != "/dev/null" and ".." not in parts and parts[0] != "/":
                setattr(patch, side, "/".join(known))
    return patches


def start(
    directory: Path,
    script: Path,
    arguments: list[str],
    out: Path,
    steps: int,
    within: int,
    begin: str = "",
    examine: str = EXAMINE,
) -> str:
    """One of the two trainings; what it says of the recorded step that it begins with (RUN:STEP), if there is one."""
    command = [sys.executable, "-m", "gradproof", "run", "--quiet", "--seed", "0", "--steps", str(steps)]
    command += ["--examine", examine, "--out", str(out), *(["--from", begin] if begin else [])]
    command += ["--", str(script), *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    environment.pop("GRADPROOF", None)
    # whoever starts us from a source tree has put it on PYTHONPATH, perhaps by a relative path
    package = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    try:
        ended = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{script} did not end within {within} s; fewer --steps, or more time with --within"
        ) from None
    if not has_file(out / "run.json"):
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(
            f"{script} in {directory.name} could not be watched: {plain(last)}; "
            f"does it run with `python {script}`, from a copy?"
        )
    told = (line for line in ended.stderr.splitlines() if line.startswith(BEGAN))
    return next(told, BEGAN).removeprefix("gradproof: ")


def judge(before: Run, after: Run, was: Finding | None, changed: list[str], notes: list[str]) -> Trial:
    """One word for what a patch did, from the findings and the losses of both."""
    first, second = diagnose(before), diagnose(after)
    rows = [np.flatnonzero(run.seen["loss"]) for run in (before, after)]  # a second optimizer's have none
    count = min(map(len, rows))
    if not count:
        raise UserError(said_nothing(first, second, before))
    losses = [run.steps["loss"][row[:count]] for run, row in zip((before, after), rows, strict=True)]
    shown = finding_of(first) or was or next(iter(first.causes), None)
    if was is not None and not has_finding(first, was):
        notes = [
            *notes,
            f"{was.id} was not found again in {count} steps of the original; more --steps may show it",
        ]
    elif was is not None:
        shown = was
    again = shown is not None and has_finding(first, shown)
    stays = shown is not None and has_finding(second, shown)
    gone = again and not stays
    state = "still there" if stays else "gone"
    if gone and shown is not None and not (was_asked(second, shown) or is_recorded(first, shown)):
        state, gone = "not seen again", False
        notes = [*notes, f"whether {shown.family} is gone: it was not asked of the patched script"]
    known = {cause.family for cause in first.causes}
    new = tuple(f"{c.level}: {c.id}" for c in second.causes if c.level != "note" and c.family not in known)
    broke = any(text.startswith("problem") for text in new) or bool(second.raised and not first.raised)
    one, two = map(settled, losses)
    word = compare(*losses)
    if gone and not broke and math.isfinite(two) and (is_finding(shown) or word == BETTER):
        word = FIXED
    elif stays and ((math.isfinite(two) and not math.isfinite(one)) or losses[0][0] != losses[1][0]):
        # other random numbers: it may have learned more, or become NaN later, by chance. What was not learned
        # before and is learned now is no chance
        word = (
            BETTER if fell(losses[1]) and not fell(losses[0]) else WORSE if word == WORSE and broke else SAME
        )
    elif broke and word == SAME:
        word = WORSE
    return Trial(
        word,
        f"the loss at step {int(before.steps['step'][rows[0][count - 1]])} is {two:.4g} instead of {one:.4g}"
        + (f", and {shown.id} is {state}" if shown is not None and again else "")
        + (
            f"; the patched script was ended by {second.raised}" if second.raised and not first.raised else ""
        ),
        count,
        one,
        two,
        curves(losses, before.steps["step"][rows[0][:count]]),
        describe(shown),
        next((describe(c) for c in second.causes if shown is not None and c.family == shown.family), None),
        new,
        (f"files: {', '.join(changed)}", *other_changes(before, after)),
        tuple(notes),
        str(before.path),
        str(after.path),
    )


def finding_of(found: Diagnosis) -> Finding | None:
    return next(filter(is_finding, found.causes), None)


def is_finding(cause: Finding | None) -> bool:
    return cause is not None and cause.level != "note"


def has_finding(found: Diagnosis, like: Finding) -> bool:
    """One of the same family that is no mere note, unless a note is what is looked for."""
    return any(c.family == like.family and (is_finding(c) or not is_finding(like)) for c in found.causes)


def was_asked(found: Diagnosis, cause: Finding) -> bool:
    """Whether its absence means something: it was ruled out, or no question that could show it is open."""
    examination = found.examination
    if examination.complete or any(each.family == cause.family for each in found.excluded):
        return True
    open_ones = {
        each.question for each in (*examination.undecided, *examination.failed, *examination.not_asked)
    }
    deciding = [question for question in QUESTIONS if {cause.id, cause.family} & set(question.causes)]
    return examination.is_recorded and not any(question.sentence in open_ones for question in deciding)


def is_recorded(found: Diagnosis, cause: Finding) -> bool:
    """Whether no question is needed to see it: the calls of every step are its proof."""
    return any(symptom.name in PROOFS and cause.id in symptom.suspects for symptom in found.symptoms)


def describe(cause: Finding | None) -> str | None:
    return (
        None
        if cause is None
        else f"{cause.id}{f' at {cause.where}' if cause.where else ''} ({cause.confidence})"
    )


def settled(losses: np.ndarray) -> float:
    """The middle of the last tenth; a NaN among them is NaN."""
    last = losses[-max(3, len(losses) // 10) :]
    return float(np.median(last)) if np.isfinite(last).all() else math.nan


def compare(before: np.ndarray, after: np.ndarray) -> str:
    """By the losses alone; what chance may do is no difference."""
    one, two = settled(before), settled(after)
    if not math.isfinite(two):
        return SAME if not math.isfinite(one) else WORSE
    if not math.isfinite(one):
        return FIXED if fell(after) else BETTER
    noise = max(chance(before), chance(after))
    far = max(DIFFERENT * max(abs(one), abs(two)), NOISES * noise)
    return SAME if abs(two - one) <= far else BETTER if two < one else WORSE


def chance(losses: np.ndarray) -> float:
    """What the middle of the last tenth varies by: how far points of the last third lie from their neighbours."""
    last = losses[-max(3, len(losses) // 10) :]
    finite = losses[-max(6, len(losses) // 3) :]
    finite = finite[np.isfinite(finite)]
    spread = float(np.median(np.abs(np.diff(finite)))) if len(finite) > 2 else 0.0
    return spread / math.sqrt(len(last))


def fell(losses: np.ndarray) -> bool:
    return (found := trend(losses)) is not None and found.fell


def curves(losses: list[np.ndarray], steps: np.ndarray) -> dict[str, list[int] | list[float]]:
    shown = sorted({round(i * (len(steps) - 1) / 9) for i in range(10)})
    return {
        "step": [int(steps[i]) for i in shown],
        "as_it_was": [float(losses[0][i]) for i in shown],
        "patched": [float(losses[1][i]) for i in shown],
    }


def other_changes(before: Run, after: Run) -> Iterator[str]:
    from gradproof.report.comparison import find_differences

    for found in find_differences([before, after]):
        if found.group not in ("code", "surroundings"):
            yield f"{found.group}, {found.what}: {found.values[0]} → {found.values[1]}"


def said_nothing(first: Diagnosis, second: Diagnosis, before: Run) -> str:
    who, found = ("original", first) if not before.seen["loss"].any() else ("patched script", second)
    return f"the {who} made no step that could be seen{f': {found.raised}' if found.raised else ''}"
