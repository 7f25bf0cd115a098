"""The ranks of one training, read together: who they are, and their fingerprints side by side.

Every rank has a directory of its own (`RUN` or `RUN.rank0`, `RUN.rank1`, …), so that none waits for another and one
that dies costs its own rows. Of many ranks, steps are left out so that the tables stay small: the first ones stay, and
`narrow` reads a stretch of steps whole.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gradproof.errors import UserError
from gradproof.record.door import Damaged, read_json
from gradproof.record.prints import (
    FIELDS,
    PRINTS_FILE,
    TENSOR_PRINTS_FILE,
    read_last_step,
    read_rows,
    read_tensors,
)
from gradproof.record.run import open_run
from gradproof.record.schema import INFO_FILE
from gradproof.record.shapes import clean_info

MOST_CELLS = 1 << 21  # of one table
FEWEST_STEPS = 256
NAME = re.compile(r"(?P<base>.+?)(\.rank(?P<rank>\d+))?(?P<again>-\d+)?")


@dataclass
class Ranks:
    """`tables[field]` has one row a rank and one column a step of `steps`; nan: not measured, or not there."""

    paths: dict[int, Path]  # by rank
    infos: dict[int, dict[str, Any]]
    steps: np.ndarray
    tables: dict[str, np.ndarray]
    last: dict[int, int]  # the last step that each rank has ended; -1: none
    notes: list[str] = field(default_factory=list)

    @property
    def numbers(self) -> list[int]:
        return list(self.paths)

    @property
    def world(self) -> int:
        return max([len(self.paths), *(info.get("world", 0) for info in self.infos.values())])

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world) if rank not in self.paths][:1000]

    def whole_norm(self, kind: str) -> np.ndarray:
        """The norm of all gradients or weights of the model, step by step: a part that several ranks hold counts once.

        nan where a rank has not measured its part.
        """
        plain, parts = self.tables[kind], self.tables[f"{kind}_parts"]
        neither = np.isnan(plain) & np.isnan(parts)
        own = np.where(
            neither, np.nan, np.nan_to_num(plain, posinf=np.inf) + np.nan_to_num(parts, posinf=np.inf)
        )
        total = np.zeros(len(self.steps))
        for members in self.groups():
            total += own[[self.numbers.index(rank) for rank in members]].mean(axis=0)
        return np.sqrt(total)

    def groups(self) -> list[list[int]]:
        """Ranks that hold parameters of the same names and shapes: copies of one model, or of one stage of it."""
        found: dict[Any, list[int]] = {}
        for rank, info in self.infos.items():
            names = tuple((p["name"], tuple(p["shape"])) for p in info.get("parameters", ()))
            found.setdefault(names, []).append(rank)
        return list(found.values())

    def tensors(self, rank: int) -> dict[int, dict[tuple[str, str], tuple[float, int]]]:
        """Σx² of each tensor of a rank, and into how many parts it is cut, by kind and name, at landmarks."""
        listed = self.infos[rank].get("prints", [])
        return {
            step: {
                (listed[n][0], listed[n][1]): (square, listed[n][2])
                for n, square in squares.items()
                if n < len(listed)
            }
            for step, squares in read_tensors(self.paths[rank] / TENSOR_PRINTS_FILE).items()
        }

    def whole_tensor_norms(self, kind: str) -> dict[int, dict[str, float]]:
        """The norm of each whole parameter by step and name, from the parts of all ranks."""
        every = [self.tensors(rank) for rank in self.numbers]
        common = set.intersection(*(set(found) for found in every)) if every else set()
        whole: dict[int, dict[str, float]] = {}
        for step in sorted(common):
            parts: dict[str, list[tuple[float, int]]] = {}
            for found in every:
                for (what, name), part in found[step].items():
                    if what == kind:
                        parts.setdefault(name, []).append(part)
            whole[step] = {name: whole_of(given, self._holders[name]) for name, given in parts.items()}
        return whole

    @cached_property
    def _holders(self) -> Counter[str]:
        """How many ranks know a parameter."""
        return Counter(p["name"] for info in self.infos.values() for p in info.get("parameters", ()))

    def narrow(self, first: int, last: int) -> Ranks:
        """The same with every step of a stretch, and no other."""
        return assemble(self.paths, self.infos, (first, last))

    @cached_property
    def sharded(self) -> bool:
        return any(info.get("facts", {}).get("sharded") for info in self.infos.values()) or any(
            parts for info in self.infos.values() for _, _, parts in info.get("prints", ())
        )


def whole_of(parts: list[tuple[float, int]], holders: int = 0) -> float:
    """The norm of one tensor from Σx² on each rank, and how many parts it is cut into (0: not at all).

    Copies are alike, and each part lies on as many ranks as any other; one that holds none may not have written of it.
    """
    known = max(len(parts), holders) if parts[0][1] else len(parts)
    return float(np.sqrt(sum(square * max(cut, 1) for square, cut in parts) / known))


def find_ranks(path: str | os.PathLike) -> dict[int, Path]:
    """The directories of all ranks of the training that a run is part of, by rank; empty if it is alone.

    >>> find_ranks("runs/a")  # doctest: +SKIP
    {0: PosixPath('runs/a'), 1: PosixPath('runs/a.rank1')}
    """
    path = Path(os.path.abspath(path))
    known = NAME.fullmatch(path.name)
    if known is None:
        return {}
    base, again = known["base"], known["again"] or ""
    wanted = {(base, again)} if known["rank"] else {(base, again), (base + again, "")}
    found: dict[int, Path] = {}
    with os.scandir(path.parent) as entries:
        for entry in entries:
            named = NAME.fullmatch(entry.name)
            if named is None or named["rank"] is None or (named["base"], named["again"] or "") not in wanted:
                continue
            if entry.is_dir(follow_symlinks=False):
                found.setdefault(int(named["rank"]), path.parent / entry.name)
    first = path if not known["rank"] else path.with_name(base + again)
    if found and 0 not in found and first.is_dir():
        found[0] = first
    return dict(sorted(found.items())) if len(found) > 1 else {}


def read_ranks(path: str | os.PathLike) -> Ranks | None:
    """All ranks of a training, those that can be read; None for a run that is no rank of several."""
    paths = find_ranks(path)
    infos = {rank: info for rank, place in paths.items() if (info := _read_info(place)) is not None}
    infos = {rank: info for rank, info in infos.items() if info.get("world", 2) > 1}
    if len(infos) < 2:
        return None
    return assemble({rank: paths[rank] for rank in infos}, infos)


def assemble(
    paths: dict[int, Path], infos: dict[int, dict[str, Any]], stretch: tuple[int, int] | None = None
) -> Ranks:
    """Two passes: the last step of each rank, then the rows of the steps that are kept."""
    last = {rank: _last_step(place) for rank, place in paths.items()}
    count = 1 + max(last.values(), default=-1)
    if stretch is not None:
        steps = np.arange(count)[stretch[0] : stretch[1] + 1]
    else:
        steps = keep_steps(count, max(FEWEST_STEPS, MOST_CELLS // len(paths)))
    tables = {name: np.full((len(paths), len(steps)), np.nan) for name in FIELDS}
    for index, place in enumerate(paths.values()):
        rows = _rows_of(place)
        at = np.searchsorted(rows["step"], steps)
        here = at < len(rows["step"])
        here[here] = rows["step"][at[here]] == steps[here]
        for name in FIELDS:
            tables[name][index, here] = rows[name][at[here]]
    return Ranks(paths, infos, steps, tables, last)


def keep_steps(count: int, most: int) -> np.ndarray:
    """Which of so many steps are kept: all, or the first quarter of what there is room for and then evenly.

    >>> keep_steps(100, 8)
    array([ 0,  1, 20, 40, 59, 79, 99])
    """
    if count <= most:
        return np.arange(count)
    first = most // 4
    later = np.linspace(first - 1, count - 1, most - first).round().astype(np.int64)
    return np.unique(np.concatenate([np.arange(first), later]))


def _last_step(place: Path) -> int:
    step = read_last_step(place / PRINTS_FILE)
    if step is None:
        steps = _rows_of(place)["step"]
        step = int(steps[-1]) if len(steps) else -1
    return step


def _rows_of(place: Path) -> Any:
    """A rank's fingerprints; of a run that has none, what its table of steps says."""
    rows = read_rows(place / PRINTS_FILE)
    if len(rows):
        return rows
    try:
        run = open_run(place)
    except UserError:
        return rows
    steps, first = np.unique(run.steps["step"].astype(np.int64), return_index=True)
    made: dict[str, np.ndarray] = {name: np.full(len(steps), np.nan) for name in FIELDS}
    made["step"] = steps
    made["loss"], made["lr"] = run.steps["loss"][first], run.steps["lr"][first]
    with np.errstate(over="ignore"):
        made["gradient"] = run.steps["grad_norm"][first] ** 2
        made["weight"] = run.steps["weight_norm"][first] ** 2
    return made


def _read_info(place: Path) -> dict[str, Any] | None:
    try:
        data = read_json(place / INFO_FILE)
    except (Damaged, OSError):
        return None
    return clean_info(data, lambda what: None) if isinstance(data, dict) else None
