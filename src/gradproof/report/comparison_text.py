"""`gradproof compare` for the terminal: the curves over each other, then what differs, then the code."""

from __future__ import annotations

from collections.abc import Sequence

from gradproof.errors import plain
from gradproof.record.run import Run
from gradproof.report.comparison import Comparison, Health, read_curve
from gradproof.report.plot import Curve, render_plot

NAMES = 42  # characters for what is compared; the values stand right of it
MOST_CHANGES, MOST_CODE = 20, 60


def render_comparison(found: Comparison, runs: Sequence[Run], width: int, color: bool) -> str:
    """The whole comparison as text."""
    column = max(12, min(26, (width - NAMES) // len(runs)))
    curves = [Curve(plain(label), *read_curve(run)) for label, run in zip(found.labels, runs, strict=True)]
    parts = [
        f"gradproof · {len(runs)} runs · loss",
        render_plot(curves, width, color=color),
        _health(found, column),
        _findings(found, column),
        _differences(found, column),
        _tensors(found, column),
        _code(found),
        "next: gradproof diagnose " + str(next(_worst_first(found))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _row(name: str, values: Sequence[str], column: int) -> str:
    cells = [_short(plain(value), column - 2) for value in values]
    return (
        f"  {_short(plain(name), NAMES - 3):{NAMES - 2}}" + "".join(f"{cell:{column}}" for cell in cells)
    ).rstrip()


def _short(text: str, width: int) -> str:
    """The end says more than the beginning: names of layers and files differ there."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _health(found: Comparison, column: int) -> str:
    health = found.health
    lines = [
        _row("", found.labels, column),
        _row(
            "health",
            [each.worst or ("good" if each.complete else "nothing found") for each in health],
            column,
        ),
        _row("steps", [str(each.steps) for each in health], column),
        _row("loss: first", [f"{each.first_loss:.4g}" for each in health], column),
        _row("      last (median of a 20th)", [f"{each.last_loss:.4g}" for each in health], column),
        _row("      best", [f"{each.best_loss:.4g}" for each in health], column),
    ]
    same = ["" if n == 0 else _parting(found, n) for n in range(len(health))]
    return "\n".join([*lines, _row("      parts from the first at", same, column)])


def _parting(found: Comparison, number: int) -> str:
    step = found.apart_since[number]
    common = min(found.health[0].steps, found.health[number].steps)
    return f"step {step}" if step is not None else "never" if common else "–"


def _findings(found: Comparison, column: int) -> str:
    if not found.findings:
        return "Findings: none in any run"
    rows = [_row(row.id, [level or "–" for level in row.levels], column) for row in found.findings]
    return "\n".join(["Findings", *rows])


def _differences(found: Comparison, column: int) -> str:
    if not found.differences:
        return "What changed: nothing that run.json knows of"
    lines, group = ["What changed"], ""
    for difference in found.differences[:MOST_CHANGES]:
        if difference.group != group:
            group = difference.group
            lines.append(f" {group}")
        lines.append(
            _row(f" {difference.what}", [v if v is not None else "–" for v in difference.values], column)
        )
    if len(found.differences) > MOST_CHANGES:
        lines.append(f"  … and {len(found.differences) - MOST_CHANGES} more (--json has them all)")
    return "\n".join(lines)


def _tensors(found: Comparison, column: int) -> str:
    if not found.tensors:
        return ""
    rows = [
        _row(f"{each.kind} of {each.name}", [f"{value:.3g}" for value in each.values], column)
        for each in found.tensors
    ]
    return "\n".join(["Norms that differ most, the median over the measured steps", *rows])


def _code(found: Comparison) -> str:
    lines = [line for code in found.code if code for line in code.splitlines()]
    if not lines:
        return ""
    more = [f"… {len(lines) - MOST_CODE} more lines"] if len(lines) > MOST_CODE else []
    return "\n".join(["The script", *(f"  {plain(line)}" for line in lines[:MOST_CODE]), *more])


def _worst_first(found: Comparison):
    order: dict[str | None, int] = {"problem": 0, "warning": 1, "note": 2, None: 3}

    def gravity(pair: tuple[Health, str]) -> int:
        return order[pair[0].worst]

    return (path for _, path in sorted(zip(found.health, found.paths, strict=True), key=gravity))
