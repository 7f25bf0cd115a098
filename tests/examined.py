"""Writes what an examination says about itself beside a run, without examining anything."""

import json

from gradproof.experiments.table import QUESTIONS

STEPS = (0, 1, 2, 3, 10, 30)


def write_examination(path, steps=STEPS, limit=None, without=(), ended=True, **outcomes):
    """Every question of the table asked of every step: `name=(outcome, reason)`, silence for the others.

    `without` are questions that were never reached.
    """
    asked = [question for question in QUESTIONS if question.name not in without]
    lines = [{"event": "table", "questions": [question.as_data() for question in QUESTIONS]}]
    for step in steps:
        lines.append({"event": "specimen", "step": step, "operations": 100})
        for question in asked:
            outcome, reason = outcomes.get(question.name, ("nothing", ""))
            said = {"question": question.name, "step": step, "outcome": outcome, "reason": reason}
            lines.append({"event": "asked", **said, "seconds": 0.01})
    if ended:
        left = len(QUESTIONS) - len(asked)
        lines.append({"event": "examination_ended", "limit": limit, "left": left})
    with open(path / "examination.jsonl", "a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return path
