"""What can be seen in a record: each symptom is a function of the run; the tuple at the end is the list of them.

A symptom raises a suspicion; only an experiment convicts. What a healthy run shows too (a high clip rate while the
loss falls, a flat loss at its optimum, GradScaler's first skipped steps) is a note at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.series import Track, first_nonfinite, spikes, tracks, trend
from gradproof.record.run import Run, Table
from gradproof.record.schema import STATISTICS

NORM, NAN, INF = (STATISTICS.index(name) for name in ("norm", "nan", "inf"))


def nonfinite(run: Run) -> Iterator[Symptom]:
    """The first tensor that stops being finite. Everything after it is a consequence."""
    steps, skipped = run.steps, np.nan_to_num(run.steps["skipped"])
    loss = first_nonfinite(steps["loss"], run.seen["loss"])
    norm = first_nonfinite(steps["grad_norm"], run.seen["grad_norm"] & (skipped == 0))
    rows = [row for row in (loss, norm) if row is not None]
    if not rows:
        return
    row = min(rows)
    step = int(steps["step"][row])
    place = find_first_nonfinite_tensor(run, step)
    forward = loss is not None and loss == row
    value = steps["loss"][row] if forward else steps["grad_norm"][row]
    what = f"the loss is {value}" if forward else f"the loss is still {steps['loss'][row]:.4g}, the gradient {value}"
    where, detail = None, ""
    if place is not None:
        where, detail = f"{place[0]} of {place[1]}", f"; first seen in the {place[0]} of {place[1]}: {place[2]}"
    family = "forward-nonfinite" if forward else "backward-nonfinite"
    suspects = (f"{family}/unlocated", "lr-too-high/diverged", "low-precision-error/overflow")
    if grew_before(run, row):
        suspects = ("lr-too-high/diverged", "exploding-signal/growing", f"{family}/unlocated")
    yield Symptom("nonfinite", "problem", what + detail, step, where, suspects)


def find_first_nonfinite_tensor(run: Run, step: int) -> tuple[str, str, str] | None:
    """Kind, name and counts of the first non-finite tensor in execution order, up to this step and at it."""
    for frame in run.frames:
        if frame.step > step:
            break
        bad = np.flatnonzero((frame.values[:, NAN] > 0) | (frame.values[:, INF] > 0))
        if len(bad):
            tensor = run.tensors[frame.numbers[bad[0]]]
            nan, inf = (int(frame.values[bad[0], column]) for column in (NAN, INF))
            size = int(np.prod(tensor["shape"])) if "shape" in tensor else None
            counts = ", ".join(f"{n} {word}" for n, word in ((nan, "NaN"), (inf, "Inf")) if n)
            return tensor["kind"].replace("_", " "), tensor["name"], counts + (f" of {size}" if size else "")
    return None


def grew_before(run: Run, row: int) -> bool:
    """The loss or the gradient had grown tenfold over its best before it stopped being finite."""
    for column in ("loss", "grad_norm"):
        before = run.steps[column][max(0, row - 50) : row]
        before = before[np.isfinite(before)]
        if len(before) >= 3 and abs(before[-1]) > 10 * np.median(np.abs(before[: max(1, len(before) // 2)])) + 1e-12:
            return True
    return False


def loss_not_improving(run: Run) -> Iterator[Symptom]:
    """The loss ends where it began, or higher."""
    for track in tracks(run):
        found = trend(track.loss)
        if found is None or found.points < 30 or found.fell:
            continue
        numbers = f"{found.first:.4g} at the start, {found.last:.4g} at the end of {found.points} steps"
        if found.rose:
            yield _of(track, "loss_rising", "problem", f"the loss rises: {numbers}", ("lr-too-high/diverged",))
        elif not at_optimum(track):
            suspects = ("lr-too-low/tiny-updates", "lr-too-high/overshoot", "detached-graph/cut")
            yield _of(track, "loss_not_improving", "warning", f"the loss does not improve: {numbers}", suspects)


def at_optimum(track: Track) -> bool:
    """A loss that starts at, and stays within noise of, zero has nothing left to learn."""
    finite = track.loss[np.isfinite(track.loss)]
    return bool(len(finite)) and float(np.median(np.abs(finite))) < 1e-3


def loss_oscillating(run: Run) -> Iterator[Symptom]:
    """Up and down from step to step, by much, without getting anywhere."""
    for track in tracks(run):
        values = track.loss[np.isfinite(track.loss)]
        found = trend(values)
        if found is None or found.points < 30 or found.fell:
            continue
        moves = np.diff(values)
        turns = float(np.mean(np.sign(moves[1:]) != np.sign(moves[:-1])))
        size = float(np.median(np.abs(moves))) / (abs(float(np.median(values))) + 1e-12)
        if turns > 0.6 and size > 0.05:
            text = f"the loss swings by {100 * size:.0f} % from step to step and stays at {np.median(values):.4g}"
            yield _of(track, "loss_oscillating", "warning", text, ("lr-too-high/overshoot",))


def loss_spike(run: Run) -> Iterator[Symptom]:
    """A jump far above what the last fifty steps showed."""
    for track in tracks(run):
        found = spikes(track.loss, track.steps)
        if found:
            step, value, usual = max(found, key=lambda spike: spike[1] / (abs(spike[2]) + 1e-12))
            text = f"the loss jumps to {value:.4g} from {usual:.4g}" + (
                f", one of {len(found)} spikes" if len(found) > 1 else ""
            )
            yield _of(track, "loss_spike", "note", text, ("lr-too-high/spike", "input-or-target-scale/batch"), step)


def clipped_always(run: Run) -> Iterator[Symptom]:
    """Clipping that never lets a gradient through as it is."""
    before, limit = run.steps["norm_before_clip"], run.steps["clip_limit"]
    known = np.isfinite(before) & np.isfinite(limit) & (limit > 0)
    if known.sum() < 20:
        return
    rate = float(np.mean(before[known] > limit[known]))
    if rate < 0.98:
        return
    kept = float(np.median(limit[known] / before[known]))
    fell = any(found.fell for track in tracks(run) if (found := trend(track.loss)))
    text = f"clipped at {100 * rate:.0f} % of {known.sum()} steps, to {100 * kept:.3g} % of the gradient's length"
    suspects = ("grad-clip-misuse/limit-too-small",) if kept < 0.01 else ()
    level = "note" if fell and kept > 0.01 else "warning"
    yield Symptom("clipped_always", level, text, None, None, suspects)


def gradient_flow(run: Run) -> Iterator[Symptom]:
    """Gradients that grow or die on their way from the output to the first layer."""
    flow = gradient_ratios(run)
    if flow is None:
        return
    names, ratios, output = flow
    low, high = int(np.argmin(ratios)), int(np.argmax(ratios))
    if ratios[high] > 1e3:
        text = f"the gradient of {names[high]} is {ratios[high]:.3g} times that of {output}, the last layer"
        yield Symptom("exploding_gradients", "warning", text, None, names[high], ("exploding-signal/depth",))
    if ratios[low] < 1e-4:
        text = f"the gradient of {names[low]} is {ratios[low]:.3g} of that of {output}, the last layer"
        yield Symptom("vanishing_gradients", "warning", text, None, names[low], ("vanishing-signal/depth",))


def gradient_ratios(run: Run) -> tuple[list[str], np.ndarray, str] | None:
    """Typical size of an entry of each matrix's gradient, relative to the last one's: names, ratios, the last."""
    table = run.table("gradient", "norm")
    sizes = {p["name"]: p["shape"] for p in run.info.get("parameters", [])}
    matrices = [j for j, name in enumerate(table.names) if len(sizes.get(name, ())) >= 2]
    if len(matrices) < 3 or not len(table.steps):
        return None
    with np.errstate(all="ignore"):
        count = np.array([np.prod(sizes[table.names[j]]) for j in matrices], dtype=float)
        typical = _median_over_steps(table.values[:, matrices]) / np.sqrt(count)
    ratios = typical / typical[-1] if np.isfinite(typical[-1]) and typical[-1] > 0 else np.full(len(matrices), np.nan)
    known = np.isfinite(ratios) & (ratios > 0)
    if known.sum() < 3:
        return None
    names = [table.names[j] for j, ok in zip(matrices, known, strict=True) if ok]
    return names, ratios[known], table.names[matrices[-1]]


def gradient_growing(run: Run) -> Iterator[Symptom]:
    """The whole gradient grows by orders of magnitude over the run while the loss does not fall."""
    norm = run.steps["norm_before_clip"].copy()
    norm = np.where(np.isfinite(norm), norm, run.steps["grad_norm"])
    steps = run.steps["step"][np.isfinite(norm)]
    norm = norm[np.isfinite(norm)]
    if len(norm) < 8:
        return
    early = float(np.median(norm[: max(3, len(norm) // 10)]))
    peak = int(np.argmax(norm))
    fell = any(found.fell for track in tracks(run) if (found := trend(track.loss)))
    if early > 0 and norm[peak] > 1e3 * early and not fell:
        text = f"the gradient norm grows from {early:.3g} to {norm[peak]:.3g}"
        yield Symptom("gradient_growing", "problem", text, int(steps[peak]), None, ("exploding-signal/growing",))


def never_changed(run: Run) -> Iterator[Symptom]:
    """Parameters that want to be trained and never move."""
    parameters = [p for p in run.info.get("parameters", []) if p.get("trainable")]
    outside = [p for p in parameters if p["optimizer"] is None]
    if outside and len(outside) < len(parameters) and len(run) >= 3:
        text = f"{_names(outside)} want a gradient, but no optimizer has them"
        yield Symptom("not_in_optimizer", "problem", text, None, outside[0]["name"], ("param-not-updated/not-in-optimizer",))
    inside = [p for p in parameters if p["optimizer"] is not None]
    still = [p for p in inside if p.get("changed") is False]
    if still and len(run) >= 3:
        no_gradient = [p for p in still if not p.get("gradient")]
        with_gradient = [p for p in still if p.get("gradient")]
        if no_gradient:
            level = "warning" if len(no_gradient) < len(inside) else "problem"
            text = f"{_names(no_gradient)} never got a gradient in {len(run)} steps"
            suspects = ("param-not-updated/no-gradient", "detached-graph/cut")
            yield Symptom("no_gradient", level, text, None, no_gradient[0]["name"], suspects)
        if with_gradient and not learning_rate_is_zero(run):
            text = f"{_names(with_gradient)} get gradients and are stepped, but keep their first values bit for bit"
            suspects = ("param-not-updated/no-change", "lr-too-low/tiny-updates", "low-precision-error/lost-updates")
            yield Symptom("never_changed", "problem", text, None, with_gradient[0]["name"], suspects)


def learning_rate_is_zero(run: Run) -> bool:
    lr = run.steps["lr"][np.isfinite(run.steps["lr"])]
    return bool(len(lr)) and bool((lr == 0).all())


def learning_rate(run: Run) -> Iterator[Symptom]:
    """A schedule that has ended at zero, or never left it."""
    for track in tracks(run):
        lr = track.lr[np.isfinite(track.lr)]
        if len(lr) < 10:
            continue
        zero = float(np.mean(lr == 0))
        if zero > 0.25:
            first = int(track.steps[np.flatnonzero(track.lr == 0)[0]])
            text = f"the learning rate is 0 at {100 * zero:.0f} % of the steps"
            yield _of(track, "lr_zero", "problem", text, ("lr-schedule-error/ends-at-zero",), first)


def order_of_calls(run: Run) -> Iterator[Symptom]:
    """zero_grad, backward, clip and step in an order that undoes what was meant."""
    orders = run.steps["order"]
    if len(orders) < 5:
        return
    body = orders[1:]  # the first step follows no other
    share = {
        name: float(np.mean([test(order) for order in body]))
        for name, test in (
            ("stale", lambda o: "g" in o),
            ("zeroed", lambda o: "b" in o and "z" in o[o.rindex("b") :]),
            ("late clip", lambda o: "b" in o and o.lstrip("lz")[:1] in ("c", "v")),  # no b: a loop by hand
        )
    }
    if share["stale"] > 0.9:
        text = "the gradients of the step before are still there when backward begins: every step adds to all before it"
        yield Symptom("stale_gradient", "problem", text, 1, None, ("zero-grad-error/never-cleared",))
    if share["zeroed"] > 0.9:
        text = "zero_grad is called between backward and step: the optimizer never sees the gradient"
        yield Symptom("zeroed_before_step", "problem", text, 0, None, ("zero-grad-error/before-step",))
    if share["late clip"] > 0.9:
        text = "the gradient is clipped after the optimizer has stepped: the clip changes nothing"
        yield Symptom("late_clip", "problem", text, 0, None, ("grad-clip-misuse/after-step",))
    scaled = np.isfinite(run.steps["loss_scale"]) & (run.steps["loss_scale"] > 1)
    early = [("c" in o or "v" in o) and "u" not in o for o in orders]
    if scaled.mean() > 0.9 and float(np.mean(early)) > 0.9:
        scale = float(np.nanmedian(run.steps["loss_scale"]))
        text = f"the gradient is clipped while it still carries the loss scale of {scale:g}"
        yield Symptom("clip_before_unscale", "problem", text, 0, None, ("grad-clip-misuse/before-unscale",))


def dead_units(run: Run) -> Iterator[Symptom]:
    """Units that put out the same number for every sample, at every measured step."""
    table = run.table("output", "dead")
    kinds = {t["name"]: t.get("module", "") for t in run.tensors if t["kind"] == "output"}
    if len(table.steps) < 3:
        return
    with np.errstate(all="ignore"):
        always = _min_over_steps(table.values)
    for name, share in zip(table.names, always, strict=True):
        if np.isfinite(share) and share >= 0.5 and kinds[name] in ACTIVATIONS:
            text = f"{100 * share:.0f} % of the units of {name} ({kinds[name]}) put out one number for the whole batch"
            level = "problem" if share > 0.95 else "warning"
            yield Symptom("dead_units", level, text, None, name, ("dead-activation/units",))


ACTIVATIONS = ("ReLU", "ReLU6", "LeakyReLU", "Sigmoid", "Tanh", "Hardtanh", "Hardsigmoid", "Hardswish", "Softsign")


def update_ratio(run: Run) -> Iterator[Symptom]:
    """Steps far too small or too large for the weights they change."""
    ratios = update_ratios(run)
    if ratios is None:
        return
    names, values = ratios
    typical = float(np.median(values))
    worst = int(np.argmax(values))
    if typical < 1e-7:
        text = f"a step changes the weights by {typical:.1e} of their size: nothing will move in thousands of steps"
        yield Symptom("tiny_updates", "warning", text, None, None, ("lr-too-low/tiny-updates",))
    elif typical > 0.1:
        text = f"each step changes the weights by {100 * typical:.0f} % of their size (most: {names[worst]})"
        yield Symptom("huge_updates", "warning", text, None, names[worst], ("lr-too-high/overshoot",))


def update_ratios(run: Run) -> tuple[list[str], np.ndarray] | None:
    """‖Δθ‖/‖θ‖ of each matrix, the median over the measured steps."""
    updates, weights = run.table("update", "norm"), run.table("weight", "norm")
    sizes = {p["name"]: p["shape"] for p in run.info.get("parameters", [])}
    columns = [j for j, name in enumerate(updates.names) if len(sizes.get(name, ())) >= 2]
    if not columns or updates.values.shape != weights.values.shape:
        return None
    with np.errstate(all="ignore"):
        ratios = _median_over_steps(updates.values[:, columns] / weights.values[:, columns])
    known = np.isfinite(ratios)
    if not known.any():
        return None
    return [updates.names[j] for j, ok in zip(columns, known, strict=True) if ok], ratios[known]


def adam_epsilon(run: Run) -> Iterator[Symptom]:
    """Adam's ε outweighs √v: the step no longer adapts to the gradient."""
    table = run.table("adam_v", "eps_share")
    if len(table.steps) < 3:
        return
    last = _last_over_steps(table)
    share = float(np.mean(last[np.isfinite(last)])) if np.isfinite(last).any() else 0.0
    if share > 0.5:
        text = f"Adam's ε is larger than √v for {100 * share:.0f} % of the entries"
        yield Symptom("adam_epsilon", "warning", text, None, None, ("optimizer-config/eps", "vanishing-signal/tiny"))


def _median_over_steps(values: np.ndarray) -> np.ndarray:
    return np.array([np.median(c[np.isfinite(c)]) if np.isfinite(c).any() else np.nan for c in values.T])


def _min_over_steps(values: np.ndarray) -> np.ndarray:
    return np.array([np.min(c[np.isfinite(c)]) if np.isfinite(c).any() else np.nan for c in values.T])


def _last_over_steps(table: Table) -> np.ndarray:
    return np.array([c[np.isfinite(c)][-1] if np.isfinite(c).any() else np.nan for c in table.values.T])


def _of(
    track: Track, name: str, level: str, text: str, suspects: tuple[str, ...], step: int | None = None
) -> Symptom:
    if track.label:
        text = f"{track.label}: {text}"
    return Symptom(name, level, text, step, track.label or None, suspects)


def _names(parameters: list[dict]) -> str:
    names = [p["name"] for p in parameters]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


SYMPTOMS = (
    nonfinite,
    order_of_calls,
    never_changed,
    learning_rate,
    gradient_growing,
    loss_not_improving,
    loss_oscillating,
    loss_spike,
    gradient_flow,
    dead_units,
    update_ratio,
    adam_epsilon,
    clipped_always,
)
