"""Sees which rows of a data set shuffled loaders draw for training, and how many different ones that makes.

A generator that is seeded anew for each epoch, in which only some batches are drawn, gives the same few rows always.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from linecache import getlines
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gradproof.probes.guard import quietly
from gradproof.probes.names import own_frames
from gradproof.probes.session import Session

MOST_SETS = 8
MOST_ROWS = 200_000  # that are remembered of a data set
FEWEST = 3  # passes over the data set, before it is said


def rows(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Counts the rows that each pass of a shuffled loader draws, as long as it is a training that draws them."""
    make, begin, draw = DataLoader.__init__, _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._next_index
    places: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
    passes: weakref.WeakKeyDictionary[Any, Rows] = weakref.WeakKeyDictionary()
    known: dict[int, Rows] = {}

    @functools.wraps(make)
    def init(self: DataLoader, *args: Any, **kwargs: Any) -> None:
        with quietly():  # a place is not worth a training
            frame = next(own_frames())
            places[self] = (frame.f_code.co_filename, frame.f_lineno)
        make(self, *args, **kwargs)

    @functools.wraps(begin)
    def __init__(self: Any, loader: DataLoader) -> None:
        begin(self, loader)
        with quietly():
            if session.alive and isinstance(getattr(loader.batch_sampler, "sampler", None), RandomSampler):
                seen = rows_of(known, loader.dataset)
                if seen is not None:
                    seen.begin(places.get(loader))
                    passes[self] = seen

    @functools.wraps(draw)
    def _next_index(self: Any) -> Any:
        found = draw(self)
        began = time.perf_counter()
        with quietly():
            seen = passes.get(self)
            if seen is not None and seen.note(found, session.step):
                session.facts.setdefault("rows", {})[seen.name] = seen.describe(session.step)
        session.own_seconds += time.perf_counter() - began
        return found

    for owner, name, wrapper, original in (
        (DataLoader, "__init__", init, make),
        (_BaseDataLoaderIter, "__init__", __init__, begin),
        (_BaseDataLoaderIter, "_next_index", _next_index, draw),
    ):
        setattr(owner, name, wrapper)
        stack.callback(setattr, owner, name, original)


def rows_of(known: dict[int, Rows], data: Any) -> Rows | None:
    """What is known of a data set, if it is one of the first few; it is not kept alive."""
    found = known.get(id(data))
    if found is None or found.data() is not data:
        if len(known) >= MOST_SETS and found is None:
            return None
        found = known[id(data)] = Rows(data, len(known))
    return found


class Rows:
    """The rows of one data set that were drawn, over all passes."""

    def __init__(self, data: Any, number: int) -> None:
        self.data = weakref.ref(data)
        self.name = f"{type(data).__name__} {number}"
        self.size = len(data)
        self.distinct: set[int] = set()
        self.passes = self.drawn = self.in_this_pass = 0
        self.left = 1.0  # of the rows, had each pass before this one been shuffled on its own
        self.batches = self.trained = 0  # trained: batches between which an optimizer stepped
        self.place: tuple[str, int] | None = None
        self._step = -1

    def begin(self, place: tuple[str, int] | None) -> None:
        self.left *= max(0.0, 1 - self.in_this_pass / self.size)
        self.passes, self.in_this_pass = self.passes + 1, 0
        self.place = place or self.place
        self._step = -1

    def note(self, found: Any, step: int) -> bool:
        """Count a batch; whether it is time to say what is known."""
        batch = found if isinstance(found, list) else [found]
        if len(self.distinct) > MOST_ROWS:
            return False
        self.distinct.update(batch)
        self.drawn, self.in_this_pass = self.drawn + len(batch), self.in_this_pass + len(batch)
        self.batches += 1
        self.trained += self._step not in (-1, step)
        self._step = step
        return self.passes >= FEWEST

    def describe(self, step: int) -> dict[str, Any]:
        left = self.left * max(0.0, 1 - self.in_this_pass / self.size)
        return {
            "size": self.size,
            "drawn": self.drawn,
            "distinct": len(self.distinct),
            "expected": self.size * (1 - left),
            "passes": self.passes,
            # a validation draws many batches between two steps, or does not come with every step
            "trains": self.trained >= 0.2 * self.batches or self.batches == self.passes >= 0.9 * max(step, 1),
            "line": seeding_line(*self.place) if self.place is not None else "",
        }


@functools.lru_cache(maxsize=16)
def seeding_line(file: str, number: int) -> str:
    """The line that seeds: of the statement that makes the loader, or the innermost of its file; or that statement."""
    text = getlines(file)
    depth, inside = 0, []
    for i in range(number, len(text) + 1):
        inside.append(i)
        depth += sum(text[i - 1].count(c) for c in "([{") - sum(text[i - 1].count(c) for c in ")]}")
        if depth <= 0:
            break
    seeds = [i for i, line in enumerate(text, 1) if "manual_seed(" in line.partition("#")[0]]
    near = [i for i in seeds if i in inside]
    deepest = sorted(seeds, key=lambda i: len(text[i - 1]) - len(text[i - 1].lstrip()))
    chosen = (near or deepest[-1:] or [number])[0]
    return f"{file.rsplit('/', 1)[-1]}:{chosen}"
