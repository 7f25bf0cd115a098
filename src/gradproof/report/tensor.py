"""`gradproof show`: a column of steps.csv or the tensors that a pattern names, as numbers and as a plot."""

from __future__ import annotations

import re
import textwrap

import numpy as np

from gradproof.errors import UserError, plain
from gradproof.record.last_steps import last_norms
from gradproof.record.run import Run
from gradproof.record.schema import EXPONENT_LOW, KINDS, STATISTICS, STEP_COLUMNS, TEXT_COLUMNS
from gradproof.report.comparison import read_curve
from gradproof.report.plot import LEGEND_WIDTH, Curve, render_plot, sparkline

COLUMNS = tuple(name for name in STEP_COLUMNS if name not in ("step", *TEXT_COLUMNS))
COUNTS = ("nan", "inf", "zero", "subnormal", "eps_share", "dead")  # not worth a word where they are 0
PLOTTED = ("output", "output_gradient", "gradient", "weight", "update")  # the others get one line
MOST_LISTED = 40
MOST_STEPS = 8
NO_BREAK = "\u00a0"


def render_overview(run: Run, width: int, color: bool) -> str:
    """The loss, and what else there is to show."""
    names = list(dict.fromkeys(tensor["name"] for tensor in run.tensors))
    measured = [column for column in COLUMNS if run.seen[column].any()]
    lines = [render_column(run, "loss", width, color), "", f"columns: {', '.join(measured) or 'none'}"]
    lines.append(f"tensors: {len(names)}, measured at {len(run.frames)} of {len(run)} steps")
    lines += [f"  {plain(name)}" for name in names[:MOST_LISTED]]
    if len(names) > MOST_LISTED:
        lines.append(f"  … and {len(names) - MOST_LISTED} more")
    lines += render_last_steps(run)
    if names:
        lines.append(f"next: gradproof show {plain(str(run.path))} {plain(names[-1])}")
    return "\n".join(lines)


def render_last_steps(run: Run) -> list[str]:
    """Of a rank that has died, or is still at work: norms of its last steps, and the largest of each kind."""
    if "ended" in run.info:
        return []
    steps = last_norms(run.path, run.info)
    lines = (
        [f"the last {len(steps)} steps, tensor by tensor; norms of all, and the largest:"] if steps else []
    )
    for step, norms in list(steps.items())[-MOST_STEPS:]:
        parts = []
        for kind in ("gradient", "weight"):
            found = {name: norm for (what, name), norm in norms.items() if what == kind}
            if found:
                most = max(found, key=lambda name: (np.isnan(found[name]), found[name]))
                whole = float(np.sqrt(np.square([*found.values()]).sum()))
                parts.append(f"{kind} {whole:.4g} ({plain(most)} {found[most]:.4g})")
        lines.append(f"  step {step}: {' · '.join(parts)}")
    return lines


def render_shown(run: Run, pattern: str, statistic: str, width: int, color: bool) -> str:
    """What a name, a part of one or a regular expression stands for: a column, a tensor, or a list of tensors."""
    if pattern in COLUMNS:
        return render_column(run, pattern, width, color)
    names = find_names(run, pattern)
    if len(names) == 1:
        return render_tensor(run, names[0], statistic, width, color)
    return render_list(run, pattern, names, statistic)


def find_names(run: Run, pattern: str) -> list[str]:
    """The exact name if there is one, else every name in which the pattern is found."""
    names = list(dict.fromkeys(tensor["name"] for tensor in run.tensors))
    if pattern in names:
        return [pattern]
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error:
        found = [name for name in names if pattern in name]
    if not found:
        some = ", ".join(map(plain, names[:6])) or "no tensors"
        raise UserError(
            f"{run.path} has no tensor or column that matches {pattern!r}; it has {some}"
            f"{' …' if len(names) > 6 else ''} (`gradproof show {plain(str(run.path))}` lists them)"
        )
    return found


def render_column(run: Run, column: str, width: int, color: bool) -> str:
    steps, values = read_curve(run, column)
    head = f"{column} · {plain(str(run.path))} · {_describe(steps, values)}"
    return f"{head}\n{render_plot([Curve(column, steps, values)], width, color=color)}"


def render_tensor(run: Run, name: str, statistic: str, width: int, color: bool) -> str:
    """One tensor: one statistic of each of its kinds over the steps, and all statistics of the last measured step."""
    kinds = [kind for kind in KINDS if name in (run.tensors[n]["name"] for n in run.numbers(kind))]
    parts = [f"{plain(name)}{describe_shape(run, name)} · {plain(str(run.path))}"]
    for kind in kinds:
        steps, values = run.series(kind, name, statistic)
        if not len(steps):
            continue
        parts.append(f"\n{statistic} of the {kind.replace('_', ' ')}: {_describe(steps, values)}")
        if kind in PLOTTED:
            parts.append(render_plot([Curve(kind, steps, values)], width, 5, color))
        else:
            parts.append(" " * LEGEND_WIDTH + sparkline(values, 64))
        parts += _last_step(run, kind, name, width)
    if len(parts) == 1:
        have = [s for s in STATISTICS if any(len(run.series(kind, name, s)[0]) for kind in kinds)]
        raise UserError(f"{statistic} of {name} was never measured; {', '.join(have) or 'nothing'} was")
    return "\n".join(parts)


def describe_shape(run: Run, name: str) -> str:
    """Shape, dtype and kind of module, as far as run.json knows them."""
    known = [each for each in (*run.tensors, *run.info.get("parameters", [])) if each["name"] == name]
    found = {key: each[key] for each in known for key in ("module", "shape", "dtype") if each.get(key)}
    return "".join(f" · {value}" for value in found.values())


def _last_step(run: Run, kind: str, name: str, width: int) -> list[str]:
    """Every statistic of the last step that has more than a norm, and where the entries' exponents lie."""
    number = next(n for n in run.numbers(kind) if run.tensors[n]["name"] == name)
    texts = []
    for frame in reversed(run.frames):
        row = frame.values[frame.numbers == number]
        if len(row) and np.isfinite(row[0]).sum() > 1:
            known = [(s, v) for s, v in zip(STATISTICS, row[0], strict=True) if not np.isnan(v)]
            shown = [f"{s}{NO_BREAK}{v:.3g}" for s, v in known if v or s not in COUNTS]
            texts.append(f"step {frame.step}: {' · '.join(shown)}")
            break
    steps, _, exponents = run.percentiles(number)
    used = (
        1 + np.flatnonzero(exponents[-1][1:]) if len(steps) else np.empty(0, int)
    )  # the first bin has the zeros
    if len(used):
        low, high = used[0], used[-1]
        ends = [EXPONENT_LOW + 2 * int(place) for place in (low, high)]
        bars = sparkline(exponents[-1][low : high + 1], 64)
        texts.append(f"step {steps[-1]}: sizes of the entries from 2^{ends[0]} {bars} to 2^{ends[1]}")
    indent = " " * LEGEND_WIDTH
    filled = [textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent) for text in texts]
    return [text.replace(NO_BREAK, " ") for text in filled]


def render_list(run: Run, pattern: str, names: list[str], statistic: str) -> str:
    """Many tensors: a line each with first, median, last value and a sparkline, kind by kind."""
    wide = min(48, max(len(plain(name)) for name in names))
    lines = [f"{len(names)} tensors match {pattern!r} · {statistic} · {plain(str(run.path))}"]
    shown = 0
    for kind in KINDS:
        table = run.table(kind, statistic)
        rows = []
        for name, values in zip(table.names, table.values.T, strict=True):
            values = values[~np.isnan(values)]
            if name in names and len(values) and shown < MOST_LISTED:
                shown += 1
                numbers = f"{values[0]:>10.3g} {np.median(values):>10.3g} {values[-1]:>10.3g}"
                rows.append(f"  {plain(name):{wide}} {numbers}  {sparkline(values)}")
        if rows:
            head = f"{kind.replace('_', ' ')}"
            lines += ["", f"  {head:{wide}} {'first':>10} {'median':>10} {'last':>10}", *rows]
    if shown >= MOST_LISTED:
        lines.append(f"  … the first {MOST_LISTED} lines; a longer pattern shows fewer")
    return "\n".join([*lines, f"next: gradproof show {plain(str(run.path))} {plain(names[0])}"])


def _describe(steps: np.ndarray, values: np.ndarray) -> str:
    """How many steps, from where to where, the extremes with their steps, and what is not finite."""
    if not len(steps):
        return "not measured"
    finite = np.isfinite(values)
    text = f"{len(steps)} step{'s' * (len(steps) > 1)}"
    if finite.any():
        low, high = (
            int(f(np.where(finite, values, d))) for f, d in ((np.argmin, np.inf), (np.argmax, -np.inf))
        )
        text += f", {values[0]:.4g} at {steps[0]} to {values[-1]:.4g} at {steps[-1]}"
        text += f"; least {values[low]:.4g} at {steps[low]}, most {values[high]:.4g} at {steps[high]}"
    if not finite.all():
        text += f"; not finite at {int((~finite).sum())} steps, first {steps[~finite][0]}"
    return text
