"""Sees the weighted samplers that loaders draw with, and the labels that the data sets beside them keep."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler

from gradproof.probes.guard import quietly
from gradproof.probes.names import own_frames
from gradproof.probes.session import Session
from gradproof.tape.modes import unseen_by_modes

MOST = 8  # loaders with weights
MOST_SAMPLES = 2_000_000
MOST_CLASSES = 1000

Place = tuple[str, int, str]  # file, line, function


def samplers(session: Session, stack: ExitStack, chosen: Callable[[Any], bool]) -> None:
    """For every loader that draws by weights: the weights, what may be labels, and where the sampler was made."""
    found: list[dict[str, Any]] = session.facts.setdefault("_samplers", [])
    make, iterate = WeightedRandomSampler.__init__, DataLoader.__iter__
    places: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(make)
    def init(self: WeightedRandomSampler, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        with quietly():  # a place is not worth a training
            frame = next(own_frames())
            places[self] = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    @functools.wraps(iterate)
    def __iter__(self: DataLoader) -> Any:
        with quietly(), unseen_by_modes():
            sampler = find_sampler(self)
            if sampler is not None and sampler not in known and len(known) < MOST and session.alive:
                known.add(sampler)
                found.append(describe(self.dataset, sampler, places.get(sampler)))
        return iterate(self)

    WeightedRandomSampler.__init__ = init  # type: ignore[method-assign]
    DataLoader.__iter__ = __iter__  # type: ignore[method-assign]
    stack.callback(setattr, WeightedRandomSampler, "__init__", make)
    stack.callback(setattr, DataLoader, "__iter__", iterate)


def find_sampler(loader: DataLoader) -> WeightedRandomSampler | None:
    either = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return next((sampler for sampler in either if isinstance(sampler, WeightedRandomSampler)), None)


def describe(data: Any, sampler: WeightedRandomSampler, place: Place | None) -> dict[str, Any]:
    size = len(data)
    return {
        "place": place,
        "weights": np.asarray(sampler.weights, dtype=np.float64).copy(),
        "labels": list(labels_of(data)) if size <= MOST_SAMPLES else [],
        "samples": size,
        "drawn": sampler.num_samples,
        "replacement": sampler.replacement,
    }


def labels_of(data: Any) -> Iterator[np.ndarray]:
    """Whatever a data set keeps that may be its samples' classes; no sample is read, which may have side effects."""
    if isinstance(data, Subset):
        rows = np.asarray(data.indices)
        yield from (labels[rows] for labels in labels_of(data.dataset))
    elif isinstance(data, ConcatDataset):
        parts = [next(labels_of(part), None) for part in data.datasets]
        if all(part is not None for part in parts):
            yield np.concatenate([part for part in parts if part is not None])
    else:
        kept = [data] if isinstance(data, (list, tuple)) else []
        for value in vars(data).values() if hasattr(data, "__dict__") else ():
            kept += [value, *value] if isinstance(value, tuple) and len(value) <= 8 else [value]
        for value in kept:
            yield from whole_numbers(value, len(data))


def whole_numbers(value: Any, length: int) -> Iterator[np.ndarray]:
    """A column of few different whole numbers, one for each sample."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy() if value.layout == torch.strided and value.dim() <= 2 else None
    elif isinstance(value, (list, tuple)) and len(value) == length and length:
        last = [entry[-1] if isinstance(entry, (list, tuple)) and entry else entry for entry in value]
        if not all(isinstance(entry, (int, float, np.number)) or is_single(entry) for entry in last):
            return
        value = np.array([float(entry) for entry in last])
    elif hasattr(value, "to_numpy") and getattr(value, "ndim", 0) == 1:  # a column of a table
        value = value.to_numpy()
    if not isinstance(value, np.ndarray) or value.size != length or value.shape[:1] != (length,):
        return
    column = value.reshape(-1)
    if column.dtype.kind in "fiub" and bool(np.all(np.mod(column, 1) == 0)):
        column = column.astype(np.int64)
        if 2 <= len(np.unique(column)) <= min(MOST_CLASSES, length // 4):
            yield column


def is_single(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.numel() == 1 and entry.device.type == "cpu"
