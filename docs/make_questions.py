"""Writes docs/questions.md: every question that a taped step can be asked, from the one table of them.

python docs/make_questions.py
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent / "questions.md"

INTRODUCTION = """A taped step is asked these questions. Each says beforehand what it can decide, what it costs and
what it needs; suspicion and cost decide the order, and the report says what was asked and what was not.

**Core** questions are those without whose answers gradproof does not say that nothing is wrong: every
[family of causes](causes/index.md) that a tape can decide has at least one. A question that wants several steps says
nothing before it has seen as many as the last column tells; after that, silence is an answer."""

HEADINGS = {
    "read": ("Read off the tape", "Nothing is computed again."),
    "replay": ("Replayed", "The forward pass, or the part of it that matters, once or a few times."),
    "differentiate": ("Differentiated", "Forward and backward again, where it matters in float64."),
    "train": ("Trained further", "A few dozen steps on copies of the weights."),
}


def render() -> str:
    from gradproof.experiments.table import COSTS, QUESTIONS

    core = sum(question.core for question in QUESTIONS)
    parts = ["# Questions", f"{len(QUESTIONS)} questions, {core} of them core.", INTRODUCTION]
    for cost in COSTS:
        title, words = HEADINGS[cost]
        rows = [render_row(question) for question in QUESTIONS if question.cost == cost]
        head = ["| question | can decide | needs | steps |", "|---|---|---|---|"]
        parts += [f"## {title}", words, "\n".join([*head, *rows])]
    return "\n\n".join(parts) + "\n"


def render_row(question) -> str:
    from gradproof.experiments.table import NEEDS

    sentence = f"**{question.sentence}** core" if question.core else question.sentence
    causes = "<br>".join(link(cause) for cause in question.causes)
    needs = ", ".join(NEEDS[need] for need in question.needs)
    return f"| {sentence}<br>`{question.name}` | {causes} | {needs} | {question.enough} |"


def link(cause: str) -> str:
    return f"[{cause}](causes/{cause.partition('/')[0]}.md)"


if __name__ == "__main__":
    PAGE.write_text(render())
