"""Symptoms of gradients and updates that are written by hand, in C or CUDA: read off the statistics alone.

PyTorch's own optimizers and backwards leave other traces of the same mistakes, which other symptoms read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.record.run import Run

MEASURED = 3  # steps without which nothing is said
MOST_NAMED = 4
# of a weight's size: a shorter step is lost in float32
LAST_DIGIT = 1e-7


def stays_zero(run: Run) -> Iterator[Symptom]:
    """Matrices that are zero and whose gradient is zero, at every step: each waits for another one to move."""
    names = zero_matrices(run)
    if names:
        text = (
            f"{listed(names)}: exactly zero at every measured step, weight and gradient; what is multiplied by zero "
            "learns nothing"
        )
        yield Symptom("stays_zero", "problem", text, 0, names[0], ("bad-init/zeros",))


def zero_matrices(run: Run) -> list[str]:
    weights, gradients = largest_ever(run, "weight"), largest_ever(run, "gradient")
    wide = {t["name"] for t in run.tensors if t["kind"] == "weight" and len(t.get("shape", ())) >= 2}
    return [name for name, size in weights.items() if name in wide and size == 0 and gradients.get(name) == 0]


def layer_without_gradient(run: Run) -> Iterator[Symptom]:
    """Layers whose gradient is exactly zero at every step, while that of others is not."""
    if not run.by_hand or zero_matrices(run):
        return
    sizes = largest_ever(run, "gradient")
    shapes = {t["name"]: t.get("shape", ()) for t in run.tensors if t["kind"] == "gradient"}
    silent = [name for name, size in sizes.items() if size == 0]
    layers: dict[str, list[str]] = {}
    for name in sizes:
        layers.setdefault(layer_of(name), []).append(name)
    whole = [layer for layer, names in layers.items() if set(names) <= set(silent)]
    matrices = [name for name in silent if len(shapes[name]) >= 2]
    where = [*whole, *(name for name in matrices if layer_of(name) not in whole)]
    if not where or not matrices:
        return
    others = [layer for layer in layers if layer not in whole]
    if len(silent) == len(sizes):
        where, text = (
            ["every tensor"],
            "every gradient is exactly zero at every measured step: no backward is called",
        )
    else:
        count = sum(layer_of(name) in whole or name in matrices for name in silent)
        text = (
            f"the gradient of {listed(where)} ({count} tensor{'s' if count > 1 else ''}) is exactly zero at every "
            f"measured step, that of {listed(others)} is not: the backward is not called there, or writes elsewhere"
        )
    yield Symptom("no_layer_gradient", "problem", text, 0, listed(where), ("wrong-gradient/never-written",))


def never_moves(run: Run) -> Iterator[Symptom]:
    """Weights that get gradients and of which no bit changes, all or some."""
    rates = run.steps["lr"][np.isfinite(run.steps["lr"])]
    if not run.by_hand or len(run) < 10 or (len(rates) and not rates.any()):
        return
    weights, gradients = largest_ever(run, "weight"), largest_ever(run, "gradient")
    moves = which_move(run)
    still = [name for name, moved in moves.items() if not moved and gradients.get(name)]
    if not still:
        return
    rate = float(rates.max()) if len(rates) else 1.0
    seen = any(rate * gradients[name] > LAST_DIGIT * weights.get(name, 0.0) for name in still)
    moving = [name for name, moved in moves.items() if moved]
    if not moving:
        text = f"gradients arrive, and no bit of the {len(still)} weights changes in {len(run)} steps"
        if len(rates):
            text += f" at a learning rate of up to {rate:.2g}"
        id, where = "param-not-updated/no-change", "every weight"
    else:
        layers = list(dict.fromkeys(map(layer_of, still)))
        text = (
            f"gradients arrive at {len(still)} tensors ({listed(layers)}), and no bit of them changes in {len(run)} "
            f"steps, while {listed(moving)} move{'s' if len(moving) == 1 else ''}"
        )
        id, where = "param-not-updated/not-in-optimizer", listed(layers)
    suspects = (id,) if seen else ("lr-too-low/tiny-updates", id)
    yield Symptom("never_moves", "problem", text, 0, where, suspects)


def begins_alike(run: Run) -> Iterator[Symptom]:
    """Matrices of one shape that begin with the same numbers and part later: drawn from one seed, each anew."""
    if not run.by_hand:
        return
    tables = {name: run.table("weight", name) for name in ("min", "max", "mean", "std", "norm")}
    steps, names = tables["std"].steps, tables["std"].names
    if len(steps) < MEASURED or steps[0] != 0:
        return
    shapes = {t["name"]: tuple(t.get("shape", ())) for t in run.tensors if t["kind"] == "weight"}
    groups: dict[tuple, list[int]] = {}
    for column, name in enumerate(names):
        first = tuple(float(table.values[0, column]) for table in tables.values())
        if len(shapes[name]) >= 2 and tables["std"].values[0, column] > 0:
            groups.setdefault((shapes[name], first), []).append(column)
    alike = [
        [names[column] for column in columns]
        for columns in groups.values()
        if len({float(tables["norm"].values[-1, column]) for column in columns}) > 1  # else it is one tensor
    ]
    if alike:
        count = sum(map(len, alike))
        text = (
            f"{' and '.join(alike[0][:2])} begin with the same numbers, and so do {count} of "
            f"{sum(len(shape) >= 2 for shape in shapes.values())} matrices: each is drawn from the same seed"
        )
        yield Symptom("begins_alike", "warning", text, 0, ", ".join(alike[0][:2]), ("bad-init/same-seed",))


def largest_ever(run: Run, kind: str) -> dict[str, float]:
    """The largest entry of each tensor over all measured steps; inf where one was not finite; none of too few steps."""
    table = run.table(kind, "absmax")
    if len(table.steps) < MEASURED:
        return {}
    odd = np.nan_to_num(run.table(kind, "nan").values) + np.nan_to_num(run.table(kind, "inf").values)
    sizes = np.where(odd > 0, np.inf, table.values)
    return {
        name: float(np.nanmax(sizes[:, j]))
        for j, name in enumerate(table.names)
        if np.isfinite(table.values[:, j]).any()
    }


def which_move(run: Run) -> dict[str, bool]:
    """Whether each weight has changed: as the end of the run says; of one that was killed, as its statistics do."""
    known = {p["name"]: p["changed"] for p in run.info.get("parameters", []) if "changed" in p}
    if known:
        return known
    tables = [run.table("weight", statistic) for statistic in ("min", "max", "mean", "std", "norm")]
    if len(tables[0].steps) < MEASURED:
        return {}
    updates = largest_ever(run, "update")
    return {
        name: updates.get(name, 0.0) > 0
        or any(len(set(column[~np.isnan(column)])) > 1 for column in (t.values[:, j] for t in tables))
        for j, name in enumerate(tables[0].names)
    }


def layer_of(name: str) -> str:
    """The name up to its first number, or its first part.

    >>> layer_of("blocks.0.qkv.weight"), layer_of("lnf.bias"), layer_of("wte")
    ('blocks.0', 'lnf', 'wte')
    """
    numbered = re.match(r"(?:[^.\d][^.]*\.)*?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.partition(".")[0]


def listed(names: Iterable[str]) -> str:
    """Some names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


BY_HAND = (stays_zero, layer_without_gradient, never_moves, begins_alike)
