"""A question of the examination as an answer: what its verdicts say, in the form that all answers have."""

from __future__ import annotations

from typing import Any

from gradproof.ask.answer import Answer
from gradproof.diagnosis.causes import BY_FAMILY
from gradproof.errors import UserError
from gradproof.experiments.table import Question


def answer_of(question: Question, said: dict[str, Any], steps: list[int]) -> Answer:
    if "error" in said:
        raise UserError(
            f"{question.name} could not be answered: {said['error']} (at {said.get('place', '?')})"
        )
    if "later" in said:
        raise UserError(f"{question.name} could not be answered: {said['later']}")
    looked = {"looked_at_steps": steps}
    if "not_asked" in said:
        return Answer(
            question.name, f"{question.sentence} It {said['not_asked']}.", "undecided", numbers=looked
        )
    verdicts = said["verdicts"]
    if not verdicts:
        text = f"{question.sentence} Nothing was seen that speaks against it."
        less = enough(question, steps)
        return Answer(
            question.name, text, "undecided" if less else "likely", numbers=looked, not_looked_at=less
        )
    first = min(verdicts, key=lambda verdict: ORDER[verdict["verdict"]])
    rows = tuple(
        {
            "verdict": v["verdict"],
            "cause": v["id"] or v["about"] or v["family"],
            "why": v["reason"] or "; ".join(v["evidence"]),
        }
        for v in verdicts
    )
    advice = first["fix"] or (BY_FAMILY[first["family"]].advice(first["id"]) if first["id"] else "")
    whole = all_of_it(question, verdicts)
    sure = {"confirmed": first["confidence"] or "likely", "excluded": "proven" if whole else "likely"}
    return Answer(
        question.name,
        f"{question.sentence} {say(first, whole)}",
        sure.get(first["verdict"], "undecided"),
        place=first["where"],
        numbers={**looked, **first["numbers"]},
        rows=rows,
        not_looked_at=enough(question, steps),
        ask_next=(advice,) if advice else (),
    )


ORDER = {"confirmed": 0, "undecided": 1, "excluded": 2}


def say(verdict: dict[str, Any], whole: bool) -> str:
    if verdict["verdict"] == "confirmed":
        return f"No: {verdict['id']}: {(verdict['evidence'] or ['confirmed'])[0]}."
    if verdict["verdict"] == "undecided":
        return f"Undecided: {verdict['reason']}."
    if whole:
        return f"Yes, as far as this goes: {verdict['reason']}."
    ruled_out = verdict["about"] or verdict["family"]
    return f"Nothing was seen that speaks against it; measured and ruled out is {ruled_out}: {verdict['reason']}."


def all_of_it(question: Question, verdicts: list[dict[str, Any]]) -> bool:
    """Whether what was ruled out is all that the question can decide, and not a part of it."""
    out = {verdict["about"] or verdict["family"] for verdict in verdicts if verdict["verdict"] == "excluded"}
    return all(cause in out or cause.partition("/")[0] in out for cause in question.causes)


def enough(question: Question, steps: list[int]) -> tuple[str, ...]:
    if len(steps) >= question.enough:
        return ()
    return (f"it wants {question.enough} recorded steps before silence means anything, and saw {len(steps)}",)
