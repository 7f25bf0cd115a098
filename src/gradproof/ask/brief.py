"""A run on one page, for whoever goes on with it: what was run, what is wrong, what was ruled out, what is open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from gradproof.ask.answer import cleaned
from gradproof.diagnosis.course import find_departures
from gradproof.diagnosis.curves import loss_spike, loss_turned
from gradproof.diagnosis.findings import Diagnosis, Finding
from gradproof.diagnosis.ranking import diagnose
from gradproof.diagnosis.series import tracks
from gradproof.diagnosis.shards import NEAR
from gradproof.diagnosis.turned import last_swap, say_swap
from gradproof.record.run import Run
from gradproof.tape.label import find_specimens

MOST = 5_200  # characters: less than 1,500 tokens
LONGEST = 330
# parts of a course: what comes last is looked at closely
SHARES = (0.0, 0.01, 0.1, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 1.0)
FIRST = 4  # series that left their course
LEAST_COURSE = 200  # steps: of fewer, first, last and least say it
LINE = re.compile(r"([\w./-]+\.py):(\d+)")


def write_brief(run: Run) -> str:
    """Sections in the order of their worth; what does not fit any more is left out, and that is said."""
    found = diagnose(run)
    sections = [
        ("What was run", list(what_was_run(run, found))),
        ("What is wrong", list(what_is_wrong(found))),
        ("How it went", [*how_it_went(run), *where_it_turned(run)]),
        ("Lines concerned", list(lines_concerned(run, found))),
        ("Not asked, or not answered", list(not_asked(run, found))),
        ("Ruled out", [f"{e.id or e.family}: {e.reason}" for e in found.excluded]),
        ("Go on", list(go_on(run, found))),
    ]
    last = render(*sections[-1], 10_000)
    text = f"# {cleaned(run.path.name)}\n"
    for title, lines in sections[:-1]:
        text += render(title, lines, MOST - len(text) - len(last))
    return text + last


def render(title: str, lines: list[str], room: int) -> str:
    if not lines:
        return ""
    text = f"\n## {title}\n"
    for number, line in enumerate(lines):
        rest = f"- … and {len(lines) - number} more: `gradproof diagnose RUN --json`\n"
        item = f"- {cleaned(line, LONGEST)}\n"
        if len(text) + len(item) + len(rest) > room:
            return text + rest if number or room > 200 else ""
        text += item
    return text


def what_was_run(run: Run, found: Diagnosis) -> Iterator[str]:
    command = " ".join(map(str, run.info.get("command") or ["?"]))
    versions = ", ".join(f"{k} {v}" for k, v in list((run.info.get("versions") or {}).items())[:4])
    yield f"`{command}` ({versions or 'versions unknown'}); {found.counted or f'{found.steps} steps'}"
    losses = run.steps["loss"][run.seen["loss"]]
    if len(losses):
        finite = losses[np.isfinite(losses)]
        best = f", least {finite.min():.4g}" if len(finite) else ""
        bad = f", {len(losses) - len(finite)} not finite" if len(finite) < len(losses) else ""
        yield f"loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last{best}{bad}"
    for optimizer in (run.info.get("optimizers") or [])[:2]:
        groups = optimizer.get("groups") or [{}]
        settings = {
            k: v for k, v in groups[0].items() if isinstance(v, (int, float)) and not isinstance(v, bool)
        }
        shown = ", ".join(f"{k} {v:g}" for k, v in list(settings.items())[:5])
        yield f"at first {optimizer.get('class', 'optimizer')} ({shown}), {len(groups)} groups"
    if found.stopped:
        yield found.stopped


def how_it_went(run: Run) -> Iterator[str]:
    """Loss, rate and gradient by parts of the run, of each optimizer: where it turned, and what turned with it."""
    for track in [track for track in tracks(run) if np.isfinite(track.loss).any()][:2]:
        ends = [round(share * len(track.rows)) for share in SHARES]
        for first, last in pairwise(ends) if len(track.rows) >= LEAST_COURSE else ():
            if last > first:
                yield track.label + ": " * bool(track.label) + part_of_course(run, track.rows[first:last])


def where_it_turned(run: Run) -> Iterator[str]:
    """The step at which the loss leaves its course, and the file that was opened last before it; whether that is the
    data's doing or the weights', and what else left its course first."""
    opened = {file: int(step) for file, step in ((run.info.get("facts") or {}).get("opened") or {}).items()}
    exchanged = last_swap(run)
    # one that came back was a passing thing: what its batches were is known where they were exchanged
    for symptom in list(loss_turned(run)) or list(loss_spike(run) if exchanged else ())[:1]:
        yield symptom.evidence
        before = [file for file, at in opened.items() if 0 < at <= (symptom.step or 0) + NEAR]
        for file in before[-2:]:
            yield f"{file} was first opened at step {opened[file]}"
        if exchanged:
            yield say_swap(exchanged)
        departed = find_departures(run)
        for place, departure in enumerate(departed[:FIRST]):
            more = f" (the first of {len(departed)}: `gradproof ask RUN course`)" if not place else ""
            yield f"left its course: {departure}{more}"


def part_of_course(run: Run, rows: np.ndarray) -> str:
    """`steps 900 to 950: loss 0.31 (0.28 to 0.44), lr 0.001, gradient 0.7`"""
    text = f"steps {int(run.steps['step'][rows[0]])} to {int(run.steps['step'][rows[-1]])}"
    losses = run.steps["loss"][rows[run.seen["loss"][rows]]]
    finite = losses[np.isfinite(losses)]
    if len(finite):
        low, middle, high = np.percentile(finite, (5, 50, 95))
        text += f": loss {middle:.4g} ({low:.4g} to {high:.4g})"
    if len(finite) < len(losses):
        text += f", {len(losses) - len(finite)} losses not finite"
    rates = run.steps["lr"][rows]
    if rates := [rate for rate in rates[[0, -1]].tolist() if np.isfinite(rate)]:
        text += f", lr {' to '.join(dict.fromkeys(f'{rate:.3g}' for rate in rates))}"
    norms = run.steps["norm_before_clip"][rows]
    norms = norms if np.isfinite(norms).any() else run.steps["grad_norm"][rows]
    if np.isfinite(norms).any():
        text += f", gradient {np.nanmedian(norms[np.isfinite(norms)]):.3g}"
    return text


def what_is_wrong(found: Diagnosis) -> Iterator[str]:
    if not found.causes or found.worst == "note":
        yield found.conclusion
    for cause in found.causes[:6]:
        where = f" at {cause.where}" if cause.where else ""
        step = f", step {cause.step}" if cause.step is not None else ""
        yield f"**{cause.level}, {cause.confidence}**: {cause.title or cause.id}{where}{step} ({cause.id})"
        yield from (f"how we know: {line}" for line in cause.evidence[:3])
        yield f"to do: {cause.fix}"
        if cause.tried:
            yield cause.tried


def lines_concerned(run: Run, found: Diagnosis) -> Iterator[str]:
    """The lines of the script that findings name, as they were when it ran."""
    script = run.script() or []
    name = str((run.info.get("source") or {}).get("file") or "").rsplit("/", 1)[-1]
    for file, number in dict.fromkeys(place for cause in found.causes[:4] for place in places(cause)):
        if file.rsplit("/", 1)[-1] == name and 0 < number <= len(script):
            yield f"{file}:{number}  `{script[number - 1].strip()}`"


def places(cause: Finding) -> Iterator[tuple[str, int]]:
    for text in (cause.where or "", *cause.evidence, cause.fix):
        for file, number in LINE.findall(text):
            yield file, int(number)


def not_asked(run: Run, found: Diagnosis) -> Iterator[str]:
    yield from found.notes[:4]
    asked = found.examination
    for what, several in (
        ("failed", asked.failed),
        ("not asked", asked.not_asked),
        ("undecided", asked.undecided),
    ):
        for question in several:
            yield f"{question.question.replace('_', ' ')} ({what}): {question.reason}"
    if not find_specimens(run.path):
        yield "no recorded step was kept: nothing can be replayed"


def go_on(run: Run, found: Diagnosis) -> Iterator[str]:
    yield from found.next_steps[:3]
    if found.examination.command and not found.examination.complete:
        yield f"`{found.examination.command}` asks what is open"
    steps = [int(path.name.partition("-")[2]) for path in find_specimens(run.path)]
    if steps:
        shown = ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:4], "…", *steps[-3:]]))
        yield f"recorded steps: {shown}; `gradproof ask {cleaned(str(run.path))}` lists the questions"
    for cause in found.causes[:1]:
        yield f"`gradproof explain {cause.id}` is a page about it"
