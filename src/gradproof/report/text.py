"""A diagnosis for the terminal: the one thing that matters first, the next command last."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TextIO

from gradproof.diagnosis.findings import Diagnosis, Finding

WIDTH = 100
STYLES = {"bold": "1", "dim": "2", "problem": "1;31", "warning": "1;33", "note": "1;36", "good": "1;32"}


def render_text(diagnosis: Diagnosis, color: bool = False) -> str:
    """The whole report as text."""
    paint = _painter(color)
    parts = [_headline(diagnosis, paint)]
    parts += [_finding(number, cause, paint) for number, cause in enumerate(diagnosis.causes, 1)]
    parts += [_symptoms(diagnosis, paint), _excluded(diagnosis, paint), _next(diagnosis, paint)]
    parts.append(_footer(diagnosis, paint))
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(diagnosis: Diagnosis, paint) -> str:
    steps = f"{diagnosis.steps} step" + ("" if diagnosis.steps == 1 else "s")
    where = f"gradproof · {diagnosis.run} · {steps}"
    if not diagnosis.steps:
        return f"{paint('bold', where)}\nNo step was recorded: there is nothing to say about training."
    if diagnosis.worst in (None, "note"):
        notes = len(diagnosis.causes)
        more = f" {notes} note{'s' if notes > 1 else ''} below." if notes else ""
        return (
            f"{paint('bold', where)}\n{paint('good', 'Nothing is wrong that this record could show.')}{more}"
        )
    first = diagnosis.causes[0]
    place = f", at {first.where}" if first.where else ""
    return (
        f"{paint('bold', where)}\n{paint(first.level, _sentence(first.title) + place)} ({first.confidence})"
    )


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


def _next(diagnosis: Diagnosis, paint) -> str:
    if not diagnosis.next_steps:
        return ""
    lines = [_wrap("  ", line) for line in diagnosis.next_steps]
    return "\n".join([paint("bold", "Nothing is proven; what would tell most"), *lines])


def _footer(diagnosis: Diagnosis, paint) -> str:
    lines = [f"note: {note}" for note in diagnosis.notes]
    cost = diagnosis.cost
    if cost:
        text = f"watching took {cost['own_seconds']:.2f} s, {100 * cost['share']:.1f} % of the wall time"
        if cost.get("taped_steps"):
            text += f"; taping {cost['taped_steps']} steps and testing on them took {cost['experiment_seconds']:.1f} s"
        if cost.get("bare_steps"):
            text += (
                f" (the first steps are measured whole); to keep to {100 * cost['budget']:g} % after them, "
                f"{cost['bare_steps']} of {cost['steps']} steps have only loss and learning rate"
            )
        if cost.get("unseen_steps"):
            text += f"; {cost['unseen_steps']} of {cost['steps']} steps were not looked at"
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
