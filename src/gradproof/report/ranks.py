"""What the page shows of a training's ranks: a curve or two of each, how far each is from the others, who is slow."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gradproof.record.flight import read_flight
from gradproof.record.ranks import Ranks

MOST_RANKS, POINTS = 64, 120
STILL, SILENT = 10.0, 5.0  # seconds without an event, without a sign of life


def pack_ranks(ranks: Ranks | None) -> dict[str, Any] | None:
    """Plain data; None of one process alone. Of very many ranks those that stand out, and the first ones."""
    if ranks is None or not len(ranks.steps):
        return None
    away = distance(ranks)
    order = sorted(range(len(ranks.numbers)), key=lambda row: (-np.nanmax(away[row], initial=0.0), row))
    shown = sorted(order[:MOST_RANKS])
    columns = np.unique(
        np.linspace(0, len(ranks.steps) - 1, min(POINTS, len(ranks.steps))).round().astype(int)
    )
    gradients = own_part(ranks)
    return {
        "world": ranks.world,
        "missing": ranks.missing[:20],
        "steps": ranks.steps[columns].tolist(),
        "slowest": slowest(ranks),
        "compared": is_compared(ranks),
        "ranks": [
            {
                "rank": ranks.numbers[row],
                "last": ranks.last[ranks.numbers[row]],
                "loss": numbers(ranks.tables["loss"][row, columns]),
                "gradient": numbers(np.sqrt(gradients[row, columns])),
                "away": numbers(stretches(away[row], columns)),
                "now": what_it_does(ranks, ranks.numbers[row]),
            }
            for row in shown
        ],
    }


def distance(ranks: Ranks) -> np.ndarray:
    """How far each rank's weights and gradients are from the median of all, relative; 0 of sharded ones."""
    away = np.zeros(ranks.tables["weight"].shape)
    if not is_compared(ranks):
        return away
    for kind in ("weight", "gradient"):
        table = ranks.tables[kind]
        known = np.isfinite(table).sum(axis=0) > 1
        if known.any():
            part = np.where(np.isfinite(table[:, known]), table[:, known], np.nan)
            middle = np.nanmedian(part, axis=0)
            away[:, known] = np.fmax(away[:, known], np.abs(part - middle) / (np.abs(middle) + 1e-300) / 2)
    return away


def stretches(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The highest value from each column to the next: a single step that stands out stays."""
    return np.maximum.reduceat(values, columns)


def is_compared(ranks: Ranks) -> bool:
    """Whether all ranks hold the same parameters, whole."""
    return not ranks.sharded and len(ranks.groups()) == 1


def own_part(ranks: Ranks) -> np.ndarray:
    """Σx² of the whole gradient if all parts were like a rank's own."""
    plain, parts = ranks.tables["gradient"], ranks.tables["gradient_parts"]
    return np.where(np.isnan(plain) & np.isnan(parts), np.nan, np.nan_to_num(plain) + np.nan_to_num(parts))


def slowest(ranks: Ranks) -> dict[str, Any] | None:
    """Who takes longest until its backward, and what the others take; None where that was not measured."""
    own = {
        rank: float(np.nanmedian(row))
        for rank, row in zip(ranks.numbers, ranks.tables["own"], strict=True)
        if np.isfinite(row).any()
    }
    if len(own) < 2:
        return None
    rank = max(own, key=lambda each: own[each])
    others = [seconds for each, seconds in own.items() if each != rank]
    return {"rank": rank, "own": own[rank], "others": float(np.median(others))}


def what_it_does(ranks: Ranks, rank: int) -> str:
    """In words: it has ended, runs, stands still, or is gone, and where."""
    if "ended" in ranks.infos[rank]:
        return "ended"
    flight = read_flight(ranks.paths[rank])
    if flight is None or not flight.events:
        return "no end recorded"
    where = f"{flight.events[-1]}" + (f" ({flight.lines})" if flight.lines else "")
    if flight.still >= STILL:
        return f"stood still for {flight.still:.0f} s at {where}"
    if time.time() - flight.beat > SILENT:
        return f"gone without a word, last seen at {where}"
    return f"running: {where}"


def numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]
