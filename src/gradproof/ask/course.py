"""What left its course, and when? The loss, the rates and every statistic of every tensor, over the steps of a run."""

from __future__ import annotations

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.diagnosis.course import FEWEST, Departure, find_departures
from gradproof.diagnosis.curves import loss_turned


def answer(asked: Asked) -> Answer:
    run = asked.run
    turned = next(iter(loss_turned(run)), None)
    found = [each for each in find_departures(run, asked.step) if is_meant(each, asked.of)]
    rows: tuple[Row, ...] = tuple(
        {
            "what": f"{each.statistic} of {each.what}" if each.statistic else each.what,
            "how": "leaps" if each.leaps else "goes another way",
            "on_its_course_until": each.last,
            "off_it_since": each.step,
            "before": each.before,
            "after": each.after,
        }
        for each in found
    )
    sentence = turned.evidence[0].upper() + turned.evidence[1:] + ". " if turned is not None else ""
    if found:
        sentence += f"The first of {len(found)} series to leave its course: {found[0]}."
    else:
        sentence += "No series leaves its course for good."
    measured = len(run.frames)
    return Answer(
        "course",
        sentence,
        "measured",
        step=found[0].step if found else None,
        numbers={"steps": len(run), "steps_with_tensors": measured},
        rows=rows,
        not_looked_at=(
            "passing things: a single step that is odd, and well again at the next",
            *(
                (f"tensors: measured at {measured} steps, of which it takes {FEWEST} or more",)
                if measured < FEWEST
                else ()
            ),
        ),
        ask_next=("gradproof ask RUN swap", "gradproof ask RUN changed", "gradproof brief RUN"),
    )


def is_meant(departure: Departure, wanted: str) -> bool:
    """Whether a series is one of what was asked for: a tensor, a module, a column."""
    name = departure.what.rpartition(" ")[2]
    return not wanted or wanted in (departure.what, name) or name.startswith(f"{wanted}.")
