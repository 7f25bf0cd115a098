"""Curves in a terminal: dots of braille where colours tell them apart, one character a curve where nothing does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COLORS = ("36", "33", "35", "32", "34", "31")
MARKS = "•×+o▲"
SPARKS = "▁▂▃▄▅▆▇█"
LEGEND_WIDTH = 12  # columns in front of the plot: a number and the axis


class Curve(NamedTuple):
    label: str
    steps: np.ndarray
    values: np.ndarray


def render_plot(curves: Sequence[Curve], width: int = 96, height: int = 12, color: bool = False) -> str:
    """Curves over steps, the extremes of each column kept; `!` below marks steps that are not finite.

    A scale of powers of ten is chosen where all values are positive and span more than a factor of 100.
    """
    curves = [_in_order(curve) for curve in curves if len(curve.steps)]
    finite = np.concatenate([c.values[np.isfinite(c.values)] for c in curves] or [np.empty(0)])
    if not curves:
        return "  (nothing was measured)"
    dotted = color or len(curves) == 1  # braille dots of several curves need colours
    columns = max(10, width - LEGEND_WIDTH)
    across, down = (2 * columns, 4 * height) if dotted else (columns, height)
    first, last = (int(f(c.steps[end] for c in curves)) for f, end in ((min, 0), (max, -1)))
    logarithmic = bool(len(finite)) and finite.min() > 0 and finite.max() > 100 * finite.min()
    low, high = _range(np.log10(finite) if logarithmic else finite)
    cells = np.full((height, columns), " ", dtype=object)
    trouble = np.zeros(columns, dtype=bool)
    for number, curve in enumerate(curves):
        place = ((curve.steps - first) * (across - 1) // max(1, last - first)).astype(int)
        values = np.where(np.isfinite(curve.values), curve.values, np.nan).astype(np.float64)
        trouble[place[np.isnan(values)] * columns // across] = True
        values = np.log10(values) if logarithmic else values
        rows = (high / 2 - values / 2) / (high / 2 - low / 2) * (down - 1)  # halves do not overflow
        _draw(cells, _trace(place, rows, across, down), number, dotted, color)
    ends = [10**end if logarithmic else end for end in (high, low / 2 + high / 2, low)]
    lines = []
    for row in range(height):
        label = dict(zip((0, height // 2, height - 1), ends, strict=True)).get(row) if len(finite) else None
        lines.append(f"{'' if label is None else f'{label:.3g}':>9} ┤ {''.join(cells[row])}".rstrip())
    if trouble.any():
        lines.append(f"{'nan, inf':>9} ┤ {''.join('!' if t else ' ' for t in trouble)}".rstrip())
    gap = columns - len(str(first)) - len(str(last))
    lines.append(f"{'step':>9} └ {first}{' ' * max(1, gap)}{last}")
    words = _legend(curves, dotted, color) if len(curves) > 1 else []
    words += ["(log scale)"] if logarithmic else []
    return "\n".join(lines + ([" " * LEGEND_WIDTH + "   ".join(words)] if words else []))


def sparkline(values: np.ndarray, width: int = 24) -> str:
    """A curve in one line; `!` where it is not finite.

    >>> sparkline(np.array([1.0, 2.0, 3.0, np.nan]))
    '▁▅█!'
    """
    values = np.asarray(values, dtype=np.float64)
    groups = np.array_split(values, min(width, len(values))) if len(values) else []
    low, high = _range(values[np.isfinite(values)])
    return "".join(
        SPARKS[round((float(np.mean(g)) - low) / (high - low) * 7)] if np.isfinite(g).all() else "!"
        for g in groups
    )


def _in_order(curve: Curve) -> Curve:
    """By step: what was kept in case of trouble is written later than what came after it."""
    order = np.argsort(curve.steps, kind="stable")
    return Curve(curve.label, curve.steps[order], curve.values[order])


def _range(values: np.ndarray) -> tuple[float, float]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    room = max(0.5, abs(low) * 1e-6)  # around one value: at 1e19, a half is nothing
    return (low, high) if high > low else (low - room, high + room)


def _trace(place: np.ndarray, rows: np.ndarray, across: int, down: int) -> np.ndarray:
    """Which dots a curve covers: each column from its lowest to its highest value, joined to the one before."""
    dots = np.zeros((down, across), dtype=bool)
    pieces = np.split(np.arange(len(rows)), np.flatnonzero(np.diff(np.isfinite(rows))) + 1)
    for piece in pieces:  # a line does not run through what is not finite
        if not len(piece) or not np.isfinite(rows[piece[0]]):
            continue
        between = np.setdiff1d(np.arange(place[piece[0]], place[piece[-1]]), place[piece])
        columns = np.concatenate([place[piece], between])
        height = (
            np.concatenate([rows[piece], np.interp(between, place[piece], rows[piece])]).round().astype(int)
        )
        before = height[0]
        for column in np.unique(columns):
            here = height[columns == column]
            dots[min(before, here.min()) : max(before, here.max()) + 1, column] = True
            before = here[-1]
    return dots


def _draw(cells: np.ndarray, dots: np.ndarray, number: int, dotted: bool, color: bool) -> None:
    height, columns = cells.shape
    blocks = dots.reshape(height, dots.shape[0] // height, columns, dots.shape[1] // columns)
    for row, column in np.argwhere(blocks.any(axis=(1, 3))):
        text = MARKS[number % len(MARKS)]
        if dotted:
            # braille numbers its dots down the left side, then the right; the bottom pair came later
            bits = blocks[row, :, column, :].T.ravel()[[0, 1, 2, 4, 5, 6, 3, 7]]
            text = chr(0x2800 + int(bits @ (1 << np.arange(8))))
        cells[row, column] = f"\x1b[{COLORS[number % len(COLORS)]}m{text}\x1b[0m" if color else text


def _legend(curves: Sequence[Curve], dotted: bool, color: bool) -> list[str]:
    words = []
    for number, curve in enumerate(curves):
        mark = "━" if dotted else MARKS[number % len(MARKS)]
        mark = f"\x1b[{COLORS[number % len(COLORS)]}m{mark}\x1b[0m" if color else mark
        words.append(f"{mark} {curve.label}")
    return words
