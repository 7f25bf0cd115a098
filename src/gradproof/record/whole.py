"""A run as all of its ranks have it: of a sharded model, what each has measured of its parts is put together.

A tensor whose parts were not all measured at a step is left out there: a part is no statistic of the whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gradproof.errors import UserError
from gradproof.record.ranks import Ranks, find_ranks, keep_steps, read_ranks
from gradproof.record.run import Frame, Frames, Run, open_run
from gradproof.record.schema import DISTRIBUTION_FRAME, STATISTICS, STATISTICS_FRAME

OF_PARAMETERS = ("gradient", "weight", "update", "adam_m", "adam_v")
ADDED_UP = tuple(STATISTICS.index(name) for name in ("nan", "inf", "zero", "subnormal"))
SHARES = tuple(
    STATISTICS.index(name) for name in ("cosine", "eps_share", "dead")
)  # of samples: a mean will do
MIN, MAX, ABSMAX, MEAN, STD, NORM = (
    STATISTICS.index(name) for name in ("min", "max", "absmax", "mean", "std", "norm")
)
MOST_READ = 20_000  # frames of all ranks together
MOST_NUMBERS = 1 << 26  # that are kept


def open_whole(path: str | os.PathLike) -> Run:
    """A run as `open_run` reads it; of a training of several ranks rank 0's, with the numbers of the whole model.

    Where a script has trained in ranks that it started, its own run is empty: the first rank's is opened.
    """
    run = first_with_steps(open_run(path))
    ranks = run.ranks = read_ranks(run.path) if run.info.get("world", 2) > 1 else None
    if ranks is not None and ranks.sharded:
        frames = put_together(run, ranks)
        run._frames = {STATISTICS_FRAME: frames, DISTRIBUTION_FRAME: run.distributions}
        put_column(run, "grad_norm", ranks.steps, ranks.whole_norm("gradient"))
        put_column(
            run, "weight_norm", ranks.steps - 1, ranks.whole_norm("weight")
        )  # before this update: after the last
        put_column(run, "update_norm", *norms_of_updates(run))
    return run


def first_with_steps(run: Run) -> Run:
    """The run itself; of a script that trained in ranks which it started, that of its first rank."""
    if len(run):
        return run
    opened = (found for place in find_ranks(run.path).values() if (found := try_open(place)))
    return next((found for found in opened if len(found)), run)


def put_column(run: Run, column: str, steps: np.ndarray, values: np.ndarray) -> None:
    """A column of the table of steps with the whole model's numbers; nan where they are not known: a part is none."""
    _, here, there = np.intersect1d(run.steps["step"], steps, return_indices=True)
    whole = np.full(len(run), np.nan)
    whole[here] = values[there]
    run.steps[column], run.seen[column] = whole, np.isfinite(whole) | run.seen[column]


def norms_of_updates(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """The norm of all updates together, at steps at which every one of them is known."""
    table = run.table("update", "norm")
    return table.steps, np.sqrt(np.square(table.values.astype(np.float64)).sum(axis=1))


class WholeFrames(Frames):
    """Frames that were put together, and are kept."""

    def __init__(self, frames: list[Frame]) -> None:
        self._kept = frames

    @property
    def steps(self) -> np.ndarray:
        return np.array([frame.step for frame in self._kept], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self._kept)

    def __getitem__(self, index: Any) -> Any:
        return self._kept[index]


class Parts:
    """One rank's frames, and which of its tensors are parts of which of the first rank's."""

    def __init__(self, run: Run, tensors: dict[tuple[str, str], int]) -> None:
        self.frames = run.frames
        self.places = {step: place for place, step in enumerate(self.frames.steps.tolist())}
        named = [tensors.get((tensor["kind"], tensor["name"]), -1) for tensor in run.tensors]
        self._meant = np.array(named, dtype=np.int64)

    def read(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Its statistics of the first rank's tensors `rows`; not a number where there are none."""
        found = np.full((len(rows), len(STATISTICS)), np.nan)
        if step in self.places:
            frame = self.frames[self.places[step]]
            of = {number: place for place, number in enumerate(self._meant[frame.numbers].tolist())}
            places = np.array([of.get(number, -1) for number in rows.tolist()], dtype=np.int64)
            found[places >= 0] = frame.values[places[places >= 0]]
        return found


def put_together(run: Run, ranks: Ranks) -> WholeFrames:
    """The frames of a rank with what all ranks have of its sharded parameters; others' rows are its own."""
    sharing = whole_parameters(ranks)
    tensors = {
        (t["kind"], t["name"]): number
        for number, t in enumerate(run.tensors)
        if t["kind"] in OF_PARAMETERS and t["name"] in sharing
    }
    every = [Parts(opened, tensors) for place in ranks.paths.values() if (opened := try_open(place))]
    if len(every) < len(ranks.paths):
        sharing = {}  # a part is missing for good
    held = {number: sharing[name] for (_, name), number in tensors.items() if name in sharing}
    partial = np.zeros(len(run.tensors), dtype=bool)
    partial[sharded_numbers(run)] = True
    frames = run.frames
    room = MOST_NUMBERS // max(1, len(run.tensors) * len(STATISTICS))
    kept = keep_steps(len(frames), max(8, min(MOST_READ // len(ranks.paths), room)))
    whole = (whole_frame(frames[int(place)], partial, held, every) for place in kept)
    return WholeFrames([frame for frame in whole if len(frame.numbers)])


def whole_parameters(ranks: Ranks) -> dict[str, np.ndarray]:
    """Of each sharded parameter whose parts make up the whole: entries on each rank, and how much each counts."""
    found: dict[str, np.ndarray] = {}
    sizes: dict[str, int] = {}
    for row, rank in enumerate(ranks.numbers):
        for parameter in ranks.infos[rank].get("parameters", ()):
            if "part" in parameter:
                name = parameter["name"]
                sizes.setdefault(name, math.prod(parameter["shape"]))
                found.setdefault(name, np.zeros((3, len(ranks.numbers))))[:, row] = (1, *parameter["part"])
    shares = {
        name: np.stack([entries, parts / known.sum()]) for name, (known, entries, parts) in found.items()
    }
    return {name: pair for name, pair in shares.items() if abs((pair[0] * pair[1]).sum() - sizes[name]) < 0.5}


def sharded_numbers(run: Run) -> list[int]:
    """The tensors of a rank that are parts of something."""
    sharded = {p["name"] for p in run.info.get("parameters", ()) if "part" in p}
    return [n for n, t in enumerate(run.tensors) if t["kind"] in OF_PARAMETERS and t["name"] in sharded]


def whole_frame(frame: Frame, partial: np.ndarray, held: dict[int, np.ndarray], every: list[Parts]) -> Frame:
    """One step: rows of parts become rows of wholes, or are left out."""
    here = partial[frame.numbers]
    values = frame.values.astype(np.float64)
    known = np.array([number in held for number in frame.numbers.tolist()], dtype=bool)
    if known.any():
        rows = frame.numbers[known]
        parts = np.stack([each.read(frame.step, rows) for each in every])  # (ranks, tensors, statistics)
        entries, weights = np.stack([held[number] for number in rows.tolist()], axis=-1)
        values[known] = combine(parts, entries, weights)
    # a tensor that holds NaN has counts and no norm; one of which only the norm was taken has no counts
    read = np.isfinite(values[:, [ADDED_UP[0], NORM]]).any(axis=1)
    good = ~here | (known & read)
    return Frame(frame.step, frame.numbers[good], values[good].astype(np.float32))


def combine(parts: np.ndarray, entries: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Statistics of wholes from those of parts; a part that is on several ranks has its weight shared among them.

    parts: (ranks, tensors, statistics); entries, weights: (ranks, tensors).
    """
    none = entries == 0
    parts = np.where(none[:, :, None], 0.0, parts)
    whole = (weights[:, :, None] * parts).sum(axis=0)
    whole[:, MIN] = np.where(none, np.inf, parts[:, :, MIN]).min(axis=0)
    whole[:, MAX] = np.where(none, -np.inf, parts[:, :, MAX]).max(axis=0)
    whole[:, ABSMAX] = parts[:, :, ABSMAX].max(axis=0)
    whole[:, NORM] = np.sqrt((weights * parts[:, :, NORM] ** 2).sum(axis=0))
    finite = weights * np.maximum(entries - parts[:, :, ADDED_UP[0]] - parts[:, :, ADDED_UP[1]], 0)
    share = finite / np.maximum(finite.sum(axis=0), 1)
    whole[:, MEAN] = (share * parts[:, :, MEAN]).sum(axis=0)
    around = parts[:, :, STD] ** 2 + (parts[:, :, MEAN] - whole[:, MEAN]) ** 2
    whole[:, STD] = np.sqrt((share * around).sum(axis=0))
    for column in SHARES:
        whole[:, column] = (share * parts[:, :, column]).sum(axis=0)
    return whole


def try_open(place: Any) -> Run | None:
    try:
        return open_run(place)
    except UserError:
        return None
