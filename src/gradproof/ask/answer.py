"""What every question comes back with: a sentence, numbers, a place, how sure, what was left out, what to ask next.

For a person and for a program alike, and of a bounded size: a long list ends in a cursor. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gradproof.errors import plain
from gradproof.record.schema import json_line

VERSION = 1  # of schemas/answer.json
MOST = 4_000  # characters of an answer as JSON: about 1,000 tokens
LONGEST = 240  # characters of one text
# what a confidence means: proven by replaying or in float64; measured: read off the record; likely: suggested by it
CONFIDENCES = ("proven", "measured", "likely", "possible", "undecided")

Row = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """`rows` is the one long list of an answer; `cursor` says where the next call goes on, None at its end."""

    question: str
    sentence: str
    confidence: str
    run: str = ""
    step: int | None = None
    of: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    place: str | None = None
    rows: tuple[Row, ...] = ()
    not_looked_at: tuple[str, ...] = ()
    ask_next: tuple[str, ...] = ()
    cursor: int | None = None
    seconds: float = 0.0

    def as_data(self) -> dict[str, Any]:
        data = {part.name: getattr(self, part.name) for part in fields(self)}
        return json.loads(json_line({"schema": f"gradproof/answer/{VERSION}", **cleaned(data)}))

    def __str__(self) -> str:
        return render(self)


def cleaned(value: Any, longest: int = LONGEST) -> Any:
    """Text that came out of a run as harmless data: control characters spelt out, no text longer than some."""
    if isinstance(value, str):
        text = plain(value)
        return text if len(text) <= longest else text[: longest - 1] + "…"
    if isinstance(value, dict):
        return {cleaned(str(key), 80): cleaned(part, longest) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(part, longest) for part in value]
    return value


def bounded(answer: Answer, start: int = 0, most: int = MOST) -> Answer:
    """The answer with the rows from `start` on that fit; what does not is behind the cursor."""
    answer = replace(
        answer, not_looked_at=answer.not_looked_at[:6], ask_next=answer.ask_next[:4], sentence=answer.sentence
    )
    rest = answer.rows[start:]
    taken = len(json_line(replace(answer, rows=()).as_data()))
    kept: list[Row] = []
    for row in rest:
        taken += len(json_line(cleaned(row))) + 2
        if kept and taken > most:
            break
        kept.append(row)
    end = start + len(kept)
    return replace(answer, rows=tuple(kept), cursor=end if end < len(answer.rows) else None)


def render(answer: Answer) -> str:
    """For a terminal."""
    data = answer.as_data()
    lines = [data["sentence"]]
    step = f"step {data['step']}, " if data["step"] is not None else ""
    lines.append(f"  ({step}{data['confidence']})")
    if data["place"]:
        lines.append(f"  at      {data['place']}")
    lines += [f"  {name}: {say(value)}" for name, value in data["numbers"].items()]
    for group in alike(data["rows"]):
        lines += table(group)
    if data["cursor"] is not None:
        lines.append(f"  … more: --cursor {data['cursor']}")
    lines += [f"  not looked at: {text}" for text in data["not_looked_at"]]
    lines += [f"  next    {text}" for text in data["ask_next"]]
    return "\n".join(lines) + "\n"


def say(value: Any) -> str:
    """
    >>> say(0.123456789), say([1, 2.5]), say(True)
    ('0.1235', '1, 2.5', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(say, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {say(part)}" for key, part in value.items())
    return "–" if value is None else str(value)


def alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in groups of the same columns."""
    found: list[list[Row]] = []
    for row in rows:
        if not found or found[-1][0].keys() != row.keys():
            found.append([])
        found[-1].append(row)
    return found


def table(rows: Sequence[Row]) -> list[str]:
    names = list(rows[0])
    cells = [names, *([say(row[name]) for name in names] for row in rows)]
    widths = [min(60, max(len(line[i]) for line in cells)) for i in range(len(names))]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    ]
