"""Finds, at the first step, columns that a script keeps in half precision, and the columns it may have made of them.

And tables whose rows may have been counted in half precision: where it cannot tell 512 from 513, they are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradproof.probes.aside import is_recorded
from gradproof.probes.guard import quietly
from gradproof.probes.names import own_frames
from gradproof.probes.session import Session
from gradproof.tape.frames import locals_of
from gradproof.tape.modes import unseen_by_modes

MOST_ROWS = 50_000
FEWEST_ROWS = 200
MOST_COLUMNS = 64  # of one table, and of those that go with it
MOST_SHORT = 16  # columns in half precision
ONE_IN_HALF = (512, 4096)  # the same as the next number in bfloat16, and in float16
MOST_STEPPED = 4  # tables with equal rows there


def tables(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Once, after the first step: what the functions that are running hold."""

    def look(optimizer: Optimizer) -> bool:
        if not session.alive or is_recorded():
            return False
        began = time.perf_counter()
        with quietly(), unseen_by_modes():
            session.facts["_tables"] = list(short_columns())
            session.facts["_stepped_tables"] = list(islice(stepped_tables(), MOST_STEPPED))
        session.own_seconds += time.perf_counter() - began
        return True

    session.looks_after.append(look)
    stack.callback(session.looks_after.clear)


def short_columns() -> Iterator[dict[str, Any]]:
    """Each column in half precision, with the longer ones that have as many rows, and the file that holds them."""
    frames = list(own_frames())
    named = [
        (name, value) for f in frames for name, value in locals_of(f).items() if not name.startswith("__")
    ]
    columns = dict(column for name, value in named for column in columns_of(name, value))
    short = {name: values for name, values in columns.items() if is_short(values)}
    for name, values in list(short.items())[:MOST_SHORT]:
        others = [key for key in columns if key not in short and len(columns[key]) == len(values)]
        yield {
            "name": name,
            "values": as_numbers(values),
            "others": {key: as_numbers(columns[key]) for key in others[:MOST_COLUMNS]},
            "file": frames[0].f_code.co_filename,
        }


def stepped_tables() -> Iterator[dict[str, Any]]:
    """Tables of numbers whose first rows differ, and that have two equal ones where half precision has one number."""
    for frame in own_frames():
        for name, value in locals_of(frame).items():
            for key, table in (*kept_by(name, value), (name, value)):
                if is_table(table) and is_stepped(table):
                    yield {"name": key, "values": as_numbers(table), "file": frame.f_code.co_filename}


def is_table(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and is_numbers(value) and value.ndim <= 2


def is_stepped(table: Tensor | np.ndarray) -> bool:
    known = [n for n in ONE_IN_HALF if n + 1 < len(table)]
    return any(bool((table[n] == table[n + 1]).all()) for n in known) and bool((table[1] != table[2]).any())


def kept_by(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The arrays and tensors of a data set."""
    if isinstance(value, torch.utils.data.Dataset):
        for key, kept in vars(value).items():
            for part in kept if isinstance(kept, tuple) else (kept,):
                if isinstance(part, (Tensor, np.ndarray)):
                    yield f"{name}.{key}", part


def columns_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The columns of a table, an array or a tensor, with names; of a data set, those of what it keeps."""
    if isinstance(value, (Tensor, np.ndarray)):
        if not is_numbers(value) or len(value) < FEWEST_ROWS:
            return
        if value.ndim == 1:
            yield name, value
        elif value.ndim == 2 and value.shape[1] <= MOST_COLUMNS:
            yield from ((f"{name}[:, {i}]", value[:, i]) for i in range(value.shape[1]))
    elif type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
        for column in list(value.columns)[:MOST_COLUMNS]:
            yield from columns_of(f"{name}[{column!r}]", value[column].to_numpy())
    else:
        for key, part in kept_by(name, value):
            yield from columns_of(key, part)


def is_numbers(value: Tensor | np.ndarray) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind == "f"
    plain = value.layout == torch.strided and value.device.type == "cpu" and not value.requires_grad
    return plain and value.dim() > 0 and value.is_floating_point()


def is_short(values: Tensor | np.ndarray) -> bool:
    return values.dtype.itemsize == 2


def as_numbers(values: Tensor | np.ndarray) -> Tensor:
    """A copy: what a script does to its own later is not to be seen here."""
    values = values[:MOST_ROWS]
    return torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else values.detach().clone()
