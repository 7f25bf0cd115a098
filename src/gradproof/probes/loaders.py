"""Sees which rows each loader handed out last, so that an experiment can tell whether two loaders go together.

Of each batch a few numbers are kept by which it is found again on the tape. Where workers read ahead, the rows of a
batch are those that were sent out under its number.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterating
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as WithWorkers

from gradproof.probes.guard import quietly
from gradproof.probes.session import Session
from gradproof.probes.sources import sources_of, split_of
from gradproof.tape.modes import unseen_by_modes

MOST = 6  # loaders that are remembered, those that were read last
NUMBERS = 2048  # of a batch


@dataclass(frozen=True)
class Fetched:
    """What a loader handed out last."""

    rows: tuple[int, ...]
    length: int  # of its data set
    samples: tuple[tuple[tuple[int, ...], Tensor], ...]  # shape and some numbers of each tensor
    line: str
    name: str = ""  # the data set's class
    split: str = ""  # train, test, …, where it says so
    sources: tuple[str, ...] = ()  # files or parts that the rows lie in
    places: tuple[tuple[int, int], ...] = ()  # of each row: which source, and its number there


def loaders(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Only while a step is taped: nobody else asks."""
    read, draw, receive = fetch._MapDatasetFetcher.fetch, Iterating._next_index, WithWorkers._next_data
    sent: weakref.WeakKeyDictionary[Any, dict[int, list]] = weakref.WeakKeyDictionary()

    def note(reader: Any, rows: Any, data: Any, batch: Any) -> None:
        if not session.alive or session.taping is None or not session.taping.active:
            return
        began = time.perf_counter()
        with quietly(), unseen_by_modes():
            if torch.utils.data.get_worker_info() is None and isinstance(rows, list):
                known: dict[int, Fetched] = session.facts.setdefault("_fetched", {})
                known.pop(id(reader), None)
                known[id(reader)] = describe(rows, data, batch)
                while len(known) > MOST:
                    known.pop(next(iter(known)))
        session.own_seconds += time.perf_counter() - began

    @functools.wraps(read)
    def fetch_batch(self: Any, rows: Any) -> Any:
        batch = read(self, rows)
        note(self, rows, self.dataset, batch)
        return batch

    @functools.wraps(draw)
    def _next_index(self: Any) -> Any:
        rows = draw(self)
        if isinstance(self, WithWorkers) and getattr(self, "_in_order", True):
            sent.setdefault(self, {})[self._send_idx] = rows
        return rows

    @functools.wraps(receive)
    def _next_data(self: Any) -> Any:
        batch = receive(self)
        rows = sent.get(self, {}).pop(self._rcvd_idx - 1, None)
        if rows is not None:
            note(self, rows, self._dataset, batch)
        return batch

    for owner, name, wrapper, original in (
        (fetch._MapDatasetFetcher, "fetch", fetch_batch, read),
        (Iterating, "_next_index", _next_index, draw),
        (WithWorkers, "_next_data", _next_data, receive),
    ):
        setattr(owner, name, wrapper)
        stack.callback(setattr, owner, name, original)


def describe(rows: list, data: Any, batch: Any) -> Fetched:
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() and part.is_cpu]
    samples = tuple((tuple(part.shape), some_numbers(part)) for part in tensors)
    numbers = tuple(int(row) for row in rows)
    found = Fetched(numbers, len(data), samples, reading_line(), type(data).__name__)
    with quietly():  # of a data set that is unlike others, the rows are known at least
        sources, places = sources_of(data, numbers)
        found = replace(found, split=split_of(data), sources=sources, places=places)
    return found


def some_numbers(value: Tensor) -> Tensor:
    """Every so many of a tensor's numbers, the same for the same tensor wherever it is."""
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NUMBERS)].double().cpu().clone()


def reading_line() -> str:
    """The line of the script that asked for a batch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in ("torch", "gradproof"):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
