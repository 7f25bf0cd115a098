"""What is different about the batches of now: columns, ranges, and what one column says of another."""

from __future__ import annotations

from collections import Counter

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.samples import by_source, last_opened
from gradproof.diagnosis.curves import leap_to_look_into
from gradproof.errors import UserError
from gradproof.examination.examiner import Shelved, read_shelf
from gradproof.examination.turned import LARGE, steps_to_swap
from gradproof.instruments.changed import find_changes, table_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.worse import who_loses
from gradproof.tape.specimen import load

SEVERAL = 12  # steps of each side, of a small model


def answer(asked: Asked) -> Answer:
    sides = steps_to_compare(asked)
    early, late = ([Evidence(load(shelved.path)) for shelved in side] for side in sides)
    tables = [[table for evidence in side if (table := table_of(evidence))] for side in (early, late)]
    if not all(tables):  # the second optimizer's steps have none
        raise UserError("no input could be told apart; what a step was given: gradproof ask RUN fed --step N")
    found = find_changes(*tables)
    rows: list[Row] = [
        {"column": change.column, "changed": change.text, "share": round(change.share, 3)} for change in found
    ]
    worse = who_loses(early, late)
    rows[:0] = [{"column": worse.column, "changed": str(worse), "share": worse.among_them}] if worse else []
    rows += new_sources(early, late)
    steps = [f"steps {side[0].step} to {side[-1].step}" for side in (early, late)]
    samples = [sum(len(next(iter(table.values()))) for table in side) for side in tables]
    said = f"{samples[1]} samples of {steps[1]}, against {samples[0]} of {steps[0]}"
    if worse is not None:
        sentence = f"Not all samples are worse off: {worse} ({said})."
    elif found:
        things = "1 thing has" if len(found) == 1 else f"{len(found)} things have"
        sentence = f"{things} changed in {said}; most of all {found[0].column}: {found[0].text}."
    else:
        sentence = f"No column has changed in {said}, as far as means, spreads, extremes and counts tell."
    return Answer(
        "changed",
        sentence,
        "measured",
        step=late[0].step,
        numbers={"samples_before": samples[0], "samples_now": samples[1], "columns": len(tables[0][0])},
        rows=tuple(rows),
        not_looked_at=(
            "samples of other steps",
            "what pictures show and texts say: of long samples only means, spreads and extremes are compared",
        ),
        ask_next=tuple(f"gradproof ask RUN {what}" for what in ("swap", "fed --step N", "tensor --of input")),
    )


def steps_to_compare(asked: Asked) -> list[list[Shelved]]:
    """Those around the turn of the loss; or up to the step --with and from --step on; or of both halves of the run."""
    shelf, leap = read_shelf(asked.run.path), leap_to_look_into(asked.run)
    if not shelf:
        raise UserError("no step was recorded: there are no batches to compare")
    several = 1 if any(shelved.bytes > LARGE for shelved in shelf) else SEVERAL
    if asked.other:
        early, late = steps_to_swap(shelf, leap, asked.step, asked.other)
        until, since = early[-1].step, late[0].step
    elif leap is not None and leap[0] > shelf[0].step:
        return steps_to_swap(shelf, leap, asked.step, "", SEVERAL)
    else:
        since = asked.step if asked.step is not None else len(asked.run) // 2
        until = since - 1
    sides = [
        [s for s in shelf if s.step <= until][-several:],
        [s for s in shelf if s.step >= since][:several],
    ]
    if not all(sides):
        raise UserError(
            f"only one side of step {since} was recorded: --step LATE --with EARLY names two steps"
        )
    return sides


def new_sources(early: list[Evidence], late: list[Evidence]) -> list[Row]:
    """Files and parts that only the late samples come from."""

    def counted(side: list[Evidence]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for evidence in side:
            for row in (*by_source(evidence), *last_opened(evidence)):
                if str(row["what"]).startswith(("source ", "file ")):
                    counts[str(row["what"])] += int(row.get("samples", 1))
        return counts

    before, now = counted(early), counted(late)
    return [
        {"column": name, "changed": "only the late steps use it", "share": 0.0}
        for name, _ in now.most_common()
        if name not in before
    ]
