"""What is known of a script's objects for as long as they live: nothing that is noted here keeps one of them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

V = TypeVar("V")


class Living(Generic[V]):
    """A dict by the objects themselves, whatever they say they are equal to; who dies is gone from it.

    >>> class Model: pass
    >>> model, names = Model(), Living()
    >>> names[model] = "encoder"
    >>> names.get(model), len(names)
    ('encoder', 1)
    >>> del model
    >>> len(names)
    0
    """

    def __init__(self, entries: Iterable[tuple[Any, V]] = ()) -> None:
        # an id is free for another object only after the callback of the reference has run
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}
        for thing, value in entries:
            self[thing] = value

    def __setitem__(self, thing: Any, value: V) -> None:
        key, entries = id(thing), self._entries
        known = entries.get(key)
        # called with the reference, which pop takes for its default
        reference = weakref.ref(thing, partial(entries.pop, key)) if known is None else known[0]
        entries[key] = (reference, value)

    def __getitem__(self, thing: Any) -> V:
        return self._entries[id(thing)][1]

    def get(self, thing: Any, default: Any = None) -> Any:
        entry = self._entries.get(id(thing))
        return default if entry is None else entry[1]

    def setdefault(self, thing: Any, value: V) -> V:
        if thing not in self:
            self[thing] = value
        return self[thing]

    def pop(self, thing: Any, default: Any = None) -> Any:
        entry = self._entries.pop(id(thing), None)
        return default if entry is None else entry[1]

    def clear(self) -> None:
        self._entries.clear()

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> list[tuple[Any, V]]:
        """Those that live now, in the order in which they came."""
        entries = list(self._entries.values())
        return [(thing, value) for reference, value in entries if (thing := alive(reference)) is not None]

    def values(self) -> list[V]:
        return [value for _, value in list(self._entries.values())]

    def __iter__(self) -> Iterator[Any]:
        return iter([thing for thing, _ in self.items()])


def alive(reference: weakref.ref[Any]) -> Any:
    """What a weak reference refers to, or None; PyTorch wants to hear of a tensor that is taken up again."""
    thing = reference()
    if isinstance(thing, Tensor) and hasattr(thing, "_fix_weakref"):
        thing._fix_weakref()
    return thing
