"""Is it the data or the weights? Steps from before and after a turn, each replayed with the other's weights."""

from __future__ import annotations

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.diagnosis.curves import leap_to_look_into
from gradproof.diagnosis.turned import say_swap
from gradproof.examination.examiner import read_shelf
from gradproof.examination.turned import steps_to_swap
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.swap import describe_swap, swap
from gradproof.tape.specimen import load

NEXT = {
    "data": ("gradproof ask RUN changed", "gradproof ask RUN fed --step {late}"),
    "weights": ("gradproof ask RUN course", "gradproof ask RUN update --step {late}"),
}


def answer(asked: Asked) -> Answer:
    leap = leap_to_look_into(asked.run)
    sides = steps_to_swap(read_shelf(asked.run.path), leap, asked.step, asked.other)
    found = swap(*([Evidence(load(shelved.path)) for shelved in side] for side in sides))
    kept = {**describe_swap(found), "early": found.early, "late": found.late}
    rows: tuple[Row, ...] = tuple(
        {"put_back": each.part, "loss": each.loss, "of_the_rise": each.share} for each in found.put_back
    )
    said = say_swap(kept)
    following = NEXT.get(found.blame, ("gradproof ask RUN course", "gradproof ask RUN fed --step {late}"))
    return Answer(
        "swap",
        f"{said[0].upper()}{said[1:]}.",
        "proven" if found.blame else "undecided",
        step=found.late[0],
        numbers={"loss_leaps_at": leap[0] if leap else None, **kept["losses"]},
        rows=rows,
        not_looked_at=(
            "what random numbers, other settings and code outside of the recorded steps have done",
        ),
        ask_next=tuple(text.format(late=found.late[0]) for text in following),
    )
