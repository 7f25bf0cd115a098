"""Sees whether the forked workers of a loader draw the same random numbers, each for samples of its own.

A worker writes one number for the state of each generator into memory that it shares with the script, before its
first batch and before its second. Nothing is drawn, and nothing is sent.
"""

from __future__ import annotations

import functools
import mmap
import random
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import fetch
from torch.utils.data._utils import worker as workers
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as WithWorkers

from gradproof.probes.guard import quietly
from gradproof.probes.loaders import reading_line
from gradproof.probes.prints import states_of_generators
from gradproof.probes.replacing import replace
from gradproof.probes.session import Session
from gradproof.tape.living import Living

KINDS = ("torch", "numpy", "python", "its own")
LOOKS = 2  # before the first batch and before the second: what has changed in between was drawn from
MOST = 4  # iterators that are looked at
MOST_WORKERS = 64


@dataclass
class Looked:
    """What the workers of one iterator have written so far, and how many batches have come."""

    states: np.ndarray  # (workers, LOOKS, KINDS); 0: nothing yet
    line: str
    batches: int = 0


def worker_draws(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Only maps from a number to a sample: workers that share out one stream may well draw alike to do so."""
    starting: list[Looked] = []  # the iterator whose workers are being forked
    waiting: Living[Looked] = Living()
    left = iter(range(MOST))

    def begin(original: Callable) -> Callable:
        def __init__(self: Any, loader: Any) -> None:
            several = 1 < loader.num_workers <= MOST_WORKERS and hasattr(loader.dataset, "__getitem__")
            if several and session.alive and next(left, None) is not None:
                with quietly():
                    starting.append(Looked(shared_memory(loader.num_workers), reading_line()))
            try:
                original(self, loader)
                with quietly():
                    if starting:
                        waiting[self] = starting[0]
            finally:
                starting.clear()

        return __init__

    def work(original: Callable) -> Callable:
        def _worker_loop(*args: Any) -> Any:  # in the worker
            if starting:
                with quietly():
                    note_draws(starting[0].states[args[10]], args[1])
            return original(*args)

        return _worker_loop

    def receive(original: Callable) -> Callable:
        def _next_data(self: Any) -> Any:
            batch = original(self)
            with quietly():
                looked = waiting.get(self)
                if looked is not None:
                    looked.batches += 1
                    if looked.batches == LOOKS * len(looked.states) and (found := drawn_alike(looked.states)):
                        session.facts["worker_draws"] = {**found, "line": looked.line}
            return batch

        return _next_data

    replace(stack, WithWorkers, "__init__", begin)
    replace(stack, WithWorkers, "_next_data", receive)
    replace(stack, workers, "_worker_loop", work)  # under its own name: a spawned worker finds the original


def shared_memory(count: int) -> np.ndarray:
    memory = mmap.mmap(-1, 8 * count * LOOKS * len(KINDS))
    return np.frombuffer(memory, np.int64).reshape(count, LOOKS, len(KINDS))


def note_draws(states: np.ndarray, data: Any) -> None:
    """Before each of a worker's first batches, the states of all generators; then fetching is as it was."""
    original, looks = fetch._MapDatasetFetcher.fetch, iter(range(LOOKS))

    @functools.wraps(original)
    def fetch_batch(self: Any, rows: Any) -> Any:
        with quietly():
            look = next(looks)
            known = {**states_of_generators(), "its own": state_of_own(data)}
            states[look] = [1 + state if (state := known[kind]) is not None else 0 for kind in KINDS]
            if look == LOOKS - 1:
                fetch._MapDatasetFetcher.fetch = original  # type: ignore[method-assign]
        return original(self, rows)

    fetch._MapDatasetFetcher.fetch = fetch_batch  # type: ignore[method-assign]


def state_of_own(data: Any) -> int | None:
    """One number for the generators that a data set holds, or finds among the variables of its file; None without."""
    held = [*getattr(data, "__dict__", {}).values()]
    held += getattr(type(data).__getitem__, "__globals__", {}).values()
    states = [state for value in held if (state := state_of(value)) is not None]
    return zlib.crc32(repr(states).encode()) if states else None


def state_of(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        _, words, place, *_ = value.get_state(legacy=True)
        return np.asarray(words).tobytes(), place
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return value.getstate() if isinstance(value, random.Random) else None


def drawn_alike(states: np.ndarray) -> dict[str, Any] | None:
    """The first kind of generator that two workers begin with in one state, and that both draw from."""
    for kind, name in enumerate(KINDS):
        first, second = states[:, 0, kind], states[:, 1, kind]
        used = (first > 0) & (second > 0) & (first != second)
        values, counts = np.unique(first[used], return_counts=True)
        if len(values) and counts.max() > 1:
            return {"generator": name, "alike": int(counts.max()), "workers": len(states)}
    return None
