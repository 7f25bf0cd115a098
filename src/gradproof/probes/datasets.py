"""Sees whether reading a sample changes the data it comes from: an augmentation in place, on a view of what is stored.

Only loaders without workers: what a worker changes is its own copy. A cache that fills up, or a sample that is
normalised when it is first read, changes once; what changes every time it is read drifts away.
"""

from __future__ import annotations

import ast
import bisect
import inspect
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data._utils import fetch

from gradproof.probes.guard import quietly
from gradproof.probes.session import Session
from gradproof.tape.modes import unseen_by_modes

MOST_SETS = 8  # that are looked at
FIRST_BATCHES = 8  # of each data set, whose samples are remembered
MOST_ROWS = 256  # samples that are remembered
MOST_READS = 2000  # of remembered samples, compared before and after
MOST_PAIRS = 64  # samples that are compared with how they were first handed out
MOST_HANDED_OUT = 4 << 20  # numbers in these
MOST_NUMBERS = 1 << 20  # in one sample


def data_sets(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Compares what a data set stores of a sample before and after it is read, for the first samples of a run."""
    original = fetch._MapDatasetFetcher.fetch
    watched: dict[int, Reads] = {}

    def fetch_batch(self: Any, rows: Any) -> Any:
        if not session.alive or torch.utils.data.get_worker_info() is not None:
            return original(self, rows)
        began = time.perf_counter()
        reads = None
        with quietly(), unseen_by_modes():
            reads = reads_of(watched, self.dataset)
            if reads is not None:
                reads.before(self.dataset, rows)
        session.own_seconds += time.perf_counter() - began
        result = original(self, rows)
        began = time.perf_counter()
        with quietly(), unseen_by_modes():
            if reads is not None:
                reads.after(self.dataset)
                reads.keep_maps(rows, result, session.facts.setdefault("_came_back", []))
                if reads.changed_again >= 2 * reads.described:
                    session.facts.setdefault("data_sets", {})[reads.name] = reads.describe(self.dataset)
        session.own_seconds += time.perf_counter() - began
        return result

    fetch._MapDatasetFetcher.fetch = fetch_batch  # type: ignore[method-assign]
    stack.callback(setattr, fetch._MapDatasetFetcher, "fetch", original)


def reads_of(watched: dict[int, Reads], data: Any) -> Reads | None:
    """What is known of a data set, if it is one of the first few; it is not kept alive."""
    known = watched.get(id(data))
    if known is None or known.data() is not data:
        if len(watched) >= MOST_SETS and known is None:
            return None
        known = watched[id(data)] = Reads(data, len(watched))
    return known


class Reads:
    """The reads of one data set's samples: how many, and which of them changed what is stored."""

    def __init__(self, data: Any, number: int) -> None:
        self.data = weakref.ref(data)
        self.name = f"{type(data).__name__} {number}"
        self.batches = 0
        self.times: dict[int, int] = {}  # remembered samples, and how often each was read
        self.changed = 0
        self.again = 0  # reads of samples that were read before
        self.changed_again = 0
        self.reordered = 0  # of these, the same numbers in another order
        self.first: dict[int, np.ndarray] = {}  # what a sample held before it was first read
        self.last: dict[int, np.ndarray] = {}  # ... and after it was last read
        self.described = 1  # changes when that was last done
        self.handed_out: dict[int, list[Tensor]] = {}
        self.handed_out_numbers = 0
        self.came_back = 0
        self._held: dict[int, list[np.ndarray]] = {}

    def before(self, data: Any, rows: Any) -> None:
        self._held = {}
        if self.again >= MOST_READS or (self.batches > FIRST_BATCHES and not self.changed):
            return
        rows = [int(row) for row in rows] if isinstance(rows, (list, tuple)) else [int(rows)]
        self.batches += 1
        for row in dict.fromkeys(rows):
            new = self.batches <= FIRST_BATCHES and len(self.times) < MOST_ROWS and row not in self.times
            if new or (row in self.times and self.again < MOST_READS):
                stored = stored_numbers(data, row)
                if stored:
                    self._held[row] = stored

    def after(self, data: Any) -> None:
        for row, held in self._held.items():
            now = stored_numbers(data, row)
            times = self.times[row] = self.times.get(row, 0) + 1
            if [part.shape for part in now] != [part.shape for part in held]:
                continue
            self.first.setdefault(row, np.concatenate(held))
            self.last[row] = np.concatenate(now)
            pairs = list(zip(held, now, strict=True))
            reordered = any(is_reordered(a, b) for a, b in pairs)
            changed = reordered or any(is_altered(a, b) for a, b in pairs)
            self.changed += changed
            self.again += times > 1
            self.changed_again += times > 1 and changed
            self.reordered += times > 1 and reordered
        self._held = {}

    def keep_maps(self, rows: Any, batch: Any, came_back: list) -> None:
        """Images and maps over them, as they were first handed out and as they came back: (then, now) into the list."""
        if self.came_back >= MOST_PAIRS:
            self.handed_out = {}
            return
        batch = list(batch.values()) if isinstance(batch, dict) else batch
        if not isinstance(rows, list) or not isinstance(batch, (list, tuple)):
            return
        maps = [t for t in batch if isinstance(t, Tensor) and t.dim() >= 3 and len(t) == len(rows)]
        if len(maps) != 2 or maps[0].shape[-2:] != maps[1].shape[-2:]:
            return
        for row, *pair in zip(rows, *maps, strict=True):
            if row in self.handed_out and self.came_back < MOST_PAIRS:
                self.came_back += 1
                came_back.append((self.handed_out.pop(row), [t.clone() for t in pair]))
            elif self.handed_out_numbers < MOST_HANDED_OUT and row not in self.handed_out:
                self.handed_out[row] = [t.clone() for t in pair]
                self.handed_out_numbers += sum(t.numel() for t in pair)

    def describe(self, data: Any) -> dict[str, Any]:
        self.described = max(1, self.changed_again)
        rows = [row for row, times in self.times.items() if times > 1 and row in self.last]
        drift = [np.sqrt(np.mean((self.last[row] - self.first[row]) ** 2)) for row in rows]
        spread = np.std(np.concatenate([self.first[row] for row in rows]))
        source = innermost(data, 0)[0]
        return {
            "class": type(source).__name__,
            "line": writing_line(source),
            "again": self.again,
            "changed_again": self.changed_again,
            "reordered": self.reordered,
            "drift": float(np.mean(drift) / max(float(spread), 1e-12)),
            "reads": max(self.times.values()),
        }


def is_reordered(held: np.ndarray, now: np.ndarray) -> bool:
    return not np.array_equal(held, now) and np.array_equal(np.sort(held), np.sort(now))


def is_altered(held: np.ndarray, now: np.ndarray) -> bool:
    """Whether numbers were changed and still resemble what they were: not filled where empty, not drawn anew."""
    known = np.isfinite(held) & np.isfinite(now) & (held != 0)
    if known.sum() < 4 or float((now != held)[known].mean()) < 0.05:
        return False
    a, b = held[known] - held[known].mean(), now[known] - now[known].mean()
    return float(a @ b) > 0.5 * float(np.sqrt((a @ a) * (b @ b)))


def innermost(data: Any, row: int) -> tuple[Any, int]:
    """The data set that a Subset or ConcatDataset takes a sample from, and its number there."""
    while True:
        if isinstance(data, Subset):
            data, row = data.dataset, int(data.indices[row])
        elif isinstance(data, ConcatDataset):
            which = bisect.bisect_right(data.cumulative_sizes, row)
            row -= data.cumulative_sizes[which - 1] if which else 0
            data = data.datasets[which]
        else:
            return data, row


def stored_numbers(data: Any, row: int) -> list[np.ndarray]:
    """A copy of the numbers that a data set holds of one sample."""
    source, row = innermost(data, row)
    length = len(source)
    return [
        part.reshape(-1).astype(np.float64)
        for value in vars(source).values()
        for part in arrays_in(value, row, length)
        if part.size <= MOST_NUMBERS and part.dtype.kind in "fui"
    ]


def arrays_in(value: Any, row: int, length: int) -> Iterator[np.ndarray]:
    """The row of an array that has as many as the data set; of a list, its entry, or the arrays in it."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim >= 2 and len(value) == length:
            yield from as_array(value[row])
    elif isinstance(value, (list, tuple)) and len(value) == length:
        entry = value[row]
        for part in entry if isinstance(entry, (list, tuple)) else (entry,):
            yield from as_array(part)
    elif isinstance(value, (list, tuple)) and 0 < len(value) <= 8:
        for part in value:
            if isinstance(part, (Tensor, np.ndarray)):
                yield from arrays_in(part, row, length)


def as_array(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        yield value.detach().float().numpy()
    elif isinstance(value, np.ndarray):
        yield value


def writing_line(data: Dataset) -> str:
    """The first statement of __getitem__ that changes something in place, or its head."""
    with quietly():
        function = inspect.unwrap(type(data).__getitem__)
        source, first = inspect.getsourcelines(function)
        file = (inspect.getsourcefile(function) or "").rsplit("/", 1)[-1]
        for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
            if isinstance(node, ast.stmt) and changes_in_place(node):
                return f"{file}:{first + node.lineno - 1}"
        return f"{file}:{first}"
    return ""


def changes_in_place(node: ast.stmt) -> bool:
    """`x += noise`, `x[i:j] = 0`, `x.mul_(2)`."""
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in node.targets)
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "attr", "").endswith("_")
