"""Writes the steps of a training into its run, each when its numbers have arrived from the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gradproof.probes import tensors as measuring
from gradproof.probes.step import OpenStep
from gradproof.record.schema import DISTRIBUTION_FRAME, STATISTICS, STATISTICS_FRAME
from gradproof.record.writer import RunWriter

RING = 32  # light steps whose per-tensor norms are kept in case of trouble
MOST_IN_FLIGHT = 8  # steps whose numbers may still be on their way from a GPU


class Ledger:
    """Takes closed steps; `on_row` hears of each row that has been written, `on_arrival` of all of a step's numbers."""

    def __init__(
        self,
        writer: RunWriter,
        on_row: Callable[[dict[str, Any]], None],
        on_arrival: Callable[[OpenStep, int, dict[str, np.ndarray]], None] | None = None,
    ) -> None:
        self._writer = writer
        self._on_row = on_row
        self._on_arrival = on_arrival
        self._ring: deque[tuple[int, list[str], np.ndarray]] = deque(maxlen=RING)
        self._in_flight: deque[tuple[OpenStep, int]] = deque()

    def add(self, step: OpenStep, number: int) -> None:
        """A step has ended: its numbers are sent, and those that have arrived are written."""
        if not step.reading.parts and not self._in_flight:
            self._writer.write_step(step.row)
            if self._on_arrival is not None:
                self._on_arrival(step, number, {})
            self._on_row(step.row)
            return
        step.reading.send()
        self._in_flight.append((step, number))
        self.settle(MOST_IN_FLIGHT)

    def write_ring(self) -> None:
        """The gradient norms of the last light steps: how it got there."""
        for step, names, norms in self._ring:
            self._write_norms(step, names, norms)
        self._ring.clear()

    def settle(self, most_in_flight: int) -> None:
        """Write the steps whose numbers have arrived."""
        while self._in_flight:
            step, number = self._in_flight[0]
            if len(self._in_flight) <= most_in_flight and not step.reading.ready():
                return
            self._in_flight.popleft()
            self._write(step, number, step.reading.get())

    def _write(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        if found:
            self._read(step, number, found)
        self._writer.write_step(step.row)
        if self._on_arrival is not None:
            self._on_arrival(step, number, found)
        self._on_row(step.row)

    def _read(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        row = step.row
        if step.losses:
            losses = sum(found[f"loss {i}"].sum() for i in range(step.losses))
            row["loss"] = row.get("loss", 0.0) + float(losses)
        for key in ("norm_before_clip", "cosine", "loss_scale", "lr"):
            if key in found:
                row[key] = float(found[key].sum())
        if step.added_to_used and any(
            values.any() for key, values in found.items() if key.startswith("stale ")
        ):
            row["order"] = row["order"].replace("b", "gb", 1)
        if "found_inf" in found and found["found_inf"].any():
            row["skipped"] = 1
        scale = float(found["grad_scale"].sum()) if "grad_scale" in found else 1.0
        squares = [values for key, values in found.items() if key.startswith("squares ")]
        if squares:
            norms = np.sqrt(np.concatenate(squares)) / scale
            row["grad_norm"] = float(np.sqrt(np.square(norms).sum()))
            self._ring.append((number, step.norms, norms))
        if step.rows:
            self._write_statistics(step, number, found, scale)

    def _write_statistics(
        self, step: OpenStep, number: int, found: dict[str, np.ndarray], scale: float
    ) -> None:
        raw = np.concatenate([found[f"stats {i}"] for i in _starts(found, "stats ")])
        order: dict[tuple[str, str], list[int]] = {}
        for index, key in enumerate(step.rows):
            order.setdefault(key, []).append(index)
        if len(order) < len(raw):
            raw = np.stack([measuring.merge_calls(raw[places]) for places in order.values()])
        kinds = np.array([kind for kind, _ in order])
        if scale != 1.0:
            raw[kinds == "gradient"] = measuring.divide(raw[kinds == "gradient"], scale)
        rows = measuring.to_statistics(raw)
        cosines = dict(zip(step.row.pop("cosine_names", ()), found.get("cosines", ()), strict=False))
        eps_shares = dict(zip(step.row.pop("eps_names", ()), found.get("eps_share", ()), strict=False))
        for index, (kind, name) in enumerate(order):
            if kind == "gradient" and name in cosines:
                rows[index, STATISTICS.index("cosine")] = cosines[name]
            elif kind == "adam_v" and name in eps_shares:
                rows[index, STATISTICS.index("eps_share")] = eps_shares[name]
            elif kind == "output" and f"dead {name}" in found:
                rows[index, STATISTICS.index("dead")] = found[f"dead {name}"].sum()
        for kind, column in (("gradient", "grad_norm"), ("weight", "weight_norm"), ("update", "update_norm")):
            if column not in step.row and (kinds == kind).any():
                step.row[column] = measuring.whole_norm(raw[kinds == kind])
        numbers = np.array([self._writer.add_tensor(kind, name) for kind, name in order])
        self._writer.write_frame(STATISTICS_FRAME, number, numbers, rows)
        self._write_distributions(step, number, found)

    def _write_distributions(self, step: OpenStep, number: int, found: dict[str, np.ndarray]) -> None:
        rows: dict[int, np.ndarray] = {}
        for group, places in enumerate(step.counted):
            keys = [step.rows[place] for place in places]
            self._count_new(rows, keys, found[f"distribution {group}"], np.asarray)
        for start in _starts(found, "sample "):
            sample = found[f"sample {start}"]
            self._count_new(rows, step.rows[start : start + len(sample)], sample, measuring.distributions)
        if rows:
            numbers = np.array(list(rows))
            self._writer.write_frame(DISTRIBUTION_FRAME, number, numbers, np.stack(list(rows.values())))

    def _count_new(
        self, rows: dict[int, np.ndarray], keys: list[tuple[str, str]], found: np.ndarray, count: Callable
    ) -> None:
        """Of a module that is called several times the first call stands for all."""
        places: dict[int, int] = {}
        for place, key in enumerate(keys):
            places.setdefault(self._writer.add_tensor(*key), place)
        new = [number for number in places if number not in rows]
        if new:
            rows.update(zip(new, count(found[[places[number] for number in new]]), strict=True))

    def _write_norms(self, number: int, names: list[str], norms: np.ndarray) -> None:
        rows = np.full((len(names), len(STATISTICS)), np.nan)
        rows[:, STATISTICS.index("norm")] = norms
        numbers = np.array([self._writer.add_tensor("gradient", name) for name in names])
        self._writer.write_frame(STATISTICS_FRAME, number, numbers, rows)


def _starts(found: dict[str, np.ndarray], prefix: str) -> list[int]:
    return sorted(int(key[len(prefix) :]) for key in found if key.startswith(prefix))
