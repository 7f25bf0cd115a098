"""Sees which rows each loader handed out last, so that an experiment can tell whether two loaders go together.

Only loaders without workers; of each batch a few numbers are kept by which it is found again on the tape.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import fetch

from gradproof.probes.session import Session

MOST = 6  # loaders that are remembered, those that were read last
NUMBERS = 2048  # of a batch


@dataclass(frozen=True)
class Fetched:
    """What a loader handed out last."""

    rows: tuple[int, ...]
    length: int  # of its data set
    samples: tuple[tuple[tuple[int, ...], Tensor], ...]  # shape and some numbers of each tensor
    line: str


def loaders(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Only while a step is taped: nobody else asks."""
    original = fetch._MapDatasetFetcher.fetch

    def fetch_batch(self: Any, rows: Any) -> Any:
        batch = original(self, rows)
        if not session.alive or session.taping is None or not session.taping.active:
            return batch
        began = time.perf_counter()
        with suppress(Exception), _disable_current_modes():
            if torch.utils.data.get_worker_info() is None and isinstance(rows, list):
                known: dict[int, Fetched] = session.facts.setdefault("_fetched", {})
                known.pop(id(self), None)
                known[id(self)] = describe(rows, len(self.dataset), batch)
                while len(known) > MOST:
                    known.pop(next(iter(known)))
        session.own_seconds += time.perf_counter() - began
        return batch

    fetch._MapDatasetFetcher.fetch = fetch_batch  # type: ignore[method-assign]
    stack.callback(setattr, fetch._MapDatasetFetcher, "fetch", original)


def describe(rows: list, length: int, batch: Any) -> Fetched:
    parts = list(batch.values()) if isinstance(batch, dict) else batch
    parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() and part.is_cpu]
    samples = tuple((tuple(part.shape), some_numbers(part)) for part in tensors)
    return Fetched(tuple(int(row) for row in rows), length, samples, reading_line())


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
