"""Sees whether samples that a loader hands out again, in later epochs, have kept their targets.

Inputs that are sorted, padded or shuffled without their targets leave every batch well formed: only a sample that
comes twice shows it. Samples that are drawn or augmented anew never come twice, and nothing is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import fetch

from gradproof.probes.guard import quietly
from gradproof.probes.session import Session
from gradproof.tape.modes import unseen_by_modes

MOST_BATCHES = 600
FEWEST = 20  # samples that came again, before it is said
ENOUGH = 400  # samples that came again
MOST_SAMPLES = 20_000
PADDING = (0, -1, -100)  # what stands behind the end of a target
COLUMNS = 4096  # of a sample that its fingerprint looks at


def pairs(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """Remembers a number for each sample and its target, as batches leave a loader without workers."""
    original = fetch._MapDatasetFetcher.fetch
    known: dict[int, Pairs] = {}

    def fetch_batch(self: Any, rows: Any) -> Any:
        batch = original(self, rows)
        began = time.perf_counter()
        with quietly(), unseen_by_modes():
            if session.alive and torch.utils.data.get_worker_info() is None:
                seen = known.setdefault(id(self.dataset), Pairs())
                changed = seen.look(rows, batch) and seen.again >= FEWEST
                if not seen.distinct:
                    session.facts.pop("pairs", None)
                elif changed:
                    line = line_of_function(self.collate_fn)
                    session.facts["pairs"] = {"again": seen.again, "other": seen.other, "line": line}
        session.own_seconds += time.perf_counter() - began
        return batch

    fetch._MapDatasetFetcher.fetch = fetch_batch  # type: ignore[method-assign]
    stack.callback(setattr, fetch._MapDatasetFetcher, "fetch", original)


def line_of_function(function: Any) -> str:
    """Where a function of the script begins; empty for one of PyTorch's own."""
    code = getattr(function, "__code__", None)
    if code is None or "torch" in code.co_filename.split("/"):
        return ""
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"


class Pairs:
    """The samples of one data set, by fingerprint, with the target that each had first and the rows it came among."""

    def __init__(self) -> None:
        self.first: dict[float, tuple[list[float], frozenset[int]]] = {}  # a print for each padding
        self.batches = self.again = self.other = 0
        self.seen = self.alike = 0  # samples, and those of which a batch held two
        self.drawn = False

    @property
    def distinct(self) -> bool:
        """Samples that are alike by nature may well have several targets, and so may one that is asked for parts."""
        return self.alike <= 0.01 * self.seen and not self.drawn

    def look(self, rows: Any, batch: Any) -> bool:
        """Whether samples came again with other targets."""
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        if self.batches >= MOST_BATCHES or self.again >= ENOUGH or not isinstance(rows, (list, tuple)):
            return False
        self.batches += 1
        if not isinstance(parts, (list, tuple)) or len(parts) < 2:
            return False
        among = frozenset(int(row) for row in rows)
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() and part.is_cpu]
        size = len(tensors[0]) if tensors else 0
        tensors = [part for part in tensors if len(part) == size and part.layout == torch.strided]
        if len(tensors) < 2 or size < 2:
            return False
        given = sum(fingerprints(part) * (index + 1) for index, part in enumerate(tensors[:-1]))
        samples = given.tolist()  # type: ignore[union-attr]
        answers = torch.stack([fingerprints(tensors[-1], padding) for padding in PADDING], 1).tolist()
        self.seen += size
        self.drawn = self.drawn or asks_here_and_there(tensors[-1])
        self.alike += size - len(set(samples))
        for sample, answer in zip(samples, answers, strict=True):
            before, rows_before = self.first.get(sample, (answer, frozenset()))
            if among & rows_before and samples.count(sample) == 1:  # one row, twice; not two that are alike
                self.again += 1
                self.other += not any(one == two for one, two in zip(before, answer, strict=True))
            elif len(self.first) < MOST_SAMPLES:
                self.first.setdefault(sample, (answer, among))
        return self.other > 0


def asks_here_and_there(target: Tensor) -> bool:
    """Whether targets lie scattered among places that are left out (-100, -1), as what a masked language model is
    asked: such places are drawn anew."""
    if target.is_floating_point() or target.dim() != 2 or target.shape[1] < 2:
        return False
    counted = target >= 0
    runs = counted[:, 0].long() + (counted[:, 1:] & ~counted[:, :-1]).sum(1)
    return bool((runs > 1).any())


def fingerprints(part: Tensor, padding: int = 0) -> Tensor:
    """One number for each row, however much padding it has at its end."""
    rows = part.detach().reshape(len(part), -1)[:, :COLUMNS].double() - padding
    weights = torch.cos(torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device) ** 2)
    return torch.nan_to_num((rows * weights).cumsum(1)[:, -1])  # the same sum, whatever zeros follow
