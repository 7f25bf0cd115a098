"""What a question has said of a family, and still says after its next verdict."""

from __future__ import annotations

from typing import Any


def standing(before: list[dict[str, Any]], event: dict[str, Any]) -> list[dict[str, Any]]:
    """What stands after one more verdict; `before` itself where it changes nothing.

    What is said of a later step replaces all that was said of earlier ones, but for what lasts, whichever was asked
    first: of a long training the newest steps are. A step may show several causes.

    >>> one = {"verdict": "confirmed", "id": "a/x", "step": 1, "lasting": False}
    >>> other = {**one, "id": "a/y"}
    >>> [v["id"] for v in standing([one], other)], [v["id"] for v in standing([one], {**other, "step": 2})]
    (['a/x', 'a/y'], ['a/y'])
    >>> [v["id"] for v in standing([{**one, "lasting": True}], {"verdict": "excluded", "step": 2})]
    ['a/x']
    >>> [v["id"] for v in standing([{**other, "step": 9}], one)]
    ['a/y']
    """
    if all((said.get("step") or 0) <= (event.get("step") or 0) for said in before):
        return _then(before, event)
    found: list[dict[str, Any]] = []
    for said in sorted([*before, event], key=lambda said: said.get("step") or 0):
        found = _then(found, said)
    return before if found == before else found


def _then(before: list[dict[str, Any]], event: dict[str, Any]) -> list[dict[str, Any]]:
    """What stands after a verdict on the same step, or a later one."""
    sure = [said for said in before if said["verdict"] == "confirmed"]
    kept = [said for said in sure if said.get("lasting") or said.get("step") == event.get("step")]
    known = any(said.get("lasting") and said.get("id") == event.get("id") for said in kept)
    if known or (kept and event["verdict"] != "confirmed"):
        return before
    if sure and event["verdict"] == "undecided":
        return before  # that a later step cannot tell takes nothing from what an earlier one has shown
    return [*(said for said in kept if said.get("id") != event.get("id")), event]
