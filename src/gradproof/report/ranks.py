"""What the page shows of a training's ranks: a curve or two of each, how far each is from the others, who is slow."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradproof.record.flight import read_flight
from gradproof.record.ranks import Ranks

MOST_RANKS, POINTS = 64, 120


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
    own = ranks.tables["own"]
    known = np.isfinite(own).any(axis=0)
    typical = [
        float(np.nanmedian(own[row])) if np.isfinite(own[row]).any() else None for row in range(len(own))
    ]
    return {
        "world": ranks.world,
        "missing": ranks.missing[:20],
        "steps": ranks.steps[columns].tolist(),
        "slowest": slowest(typical) if known.any() else None,
        "ranks": [
            {
                "rank": ranks.numbers[row],
                "last": ranks.last[ranks.numbers[row]],
                "ended": "ended" in ranks.infos[ranks.numbers[row]],
                "own": typical[row],
                "loss": numbers(ranks.tables["loss"][row, columns]),
                "gradient": numbers(np.sqrt(ranks.tables["gradient"][row, columns])),
                "away": numbers(stretches(away[row], columns)),
                "stands": stands(ranks, ranks.numbers[row]),
            }
            for row in shown
        ],
    }


def distance(ranks: Ranks) -> np.ndarray:
    """How far each rank's weights and gradients are from the median of all, relative; 0 of sharded ones."""
    away = np.zeros(ranks.tables["weight"].shape)
    if ranks.sharded or len(ranks.groups()) > 1:
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


def slowest(typical: list[float | None]) -> int:
    return int(np.argmax([0.0 if value is None else value for value in typical]))


def stands(ranks: Ranks, rank: int) -> str | None:
    """Of a rank whose end is not recorded: the last thing that is known of it."""
    if "ended" in ranks.infos[rank]:
        return None
    flight = read_flight(ranks.paths[rank])
    if flight is None or not flight.events:
        return None
    return f"{flight.events[-1]}" + (f" ({flight.lines})" if flight.lines else "")


def numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values]
