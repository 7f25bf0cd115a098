"""What came of asking a corpus, as tables: run by run, question by cause, question by question, and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradproof.faults.scoreboard import Score

NAMED = 8  # runs that a cell names
CHEAP = 1.0  # seconds that a question took in all


@dataclass(frozen=True)
class Answered:
    """One run of the corpus: how its diagnosis did, and the events of its examination."""

    score: Score
    right: frozenset[str]  # families that describe it truly; empty for a healthy one
    causes: list[dict[str, Any]]
    events: list[dict[str, Any]]

    def asked(self, question: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e.get("event") == "asked" and e.get("question") == question]

    def confirmed(self) -> Iterable[tuple[str, str]]:
        """Question and family of all that stands confirmed, and is more than a note.

        What counts only in a run that shows trouble does not count in a healthy one.
        """
        last = {(e.get("experiment"), e.get("family")): e for e in self.events if e.get("event") == "verdict"}
        for (question, family), verdict in last.items():
            excused = not self.right and verdict.get("if_troubled")
            if verdict.get("verdict") == "confirmed" and verdict.get("level") != "note" and not excused:
                yield str(question), str(family)


def render(answered: list[Answered], complaints: list[str], seconds: float) -> str:
    """All tables, as Markdown."""
    parts = ["## In all", "\n".join(f"- {line}" for line in totals(answered, seconds))]
    if complaints:
        parts += ["## Not counted", "\n".join(f"- {line}" for line in complaints)]
    if answered:
        parts += ["## Questions and causes", CELLS, confusion(answered)]
        parts += ["## Questions", questions(answered), "## Runs", runs(answered)]
    return "\n\n".join(parts) + "\n"


def totals(answered: list[Answered], seconds: float) -> list[str]:
    faults = [each.score for each in answered if each.right]
    healthy = [each for each in answered if not each.right]
    placed = [score.place for score in faults if score.place is not None]
    accused = [each.score.name for each in healthy if not each.score.top1]
    warnings = sum(cause["level"] == "warning" for each in healthy for cause in each.causes)
    missed = [f"{score.name} said {score.said}" for score in faults if not score.top1]
    asked = sum(score.seconds for score in (each.score for each in answered))
    return [
        f"top-1: {sum(score.top1 for score in faults)} of {len(faults)}{_named(missed)}",
        f"top-3: {sum(score.top3 for score in faults)} of {len(faults)}",
        f"places: {sum(placed)} of {len(placed)}",
        f"healthy accused: {len(accused)} of {len(healthy)}{_named(accused)}",
        f"warnings a healthy run: {warnings / max(1, len(healthy)):.2f}",
        f"{asked:.0f} s of answers, {seconds:.0f} s of this command",
    ]


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f" ({'; '.join(names[:NAMED])}{more})" if names else ""


CELLS = (
    "How many runs of a cause had what a question confirmed: `3` a cause that was planted there, `+2` another one. "
    "In the column of the healthy runs all are false."
)


def confusion(answered: list[Answered]) -> str:
    """Questions that confirmed something, by the cause that was planted."""
    right: Counter[tuple[str, str]] = Counter()
    other: Counter[tuple[str, str]] = Counter()
    for each in answered:
        families: dict[str, set[str]] = {}
        for question, family in each.confirmed():
            families.setdefault(question, set()).add(family)
        for question, said in families.items():
            right[question, each.score.family] += bool(said & each.right)
            other[question, each.score.family] += bool(said - each.right)
    rows = _sorted_by_trouble({question for question, _ in right}, right, other)
    planted = dict.fromkeys(each.score.family for each in answered)
    columns = [family for family in planted if any(right[row, family] or other[row, family] for row in rows)]
    lines = [["question", *columns], ["---"] * (1 + len(columns))]
    lines += [[row, *(_cell(right[row, column], other[row, column]) for column in columns)] for row in rows]
    return _table(lines)


def _sorted_by_trouble(
    found: set[str], right: Counter[tuple[str, str]], other: Counter[tuple[str, str]]
) -> list[str]:
    """Those that accuse the healthy first, then those that name other causes."""

    def trouble(question: str) -> tuple[int, int, str]:
        wrong = sum(count for (name, _), count in other.items() if name == question)
        return -other[question, "healthy"], -wrong, question

    return sorted(found, key=trouble)


def _cell(right: int, other: int) -> str:
    return " ".join(([str(right)] if right else []) + ([f"+{other}"] if other else []))


def questions(answered: list[Answered]) -> str:
    """What each question cost, and where it failed, could not decide, or confirmed what was not there."""
    head = ["question", "seconds", "asked", "undecided", "failed", "false"]
    head += ["false on healthy runs", "false on faults", "failures"]
    rows = []
    for question in {e["question"] for each in answered for e in each.events if e.get("event") == "asked"}:
        asked = [(each.score.name, event) for each in answered for event in each.asked(question)]
        outcomes = Counter(event.get("outcome") for _, event in asked)
        healthy = _false(answered, question, lambda each: not each.right)
        others = _false(answered, question, lambda each: bool(each.right))
        failed = [(name, event) for name, event in asked if event.get("outcome") == "failed"]
        failures = dict.fromkeys(f"{name}: {event.get('reason', '')}" for name, event in failed)
        rows.append([
            question, f"{sum(event.get('seconds', 0.0) for _, event in asked):.1f}",
            *(str(count) for count in (len(asked) - outcomes["not asked"], outcomes["undecided"], outcomes["failed"])),
            str(len(healthy) + len(others)), _listed(healthy), _listed(others), _listed(list(failures), 2),
        ])  # fmt: skip
    rows.sort(key=lambda row: (-len(row[6]), -float(row[1])))
    quiet = [row for row in rows if float(row[1]) < CHEAP and not any(row[6:])]
    shown = _table([head, ["---"] * len(head), *(row for row in rows if row not in quiet)])
    return (
        f"{shown}\n\n{len(quiet)} more took less than {CHEAP:g} s each, and confirmed nothing false."
        if quiet
        else shown
    )


def _false(answered: list[Answered], question: str, chosen: Any) -> list[str]:
    """Runs of which a question confirmed what is not planted there, with what it said."""
    return [
        f"{each.score.name} {family}"
        for each in answered
        if chosen(each)
        for name, family in each.confirmed()
        if name == question and family not in each.right
    ]


def _listed(names: list[str], most: int = NAMED) -> str:
    return "; ".join(names[:most]) + (f"; {len(names) - most} more" if len(names) > most else "")


def runs(answered: list[Answered]) -> str:
    head = ["run", "cause", "said first", "1st", "in 3", "place", "seconds"]
    rows = [
        [s.name, s.family, s.said, _mark(s.top1), _mark(s.top3), _mark(s.place), f"{s.seconds:.1f}"]
        for s in (each.score for each in answered)
    ]
    return _table([head, ["---"] * len(head), *rows])


def _mark(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "no"


def _table(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
