"""Small pictures as SVG: panels side by side, each a heat map, dots, lines or bars, with words and numbers as text.

On a card of its own colour, so that a page may be light or dark. No library: what a picture of the docs needs is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 300, 190  # of a panel's plot
LEFT, TOP, RIGHT, BOTTOM = 58, 40, 22, 46  # around it
INK, FAINT, PAPER = "#1c2733", "#d5dbe1", "#fbfcfd"
COLOURS = ("#2166ac", "#c2410c", "#3f7d20", "#7c3aed")
FONT = "font-family='system-ui, sans-serif' font-size='12'"

Place = Callable[[float], float]


@dataclass
class Panel:
    """One plot: its title, the words at its axes, and what was drawn so far."""

    title: str
    across: str = ""
    up: str = ""
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> None:
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' fill='{INK}' text-anchor='{anchor}' {more}>{escape(words)}</text>"
        )

    def frame(self) -> None:
        self.parts.append(f"<rect width='{WIDTH}' height='{HEIGHT}' fill='none' stroke='{FAINT}'/>")

    def render(self) -> str:
        self.text(WIDTH / 2, -14, self.title, more="font-weight='600'")
        self.text(WIDTH / 2, HEIGHT + 36, self.across)
        self.text(-HEIGHT / 2, -44, self.up, more="transform='rotate(-90)'")
        return "".join(self.parts)


def render_picture(*panels: Panel) -> str:
    """The panels side by side, as one SVG."""
    step = LEFT + WIDTH + RIGHT
    width, height = len(panels) * step, TOP + HEIGHT + BOTTOM
    groups = [
        f"<g transform='translate({number * step + LEFT} {TOP})'>{panel.render()}</g>"
        for number, panel in enumerate(panels)
    ]
    card = f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' viewBox='0 0 {width} {height}' {FONT}>"
    return "\n".join([head, card, *groups, "</svg>\n"])


def draw_heat(values: Sequence[Sequence[float]], title: str, across: str = "", up: str = "") -> Panel:
    """A cell for each number, the darker the larger; the first row on top."""
    panel = Panel(title, across, up)
    most = max((value for row in values for value in row), default=0.0) or 1.0
    rows, columns = len(values), len(values[0])
    width, height = WIDTH / columns, HEIGHT / rows
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            share = max(0.0, value / most)
            panel.parts.append(
                f"<rect x='{j * width:.1f}' y='{i * height:.1f}' width='{width:.1f}' height='{height:.1f}' "
                f"fill='{COLOURS[0]}' fill-opacity='{share:.2f}'/>"
            )
    panel.frame()
    for words, x in (("0", width / 2), (str(columns - 1), WIDTH - width / 2)):
        panel.text(x, HEIGHT + 16, words)
    for words, y in (("0", height / 2), (str(rows - 1), HEIGHT - height / 2)):
        panel.text(-8, y + 4, words, "end")
    return panel


def draw_dots(
    xs: Sequence[float],
    ys: Sequence[float],
    title: str,
    across: str = "",
    up: str = "",
    within: Sequence[float] = (),
) -> Panel:
    """A dot for each pair; `within` are heights that the axis has, whatever comes."""
    panel = Panel(title, across, up)
    x, y = axes(panel, xs, [*ys, *within])
    for a, b in zip(xs, ys, strict=True):
        panel.parts.append(
            f"<circle cx='{x(a):.1f}' cy='{y(b):.1f}' r='2.6' fill='{COLOURS[0]}' fill-opacity='0.75'/>"
        )
    return panel


def draw_lines(
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    title: str,
    across: str = "",
    up: str = "",
    decades: bool = False,
) -> Panel:
    """(name, across, up): lines; with `decades`, by the logarithm."""
    panel = Panel(title, across, up)
    heights = [v for _, _, ys in series for v in ys]
    x, y = axes(panel, [v for _, xs, _ in series for v in xs], heights, decades)
    for (_, xs, ys), colour in zip(series, COLOURS, strict=False):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        panel.parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>")
    legend(panel, [name for name, _, _ in series])
    return panel


def draw_bars(values: Sequence[tuple[str, float]], title: str, across: str = "", up: str = "") -> Panel:
    """(name, height): a bar for each, from zero."""
    panel = Panel(title, across, up)
    _, y = axes(panel, [], [0.0, *(value for _, value in values)])
    width = WIDTH / len(values)
    for number, (name, value) in enumerate(values):
        top, low = sorted((y(value), y(0.0)))
        panel.parts.append(
            f"<rect x='{(number + 0.15) * width:.1f}' y='{top:.1f}' width='{0.7 * width:.1f}' "
            f"height='{low - top:.1f}' fill='{COLOURS[0]}'/>"
        )
        panel.text((number + 0.5) * width, HEIGHT + 16, name)
    return panel


def draw_source(lines: Sequence[tuple[str, int]], title: str) -> Panel:
    """Lines of a script, and how often something happened at each."""
    panel = Panel(title)
    high = HEIGHT / len(lines)
    for number, (text, times) in enumerate(lines):
        y = number * high
        if times:
            panel.parts.append(
                f"<rect y='{y:.1f}' width='{WIDTH}' height='{high:.1f}' fill='{COLOURS[1]}' fill-opacity='0.2'/>"
            )
            panel.text(WIDTH - 6, y + 0.75 * high, f"{times} ×", "end")
        small = f"font-family='monospace' font-size='{0.68 * high:.1f}' xml:space='preserve'"
        panel.text(6, y + 0.75 * high, text, "start", small)
        panel.text(-6, y + 0.75 * high, str(number + 1), "end", small)
    panel.frame()
    return panel


def axes(
    panel: Panel, xs: Sequence[float], ys: Sequence[float], decades: bool = False
) -> tuple[Place, Place]:
    """Where a number stands across and up; the least and the largest are written where they stand."""
    panel.frame()
    across = scale(xs, 0, WIDTH)
    for value in {min(xs), max(xs)} if xs else ():
        panel.text(across(value), HEIGHT + 16, f"{value:.3g}")
    if not decades:
        up = scale(ys, HEIGHT, 0)
    else:
        of_size = scale([math.log10(value) for value in ys if value > 0], HEIGHT, 0)

        def up(value: float) -> float:
            return of_size(math.log10(value)) if value > 0 else HEIGHT

    for value in {min(ys), max(ys)}:
        panel.text(-6, up(value) + 4, f"{value:.0e}" if decades else f"{value:.3g}", "end")
    return across, up


def scale(values: Sequence[float], first: float, last: float) -> Place:
    """From the least to the largest, with some room at both ends; from zero where that is the least."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.05 * ((high - low) or abs(high) or 1.0)
    low, high = low - room * (low != 0), high + room
    return lambda value: first + (last - first) * (value - low) / (high - low)


def legend(panel: Panel, names: Sequence[str]) -> None:
    named = [(name, colour) for name, colour in zip(names, COLOURS, strict=False) if name]
    if named:
        wide, high = 28 + 7 * max(len(name) for name, _ in named), 8 + 16 * len(named)
        panel.parts.append(
            f"<rect x='{WIDTH - wide}' width='{wide}' height='{high}' fill='{PAPER}' fill-opacity='0.85'/>"
        )
    for number, (name, colour) in enumerate(named):
        y = 16 + 16 * number
        panel.parts.append(f"<rect x='{WIDTH - 16}' y='{y - 9}' width='9' height='9' fill='{colour}'/>")
        panel.text(WIDTH - 22, y, name, "end")
