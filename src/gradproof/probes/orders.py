"""Finds, at the first step, the orders that a script keeps: lists of distinct ids that are not sorted, and indexes."""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradproof.probes.aside import is_recorded
from gradproof.probes.guard import quietly
from gradproof.probes.names import own_frames, user_frames
from gradproof.probes.session import Session
from gradproof.tape.frames import locals_of
from gradproof.tape.modes import unseen_by_modes
from gradproof.tape.replica import line_that_sets

FEWEST, LONGEST = 100, 50_000  # ids
MOST = 16  # orders
MOST_TARGETS = 32  # columns as long as an order
MOST_VALUES = 2_000  # variables and attributes that are looked at


def orders(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Once, after the first step: what the functions that are running hold, and what their objects hold."""

    def look(optimizer: Optimizer) -> bool:
        if not session.alive or is_recorded():
            return False
        began = time.perf_counter()
        with quietly(), unseen_by_modes():
            session.facts["_orders"] = list(islice(orders_kept(), MOST))
            lengths = {len(order["places"]) for order in session.facts["_orders"]}
            session.facts["_ordered_targets"] = list(islice(values_as_long(lengths), MOST_TARGETS))
        session.own_seconds += time.perf_counter() - began
        return True

    session.looks_after.append(look)
    stack.callback(session.looks_after.clear)


def orders_kept() -> Iterator[dict[str, Any]]:
    """Each order with its name: of row i, the place that its id has among all ids when they are sorted."""
    named = ((name, value) for frame in own_frames() for name, value in locals_of(frame).items())
    for name, value in islice(named, MOST_VALUES):
        for key, kept in ((name, value), *attributes_of(name, value)):
            ids = None if key.startswith("__") else ids_of(kept)
            places = np.argsort(np.argsort(ids, kind="stable"), kind="stable") if ids is not None else None
            if places is not None and bool((np.diff(places) < 0).any()):
                yield {"name": key, "places": torch.from_numpy(places)}


def values_as_long(lengths: set[int]) -> Iterator[dict[str, Any]]:
    """Columns of numbers with a row for each id, and the line that gave them to a variable or an attribute."""
    for frame in user_frames() if lengths else ():
        for name, value in locals_of(frame).items():
            if is_column(value, lengths):
                yield {"values": value.detach().clone(), "line": line_that_assigns(frame, name)}
            elif not isinstance(value, type):
                for key, kept in islice(getattr(value, "__dict__", {}).items(), 64):
                    if is_column(kept, lengths):
                        yield {"values": kept.detach().clone(), "line": line_that_sets(type(value), key)}


def is_column(value: Any, lengths: set[int]) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() >= 1
        and value.numel() == len(value)
        and len(value) in lengths
    )


def line_that_assigns(frame: FrameType, name: str) -> str:
    """The last line above the one that runs that gives a variable its value."""
    file, first = frame.f_code.co_filename, max(frame.f_code.co_firstlineno, 1)
    made = re.compile(rf"^[^=(]*\b{re.escape(name)}\b[^=(]*=(?!=)")
    numbers = [n for n in range(first, frame.f_lineno) if made.search(linecache.getline(file, n))]
    return f"{file.rsplit('/', 1)[-1]}:{numbers[-1]}" if numbers else ""


def attributes_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Of an object of one of the script's own classes."""
    if getattr(type(value), "__module__", "").partition(".")[0] in ("builtins", "torch", "numpy", "pandas"):
        return
    if not isinstance(value, (type, torch.nn.Module)):
        for key, kept in islice(getattr(value, "__dict__", {}).items(), 64):
            yield f"{name}.{key}", kept


def ids_of(value: Any) -> np.ndarray | None:
    """The distinct ids, in their order, of a list, an array, or a dict that says at which row each is."""
    if not isinstance(value, (dict, list, tuple, np.ndarray, Tensor)) or getattr(value, "ndim", 1) != 1:
        return None
    if not FEWEST <= len(value) <= LONGEST:
        return None
    if isinstance(value, dict):
        rows = list(value.values())
        if not all(type(row) is int for row in rows) or sorted(rows) != list(range(len(rows))):
            return None
        ids = np.array(sorted(value, key=value.__getitem__))
    elif isinstance(value, Tensor):
        ids = value.detach().cpu().numpy() if not value.is_floating_point() else np.zeros(0)
    else:
        ids = np.array(value) if isinstance(value[0], (int, str, np.integer)) else np.zeros(0)
    distinct = ids.ndim == 1 and ids.dtype.kind in "iuU" and len(ids) and len(np.unique(ids)) == len(ids)
    return ids if distinct else None
