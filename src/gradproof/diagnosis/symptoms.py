"""What can be seen in a record: each symptom is a function of the run; the tuple at the end is the list of them.

A symptom raises a suspicion; only an experiment convicts. What a healthy run shows too (a high clip rate while the
loss falls, a flat loss at its optimum, GradScaler's first skipped steps) is a note at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from gradproof.diagnosis.bad_numbers import anomaly, nonfinite, steps_skipped
from gradproof.diagnosis.bookkeeping import BOOKKEEPING
from gradproof.diagnosis.by_hand import BY_HAND
from gradproof.diagnosis.copies import statistics_left_behind
from gradproof.diagnosis.coverage import few_rows_drawn
from gradproof.diagnosis.curves import (
    all_at_optimum,
    loss_fell,
    loss_hardly_falling,
    loss_not_improving,
    loss_oscillating,
    loss_spike,
    loss_turned,
    nothing_learned,
    of_track,
)
from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.own_rate import own_rate_dies
from gradproof.diagnosis.places import line_of
from gradproof.diagnosis.ranks import ranks_out_of_step
from gradproof.diagnosis.recurrences import recurrence_never_used, state_weights_without_gradient
from gradproof.diagnosis.returns import average_stays, weights_put_back
from gradproof.diagnosis.said import libraries_said
from gradproof.diagnosis.series import tracks
from gradproof.diagnosis.shards import leaps_at_a_file
from gradproof.diagnosis.turned import turned_by
from gradproof.record.run import Run, Table
from gradproof.record.schema import STATISTICS

NORM, NAN, INF = (STATISTICS.index(name) for name in ("norm", "nan", "inf"))


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
    text = f"clipped at {100 * rate:.0f} % of {known.sum()} steps, to {100 * kept:.3g} % of the gradient's length"
    suspects = ("grad-clip-misuse/limit-too-small",) if kept < 0.01 else ()
    level = "note" if loss_fell(run) else "warning"
    yield Symptom("clipped_always", level, text, None, None, suspects)


def gradient_flow(run: Run) -> Iterator[Symptom]:
    """Gradients that grow or die on their way from the output to the first layer."""
    level = "note" if loss_fell(run) and not any(loss_hardly_falling(run)) else "warning"
    for number in sorted({p["optimizer"] for p in _parameters(run) if p["optimizer"] is not None}):
        flow = gradient_ratios(run, number)
        if flow is None:
            continue
        names, ratios = flow
        low, high, last = int(np.argmin(ratios)), int(np.argmax(ratios)), names[-1]
        if ratios[high] > 1e3:
            text = f"the gradient of {names[high]} is {ratios[high]:.3g} times that of {last}, the last layer"
            yield Symptom("exploding_gradients", level, text, None, names[high], ("exploding-signal/depth",))
        if ratios[low] < 1e-4:
            text = f"the gradient of {names[low]} is {ratios[low]:.3g} of that of {last}, the last layer"
            yield Symptom("vanishing_gradients", level, text, None, names[low], ("vanishing-signal/depth",))


def gradient_ratios(run: Run, optimizer: int = 0) -> tuple[list[str], np.ndarray] | None:
    """Typical size of an entry of each matrix's gradient, relative to the last one's, over an optimizer's matrices."""
    table = run.table("gradient", "norm")
    sizes = {p["name"]: p["shape"] for p in _parameters(run) if p["optimizer"] == optimizer}
    matrices = [j for j, name in enumerate(table.names) if len(sizes.get(name, ())) >= 2]
    if len(matrices) < 3 or len(table.steps) < 3:
        return None
    count = np.array([np.prod(sizes[table.names[j]]) for j in matrices], dtype=float)
    typical = _median_over_steps(table.values[:, matrices]) / np.sqrt(np.maximum(count, 1))
    known = np.isfinite(typical) & (typical > 0)  # a gradient of exactly zero is another story: never_changed
    if known.sum() < 3 or not known[-1]:
        return None
    return [table.names[j] for j, ok in zip(matrices, known, strict=True) if ok], (typical / typical[-1])[
        known
    ]


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
    # one large gradient is a spike; growth is many of them, or the run's last word
    lasting = np.mean(norm > 1e2 * early) > 0.05 or peak >= len(norm) - 3
    if early > 0 and norm[peak] > 1e3 * early and lasting and not loss_fell(run) and not all_at_optimum(run):
        text = f"the gradient norm grows from {early:.3g} to {norm[peak]:.3g}"
        yield Symptom(
            "gradient_growing", "problem", text, int(steps[peak]), None, ("exploding-signal/growing",)
        )


def outside_optimizer(run: Run) -> Iterator[Symptom]:
    """Parameters that want a gradient and that no optimizer has; what someone else changes is left alone."""
    parameters = _parameters(run)
    outside = [p for p in parameters if p["optimizer"] is None and p.get("changed") is not True]
    if len(run) < 3 or len(outside) == len(parameters) or run.info.get("facts", {}).get("sharded_late"):
        return  # nothing to go by, or it is known why: see ranks.sharded_late
    suspects = ("param-not-updated/not-in-optimizer",)
    reached = [p for p in outside if p.get("gradient")]
    if reached:
        text = f"no optimizer has {_names(reached)}, though gradients arrive there"
        yield Symptom("not_in_optimizer", "problem", text, None, reached[0]["name"], suspects)
    idle = [p for p in outside if not p.get("gradient")]
    if idle:  # a target network, a teacher, a part that is not used
        text = f"no optimizer has {_names(idle)}, and no gradient arrives there"
        yield Symptom("idle_parameters", "note", text, None, idle[0]["name"], suspects)


def never_changed(run: Run) -> Iterator[Symptom]:
    """Parameters that an optimizer has and that never move."""
    inside = [p for p in _parameters(run) if p["optimizer"] is not None]
    still = [p for p in inside if p.get("changed") is False]
    if not still or len(run) < 3 or run.by_hand:  # an update by hand has symptoms of its own
        return
    no_gradient = [p for p in still if not p.get("gradient")]
    idle = state_weights_without_gradient(run)  # said by recurrence_never_used
    with_gradient = [p for p in still if p.get("gradient") and p["name"] not in idle]
    if no_gradient:
        level = "warning" if len(no_gradient) < len(inside) else "problem"
        text = f"{_names(no_gradient)} never got a gradient in {len(run)} steps"
        late = [p for p in inside if p.get("moved_at", 0) > len(run) / 2]
        if late:  # a head for each time or task, of which a step draws one: they come one after the other
            level = "note"
            text += f"; {_names(late)} changed for the first time in their second half: others may follow"
        possible = ("param-not-updated/no-gradient", "detached-graph/cut")
        yield Symptom("no_gradient", level, text, None, no_gradient[0]["name"], possible)
    if with_gradient and not learning_rate_is_zero(run):
        # a bias in front of a normalisation has no effect: its gradient is rounding noise that moves nothing
        matters = any(len(p["shape"]) >= 2 for p in with_gradient)
        level = "problem" if len(with_gradient) == len(inside) else "warning" if matters else "note"
        text, suspects = explain_standstill(run, with_gradient)
        yield Symptom("never_changed", level, text, None, with_gradient[0]["name"], suspects)


def explain_standstill(run: Run, still: list[dict]) -> tuple[str, tuple[str, ...]]:
    """Why parameters that are stepped keep their values: a gradient of zero, too few digits, too short a step."""
    names = {p["name"] for p in still}
    table = run.table("gradient", "absmax")
    columns = [j for j, name in enumerate(table.names) if name in names]
    measured = table.values[:, columns][np.isfinite(table.values[:, columns])]
    if measured.size and (measured == 0).all():
        text = f"the gradient of {_names(still)} is exactly zero at every measured step"
        if all(is_a_bias_that_cancels(p, table) for p in still):
            return f"{text}, that of the weights beside it is not: what it adds cancels in the loss", ()
        return text, ("dead-activation/units", "bad-init/zeros", "vanishing-signal/depth")
    if all(o.get("class") == "UpdatesByHand" for o in run.info.get("optimizers", [])):
        text = f"gradients arrive at {_names(still)}, and no update by hand has changed a bit of it"
        return text, ("param-not-updated/left-out", "lr-too-low/tiny-updates")
    text = f"gradients arrive at {_names(still)} and the optimizer steps, but every bit stays as it was"
    if all(p.get("dtype") in ("bfloat16", "float16") for p in still):
        return f"{text} ({still[0]['dtype']})", (
            "low-precision-error/lost-updates",
            "lr-too-low/tiny-updates",
        )
    return text, (
        "lr-too-low/tiny-updates",
        "param-not-updated/no-change",
        "low-precision-error/lost-updates",
    )


def is_a_bias_that_cancels(parameter: dict, table: Table) -> bool:
    """One of a layer whose weights learn: its units respond. A loss of differences (a critic's) has no use for it."""
    path, _, last = parameter["name"].rpartition(".")
    beside = [
        j for j, name in enumerate(table.names) if path and name == f"{path}.{last.replace('bias', 'weight')}"
    ]
    return len(parameter["shape"]) < 2 and "bias" in last and bool((table.values[:, beside] > 0).any())


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
            yield of_track(track, "lr_zero", "problem", text, ("lr-schedule-error/ends-at-zero",), first)


def order_of_calls(run: Run) -> Iterator[Symptom]:
    """zero_grad, backward, clip and step in an order that undoes what was meant."""
    orders, norms = run.steps["order"][1:], run.steps["grad_norm"][1:]  # the first step follows no other
    if len(orders) < 4:
        return
    kinds, quiet = Counter(orders), Counter(orders[~(norms > 0)])  # of a million steps there are a few

    def share(is_so: Callable[[str], bool], of: Counter[str] = kinds) -> float:
        return sum(count for order, count in of.items() if is_so(order)) / len(orders)

    if share(lambda order: "g" in order) > 0.9:
        text = "the gradients of the step before are still there when backward begins: every step adds to all before it"
        yield Symptom(
            "stale_gradient", "problem", text, 1, line_of(run, "backward"), ("zero-grad-error/never-cleared",)
        )
    if share(zeroed_before_step, quiet) > 0.9:
        text = "zero_grad is called between backward and step: the optimizer never sees the gradient"
        yield Symptom(
            "zeroed_before_step",
            "problem",
            text,
            0,
            line_of(run, "zero_grad"),
            ("zero-grad-error/before-step",),
        )
    if share(clipped_after_step) > 0.9:
        text = "the gradient is clipped after the optimizer has stepped: the clip changes nothing"
        yield Symptom("late_clip", "problem", text, 0, line_of(run, "clip"), ("grad-clip-misuse/after-step",))
    scale = run.steps["loss_scale"]
    if np.mean(scale > 1) > 0.9 and share(clipped_while_scaled) > 0.9:
        text = f"the gradient is clipped while it still carries the loss scale of {np.nanmedian(scale):g}"
        yield Symptom(
            "clip_before_unscale",
            "problem",
            text,
            0,
            line_of(run, "clip"),
            ("grad-clip-misuse/before-unscale",),
        )


def zeroed_before_step(order: str) -> bool:
    """A zero_grad between the last backward and the first step after it."""
    after = order[order.rindex("b") :] if "b" in order else ""
    return "z" in after.partition("s")[0]


def clipped_after_step(order: str) -> bool:
    """The only clip comes after the step, or before any backward: it was meant for the step before."""
    clips = {"c", "v"}
    until, _, late = order.partition("s")
    if clips & set(late):
        return not clips & set(until)
    before, _, after = order.partition("b")
    return "b" in order and bool(clips & set(before)) and not clips & set(after)


def clipped_while_scaled(order: str) -> bool:
    """A clip before the unscaling; the scaler's own step unscales, too, but then it is late."""
    return bool({"c", "v"} & set(order.partition("u")[0]))


def dead_units(run: Run) -> Iterator[Symptom]:
    """Units that put out the same number for every sample, at every measured step."""
    table = run.table("output", "dead")
    outputs = {t["name"]: t for t in run.tensors if t["kind"] == "output"}
    if len(table.steps) < 3:
        return
    learns = loss_fell(run)
    for name, share in zip(table.names, _min_over_steps(table.values), strict=True):
        kind, shape = outputs[name].get("module", ""), outputs[name].get("shape") or [1]
        samples = np.prod(shape) / max(1, shape[1 if len(shape) >= 4 else -1])
        if share >= 0.5 and kind in ACTIVATIONS and samples >= 8:  # of few samples, many units see none
            text = (
                f"{100 * share:.0f} % of the units of {name} ({kind}) put out one number for the whole batch"
            )
            level = "note" if learns else "problem" if share > 0.95 else "warning"
            yield Symptom("dead_units", level, text, None, name, ("dead-activation/units",))


ACTIVATIONS = (
    "ReLU",
    "ReLU6",
    "LeakyReLU",
    "Sigmoid",
    "Tanh",
    "Hardtanh",
    "Hardsigmoid",
    "Hardswish",
    "Softsign",
)


def update_ratio(run: Run) -> Iterator[Symptom]:
    """Steps far too small or too large for the weights they change."""
    ratios = update_ratios(run)
    if ratios is None or len(run) < 20 or loss_fell(run) or all_at_optimum(run):
        return
    names, values = ratios
    typical = float(np.median(values))
    worst = int(np.argmax(values))
    if typical < 1e-6:
        text = f"a step changes the weights by {typical:.1e} of their size: a thousand steps move nothing"
        yield Symptom("tiny_updates", "warning", text, None, None, ("lr-too-low/tiny-updates",))
    elif typical > 0.1:
        text = f"each step changes the weights by {100 * typical:.0f} % of their size (most: {names[worst]})"
        yield Symptom("huge_updates", "warning", text, None, names[worst], ("lr-too-high/overshoot",))


def update_ratios(run: Run) -> tuple[list[str], np.ndarray] | None:
    """‖Δθ‖/‖θ‖ of each matrix, the median over the measured steps."""
    updates, weights = run.table("update", "norm"), run.table("weight", "norm")
    sizes = {p["name"]: p["shape"] for p in run.info.get("parameters", [])}
    names = set(weights.names)
    columns = [j for j, name in enumerate(updates.names) if name in names and len(sizes.get(name, ())) >= 2]
    if not columns:
        return None
    of_weights = [weights.names.index(updates.names[j]) for j in columns]
    _, here, there = np.intersect1d(updates.steps, weights.steps, return_indices=True)
    with np.errstate(all="ignore"):
        ratios = _median_over_steps(updates.values[here][:, columns] / weights.values[there][:, of_weights])
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
    if share > 0.5 and not all_at_optimum(run):
        level = "note" if loss_fell(run) else "warning"
        text = f"Adam's ε is larger than √v for {100 * share:.0f} % of the entries"
        yield Symptom(
            "adam_epsilon", level, text, None, None, ("optimizer-config/eps", "vanishing-signal/tiny")
        )


def _parameters(run: Run) -> list[dict]:
    """What run.json says about each parameter that wants a gradient."""
    return [p for p in run.info.get("parameters", []) if p.get("trainable")]


def _median_over_steps(values: np.ndarray) -> np.ndarray:
    return np.array([np.median(c[np.isfinite(c)]) if np.isfinite(c).any() else np.nan for c in values.T])


def _min_over_steps(values: np.ndarray) -> np.ndarray:
    return np.array([np.min(c[np.isfinite(c)]) if np.isfinite(c).any() else np.nan for c in values.T])


def _last_over_steps(table: Table) -> np.ndarray:
    return np.array([c[np.isfinite(c)][-1] if np.isfinite(c).any() else np.nan for c in table.values.T])


def _names(parameters: list[dict]) -> str:
    """Up to three names; of more, how many there are and in which parts of the model."""
    names = [p["name"] for p in parameters]
    if len(names) <= 3:
        return ", ".join(names)
    parts = list(dict.fromkeys(name.partition(".")[0] for name in names))
    more = f" and {len(parts) - 4} more parts" if len(parts) > 4 else ""
    return f"{len(names)} tensors of {', '.join(parts[:4])}{more}"


SYMPTOMS = (
    nonfinite,
    anomaly,
    steps_skipped,
    order_of_calls,
    outside_optimizer,
    never_changed,
    recurrence_never_used,
    learning_rate,
    own_rate_dies,
    gradient_growing,
    loss_not_improving,
    loss_hardly_falling,
    nothing_learned,
    loss_oscillating,
    loss_spike,
    loss_turned,
    leaps_at_a_file,
    turned_by,
    gradient_flow,
    dead_units,
    update_ratio,
    adam_epsilon,
    clipped_always,
    *BOOKKEEPING,
    few_rows_drawn,
    statistics_left_behind,
    weights_put_back,
    average_stays,
    ranks_out_of_step,
    *BY_HAND,
    libraries_said,
)
