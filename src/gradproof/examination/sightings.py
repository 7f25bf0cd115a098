"""How often the same was seen: what one step shows may be chance, and some causes are said only when several do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradproof.experiments.table import Question

Key = tuple[str, str, str]  # question, id, where


class Sightings:
    """Counts what questions confirm, by id and place; an exclusion by the same question starts the count again.

    >>> from gradproof.experiments.table import BY_NAME
    >>> seen = {"verdict": "confirmed", "family": "bad-init", "id": "bad-init/symmetric", "where": "fc"}
    >>> question, sightings = BY_NAME["are_units_all_the_same"], Sightings()
    >>> [sightings.hear(question, [seen])[0][0]["verdict"] for _ in range(2)]
    ['undecided', 'confirmed']
    """

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}

    def remember(self, event: dict[str, Any]) -> None:
        """What an earlier examination wrote."""
        key = (event.get("question", ""), event.get("id", ""), event.get("where") or "")
        self._counts[key] = int(event.get("times") or 0)

    def hear(
        self, question: Question, verdicts: Iterable[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The verdicts of one step as they may be said, and the counts that have changed, as `seen` events."""
        verdicts = list(verdicts)
        here = {_key(question, verdict) for verdict in verdicts if verdict["verdict"] == "confirmed"}
        said: list[dict[str, Any]] = []
        changed: list[dict[str, Any]] = []
        for verdict in verdicts:
            times = question.times_of(verdict.get("id", ""))
            if verdict["verdict"] == "excluded":
                changed += self._forget(question, verdict, here)
            elif verdict["verdict"] == "confirmed" and times > 1:
                key = _key(question, verdict)
                self._counts[key] = count = self._counts.get(key, 0) + 1
                changed.append(_event(key, count))
                if count < times:
                    verdict = _not_yet(verdict, count, times)
            said.append(verdict)
        sure = {verdict["family"] for verdict in said if verdict["verdict"] == "confirmed"}
        # beside what is certain, what was seen once elsewhere does not count
        return [v for v in said if v["verdict"] != "undecided" or v["family"] not in sure], changed

    def _forget(self, question: Question, verdict: dict[str, Any], kept: set[Key]) -> list[dict[str, Any]]:
        """An exclusion clears its id, or its whole family, but nothing that the same step shows."""
        gone = [
            key
            for key, count in self._counts.items()
            if count
            and key[0] == question.name
            and key[1].partition("/")[0] == verdict["family"]
            and verdict.get("about") in ("", None, key[1])
            and key not in kept
        ]
        self._counts.update(dict.fromkeys(gone, 0))
        return [_event(key, 0) for key in gone]


def _key(question: Question, verdict: dict[str, Any]) -> Key:
    return question.name, verdict["id"], verdict.get("where") or ""


def _event(key: Key, times: int) -> dict[str, Any]:
    return {"question": key[0], "id": key[1], "where": key[2], "times": times}


def _not_yet(verdict: dict[str, Any], count: int, times: int) -> dict[str, Any]:
    place = f" ({verdict['where']})" if verdict.get("where") else ""
    reason = f"{verdict['id']}{place} was seen at {count} of {times} steps"
    return {**verdict, "verdict": "undecided", "id": "", "evidence": [], "reason": reason}
