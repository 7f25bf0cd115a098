"""The one door through which what was written comes in: JSON with bounds, and shapes that say what it has to be.

A shape is a function: it returns the value as it may be used, or raises Damaged. What passes has the types that readers
count on, numbers that fit, and text that can be printed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradproof.errors import plain
from gradproof.files import NotAFile, read_file

Shape = Callable[[Any], Any]

LARGEST_JSON = 64 << 20  # bytes of run.json, or of one line of events
MOST_PARTS = 4_000_000  # values in it: what 64 MB of the shortest ones would make of memory
DEEPEST = 32
LONGEST_NAME, LONGEST_TEXT = 20_000, 200_000  # characters; what is longer is cut
LARGEST_WHOLE = 1 << 53  # a step beyond it is no step, and no longer exact as a float
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # as the writers spell them


class Damaged(ValueError):
    """What was read is not what belongs there: the reason in a few words."""


def parse_json(data: bytes | str) -> Any:
    """The value of standard JSON of a bounded size."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    if len(text) > LARGEST_JSON:
        raise Damaged(f"it has more than {LARGEST_JSON >> 20} MB")
    if sum(map(text.count, ",[{")) > MOST_PARTS:
        raise Damaged(f"it has more than {MOST_PARTS:,} values")
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise Damaged("it is nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"it is no JSON: {plain(str(error))}") from None


def read_json(file: str | os.PathLike, most: int = LARGEST_JSON) -> Any:
    """What a JSON file of ours holds; Damaged if it is none, FileNotFoundError if there is nothing."""
    try:
        return parse_json(read_file(file, most))
    except NotAFile as error:
        raise Damaged(str(error)) from None


def _refuse(word: str) -> Any:
    raise Damaged(f"{word} is no JSON")


# shapes --------------------------------------------------------------------------------------------------------


def anything(value: Any, depth: int = 0) -> Any:
    """Plain data of any form, no deeper and no larger than can be carried on."""
    if depth > DEEPEST:
        raise Damaged("it is nested too deeply")
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {name(key): anything(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [anything(part, depth + 1) for part in value]
    return value if value is None or isinstance(value, bool) else number(value)


def text(value: Any) -> str:
    """Words, of several lines perhaps."""
    if not isinstance(value, str):
        raise Damaged("it is no text")
    return plain(_cut(value, LONGEST_TEXT), lines=True)


def name(value: Any) -> str:
    """Words in one line: a name, a place."""
    if not isinstance(value, str):
        raise Damaged("it is no name")
    if len(value) <= LONGEST_NAME and value.isprintable():
        return value
    return plain(_cut(value, LONGEST_NAME))


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else value[:most] + "…"


def number(value: Any) -> float:
    """A number; nan and inf are spelled as words in JSON."""
    if isinstance(value, str) and value in NOT_FINITE:
        return NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Damaged("it is no number")
    if isinstance(value, int) and abs(value) >= 1 << 64:  # a hash has 64 bits
        raise Damaged("it is too large a number")
    return value


def finite(value: Any) -> float:
    found = number(value)
    if not math.isfinite(found):
        raise Damaged("it is no finite number")
    return found


def whole(value: Any) -> int:
    """A count, a step, a size: 0, 1, 2, …"""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_WHOLE:
        raise Damaged("it is no whole number")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Damaged("it is neither true nor false")
    return value


def one_of(words: Iterable[str]) -> Shape:
    known = frozenset(words)

    def shape(value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise Damaged("it is none of the words that are known")
        return value

    return shape


def maybe(inner: Shape) -> Shape:
    """The shape, or null."""
    return lambda value: None if value is None else inner(value)


def list_of(inner: Shape, fewest: int = 0, most: int = MOST_PARTS) -> Shape:
    def shape(value: Any) -> Any:
        if not isinstance(value, list) or not fewest <= len(value) <= most:
            raise Damaged("it is no list of the right length")
        return [inner(part) for part in value]

    return shape


def pair_of(first: Shape, second: Shape) -> Shape:
    def shape(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != 2:
            raise Damaged("it is no pair")
        return [first(value[0]), second(value[1])]

    return shape


def map_of(inner: Shape) -> Shape:
    """An object whose keys are names."""

    def shape(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Damaged("it is no object")
        return {name(key): inner(part) for key, part in value.items()}

    return shape


def record(required: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """An object with keys of its own; those that are not known here may hold anything."""
    known = {**(optional or {}), **required}

    def shape(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Damaged("it is no object")
        for key in required:
            if key not in value:
                raise Damaged(f"it has no {key}")
        found = {}
        for key, part in value.items():
            inner = known.get(key)
            try:
                if inner is not None:
                    found[key] = inner(part)
                else:
                    found[name(key)] = anything(part)
            except Damaged as error:
                raise Damaged(f"{plain(key)[:40]}: {error}") from None
        return found

    return shape


def with_words(*keys: str) -> Callable[[Shape], Shape]:
    """Of a record: words that are not always noted, empty where they were not."""

    def wrap(inner: Shape) -> Shape:
        return lambda value: {**dict.fromkeys(keys, ""), **inner(value)}

    return wrap


def same_length(*keys: str) -> Callable[[Shape], Shape]:
    """Of a record: lists that belong together have as many entries."""

    def wrap(inner: Shape) -> Shape:
        def shape(value: Any) -> Any:
            found = inner(value)
            if len({len(found[key]) for key in keys}) > 1:
                raise Damaged(f"{' and '.join(keys)} are not of one length")
            return found

        return shape

    return wrap
