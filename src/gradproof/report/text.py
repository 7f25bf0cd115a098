"""A diagnosis for the terminal: the one thing that matters first, the next command last."""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO
from urllib.parse import quote

from gradproof.diagnosis.examination import Open
from gradproof.diagnosis.findings import Diagnosis, Finding

WIDTH = 100
MOST_NOTES = 5  # about what was not seen, in the first lines
MOST_OPEN, LONGEST = 6, 180  # questions without an answer that are told, and characters for each
STYLES = {"bold": "1", "dim": "2", "problem": "1;31", "warning": "1;33", "note": "1;36", "good": "1;32"}


def render_text(diagnosis: Diagnosis, color: bool = False) -> str:
    """The whole report as text."""
    paint = _painter(color)
    parts = [_headline(diagnosis, paint)]
    parts += [_finding(number, cause, paint) for number, cause in enumerate(diagnosis.causes, 1)]
    parts += [_symptoms(diagnosis, paint), _excluded(diagnosis, paint), _asked(diagnosis, paint)]
    parts += [_next(diagnosis, paint), _footer(diagnosis, paint)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return link_places(text, diagnosis.script) if color else text


def link_places(text: str, script: str) -> str:
    """Every `train.py:12` as a link that a terminal opens (OSC 8), if the script lies on this machine."""
    if not os.path.isfile(script):
        return text
    address = f"file://{quote(socket.gethostname())}{quote(os.path.abspath(script))}"
    place = rf"(?<![\w./-]){re.escape(os.path.basename(script))}:(\d+)"
    return re.sub(place, lambda found: f"\x1b]8;;{address}#{found[1]}\x1b\\{found[0]}\x1b]8;;\x1b\\", text)


def _headline(diagnosis: Diagnosis, paint) -> str:
    steps = f"{diagnosis.steps} step" + ("" if diagnosis.steps == 1 else "s")
    lines = [paint("bold", f"gradproof · {diagnosis.run} · {diagnosis.counted or steps}")]
    if diagnosis.stopped:
        lines.append(paint("warning", textwrap.fill(diagnosis.stopped, WIDTH)))
    if diagnosis.worst in (None, "note") or not diagnosis.steps:
        notes = len(diagnosis.causes)
        more = f" {notes} note{'s' if notes > 1 else ''} below." if notes else ""
        said = textwrap.fill(diagnosis.conclusion, WIDTH, break_long_words=False, break_on_hyphens=False)
        lines.append((paint("good", said) if diagnosis.sure else said) + more)
    else:
        first = diagnosis.causes[0]
        place = f", at {first.where}" if first.where else ""
        lines.append(f"{paint(first.level, _sentence(first.title) + place)} ({first.confidence})")
    lines += [textwrap.fill(f"note: {note}", WIDTH) for note in diagnosis.notes[:MOST_NOTES]]
    if len(diagnosis.notes) > MOST_NOTES:
        lines.append(f"note: {len(diagnosis.notes) - MOST_NOTES} more of these; --json has them all")
    return "\n".join(lines)


def _finding(number: int, cause: Finding, paint) -> str:
    head = f"{number}. {paint(cause.level, cause.level)} · {cause.id} · {cause.confidence}"
    if cause.where:
        head += f" · {cause.where}"
    if cause.step is not None:
        head += f" · step {cause.step}"
    lines = [head]
    for index, line in enumerate(cause.evidence):
        lines.append(_wrap("how we know  " if index == 0 else "             ", line))
    lines.append(_wrap("what to do   ", cause.fix))
    if cause.tried:
        lines.append(_wrap("             ", cause.tried))
    lines.append(paint("dim", f"   more         gradproof explain {cause.id}"))
    return "\n".join(lines)


def _symptoms(diagnosis: Diagnosis, paint) -> str:
    told = {line for cause in diagnosis.causes for line in cause.evidence}
    rest = [str(s) for s in diagnosis.symptoms if str(s) not in told]
    return "\n".join([paint("bold", "Also seen"), *(_wrap("  ", line) for line in rest)]) if rest else ""


def _excluded(diagnosis: Diagnosis, paint) -> str:
    if not diagnosis.excluded:
        return ""
    lines = [_wrap("  ", f"{e.id or e.family}: {e.reason}") for e in diagnosis.excluded]
    return "\n".join([paint("bold", "Tested, and not the cause"), *lines])


def _asked(diagnosis: Diagnosis, paint) -> str:
    """What was asked, and each question that has no answer with its reason; many of one reason are one line."""
    found = diagnosis.examination
    if not diagnosis.steps:
        return ""
    told = []
    for word, those in (
        ("failed", found.failed),
        ("undecided", found.undecided),
        ("not asked", found.not_asked),
    ):
        for reason, questions in group_by_reason(those):
            several = f"{questions[0]} and {len(questions) - 1} more" if len(questions) > 1 else questions[0]
            told.append(_short(f"{word}: {several} ({reason})" if reason else f"{word}: {several}"))
    more = [f"… {len(told) - MOST_OPEN} more; --json has them all"] if len(told) > MOST_OPEN else []
    lines = [_wrap("  ", line) for line in (str(found), *told[:MOST_OPEN], *more)]
    if found.command:
        lines.append(f"     `{found.command}` asks the rest")  # in one piece, to be copied
    return "\n".join([paint("bold", "Asked"), *lines])


def group_by_reason(those: Sequence[Open]) -> list[tuple[str, list[str]]]:
    """Questions by the reason that they have in common, in their order.

    >>> group_by_reason([Open("Why?", "late"), Open("Who?", ""), Open("When?", "late")])
    [('late', ['Why?', 'When?']), ('', ['Who?'])]
    """
    groups: dict[str, list[str]] = {}
    for each in those:
        groups.setdefault(each.reason, []).append(each.question)
    return list(groups.items())


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _next(diagnosis: Diagnosis, paint) -> str:
    if not diagnosis.next_steps:
        return ""
    lines = [_wrap("  ", line) for line in diagnosis.next_steps]
    return "\n".join([paint("bold", "Nothing is proven; what would tell most"), *lines])


def _footer(diagnosis: Diagnosis, paint) -> str:
    lines = []
    cost = diagnosis.cost
    if cost:
        text = f"watching took {cost['own_seconds']:.2f} s, {100 * cost['share']:.1f} % of the wall time"
        if cost.get("taped_steps"):
            text += f"; recording {cost['taped_steps']} steps took {cost.get('taping_seconds', 0.0):.1f} s of it more"
        if cost.get("bare_steps") and cost.get("budget"):
            text += f" (the first steps are measured whole; the budget is {100 * cost['budget']:g} %)"
        lines.append(paint("dim", textwrap.fill(text + ".", WIDTH)))
    else:
        lines.append(paint("dim", "gradproof's cost is not known: the run has not ended, or was killed."))
    lines.append(f"next: gradproof diagnose {diagnosis.run} --json")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrap(label: str, text: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"   {label}",
        subsequent_indent=" " * (3 + len(label)),
        break_long_words=False,
    )


def _painter(color: bool):
    if not color:
        return lambda style, text: text
    return lambda style, text: f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def wants_color(stream: TextIO | None = None) -> bool:
    stream = stream or sys.stdout  # now, not when this file was imported: it may be redirected
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
