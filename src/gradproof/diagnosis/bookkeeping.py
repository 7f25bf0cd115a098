"""Symptoms in how training is kept: modes while validating, loaded weights, schedules, clips, optimizer settings.

They read what listeners noted (`run.info["facts"]`), the optimizer's settings and the recorded learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from gradproof.diagnosis.curves import trains_well
from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts, line_of, lines_of
from gradproof.diagnosis.series import Track, calls, tracks
from gradproof.record.run import Run

ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam")
STATEFUL = (*ADAMS, "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD", "LBFGS")


def validates_in_train_mode(run: Run) -> Iterator[Symptom]:
    """Passes without gradient in which dropout drops, or BatchNorm uses the batch and moves its statistics.

    What happens between most steps is part of training (a generator's samples, a teacher, acting): not meant here.
    """
    seen = facts(run, "modes")
    if not seen or len(run) < 5:
        return
    train, evaluated = len(seen["train"]), len(seen["eval"])
    if train and train < 0.5 * len(run):
        effect = "drops units" if "Dropout" in seen["kind"] else "uses the batch and moves its statistics"
        text = f"without gradient, {seen['module']} ({seen['kind']}) runs in train mode and {effect}"
        text += f": at {train} of {train + evaluated} validations"
        # a GAN's generator is often sampled as it trains, on purpose
        level = "problem" if not evaluated and len(list(tracks(run))) == 1 else "warning"
        where = f"{seen['module']} ({seen['line']})"
        yield Symptom(
            "validates_in_train_mode",
            level,
            text,
            seen["train"][0],
            where,
            ("train-eval-mode-error/train-mode",),
        )
    for line, call in seen.get("functional", {}).items():
        text = (
            f"F.dropout at {line} drops {100 * call['p']:g} % in eval mode: it lacks training=self.training"
        )
        if call.get("attention"):
            text = (
                f"the attention at {line} drops {100 * call['p']:g} % of its weights in eval mode, too: dropout_p "
                "does not ask for the mode"
            )
        elif call.get("made"):
            text = (
                f"the Dropout that is called at {line} drops {100 * call['p']:g} % while the model is in eval mode: "
                "eval() does not reach a module that is no attribute of the model, or is made in its forward"
            )
        where = f"{call['module']} ({line})" if call["module"] else line
        suspects = ("train-eval-mode-error/functional-dropout",)
        yield Symptom("dropout_always_on", "problem", text, None, where, suspects)


FEWEST_STAIRS = 4  # rises of a learning rate that is raised once an epoch
UNTURNED = (
    0.3  # of the largest singular value; one pass in train mode brings a random matrix to about half of it
)


def evaluated_too_soon(run: Run) -> Iterator[Symptom]:
    """A spectral norm that divides by what its first, random vectors say: no pass in train mode has turned them yet."""
    seen = facts(run, "spectral_norm")
    if seen and seen["share"] < UNTURNED and "line" in seen:
        text = (
            f"the spectral norm of {seen['module']} is evaluated ({seen['line']}, step {seen['step']}) before a pass "
            f"in train mode has moved its statistics: it divides the weight by {seen['share']:.2g} of its largest "
            f"singular value, and what comes out is {1 / max(seen['share'], 1e-12):.3g} times too large"
        )
        where = f"{seen['module']} ({seen['line']})"
        suspects = ("normalization-error/not-yet-updated",)
        yield Symptom("evaluated_too_soon", "warning", text, seen["step"], where, suspects)


def loads_nothing(run: Run) -> Iterator[Symptom]:
    """A load_state_dict that was given the model's own tensors, or whose keys fit nowhere."""
    for load in facts(run, "loads") or ():
        name = load["model"] or load["class"]
        where = f"{load['line']}, {name}" if load["line"] else name
        if load["keys"] and load["same_memory"] >= max(1, 0.9 * load["fitting"]):
            text = (
                f"load_state_dict gives {name} its own tensors ({load['same_memory']} of {load['fitting']})"
                ": nothing is restored; what was kept was a reference, not a copy"
            )
            if load.get("taken"):
                text += f", taken at {load['taken']}"
                where = f"{load['taken']}, {name}"
            yield Symptom(
                "loads_itself", "problem", text, load["step"], where, ("weights-state-error/by-reference",)
            )
        elif load["given"] and load["keys"] and load["fitting"] <= 0.1 * min(load["given"], load["keys"]):
            text = (
                f"load_state_dict finds a place for {load['fitting']} of {load['given']} tensors: "
                f"{load['strange']!r} is not in {name}, which wants {load['missing']!r}"
            )
            yield Symptom(
                "keys_do_not_fit", "problem", text, load["step"], where, ("weights-state-error/keys",)
            )


def loads_overwritten(run: Run) -> Iterator[Symptom]:
    """Weights that were loaded and, before any step, hold something else: an initialisation came after the load."""
    for load in (facts(run, "overwritten_loads") or ())[:1]:
        text = (
            f"what load_state_dict brought into {load['class']} ({load['line']}) is gone before step {load['step']}: "
            f"none of its {load['matrices']} matrices resembles what was loaded, and nothing has stepped in between"
        )
        suspects = ("weights-state-error/overwritten",)
        yield Symptom("loads_overwritten", "problem", text, load["step"], load["line"] or None, suspects)


def optimizer_state_lost(run: Run) -> Iterator[Symptom]:
    """Moments that a checkpoint holds and nobody loads; optimizers that are made anew again and again."""
    states = facts(run, "optimizer_states")
    if not states:
        return
    resumed = any(load["fitting"] > 0 and load["model"] for load in facts(run, "loads") or ())
    if states["in_files"] and not states["loaded"] and resumed:
        text = "the checkpoint holds an optimizer's state, the model is loaded from it, the optimizer is not"
        suspects = ("weights-state-error/optimizer-state-lost",)
        yield Symptom("optimizer_not_restored", "warning", text, 0, states["line"] or None, suspects)
    remade = states["remade"]
    if len(remade) >= 3 and (states["remade_class"] in STATEFUL or _momentum(run)):
        every = (remade[-1] - remade[0]) / (len(remade) - 1)
        text = f"{states['remade_class']} is made anew every {every:.0f} steps: its moments are lost"
        level = "problem" if every <= 20 else "warning"
        suspects = ("weights-state-error/optimizer-remade",)
        yield Symptom("optimizer_remade", level, text, remade[0], states["remade_line"] or None, suspects)


def average_too_slow(run: Run) -> Iterator[Symptom]:
    """Averaged weights that at the end of the run still are mostly those it began with.

    A teacher or target network is a part of training, and may well be slow; one that nobody calls does no harm.
    """
    average = facts(run, "average")
    if not average or average["in_training"] or len(run) < 20:
        return
    known = [(0, average["decays"][0][1]), *average["decays"], (len(run), 1.0)]
    logs = [(after - before) * math.log(decay) for (before, decay), (after, _) in pairwise(known)]
    held = math.exp(sum(logs))
    called = (facts(run, "copies_called") or {}).get(str(average["shapes"]))
    if held < 0.5 or (called and called["times"] > 0.3 * len(run)):
        return
    text = (
        f"the average of {average['tensors']} weights (decay {known[-2][1]:.6g}) still is to {100 * held:.0f} % what "
        f"the run began with, after {len(run)} steps"
    )
    text += f"; it is used at {called['line']}" if called else ""
    level = "problem" if called else "note" if average["module"] else "warning"
    suspects = ("weights-state-error/average-too-slow",)
    yield Symptom("average_too_slow", level, text, None, average["where"], suspects)


def stored_data_changed(run: Run) -> Iterator[Symptom]:
    """A data set that is changed by being read, and again each time: the data drift away over the epochs.

    Samples that are turned or mirrored in place stay what they are; that is only untidy.
    """
    for data in (facts(run, "data_sets") or {}).values():
        changed, again = data["changed_again"], data["again"]
        if changed < 8 or changed < 0.4 * again:
            continue
        harmless = data["reordered"] > 0.9 * changed or data["drift"] < 0.1
        text = (
            f"{data['class']}.__getitem__ changes what is stored: {changed} of {again} times that a sample was read "
            f"again its numbers were others afterwards; after {data['reads']} reads they are "
            f"{data['drift']:.2g} standard deviations away"
        )
        suspects = ("aliasing-or-inplace/stored-data-changed",)
        where = f"{data['class']} ({data['line']})" if data["line"] else data["class"]
        level = "warning" if harmless else "problem"
        yield Symptom("stored_data_changed", level, text, None, where, suspects)


def pairs_change(run: Run) -> Iterator[Symptom]:
    """Samples that come again with the target of another one: inputs were sorted or shuffled without their targets."""
    seen = facts(run, "pairs")
    if seen and seen["other"] >= 0.3 * seen["again"]:
        text = f"of {seen['again']} samples that a loader handed out again, {seen['other']} had another target before"
        suspects = ("data-target-misaligned/pairs-change",)
        yield Symptom("pairs_change", "problem", text, None, seen["line"] or None, suspects)


def workers_draw_alike(run: Run) -> Iterator[Symptom]:
    """Workers of one loader that begin with one state of a generator: the same noise, crops and turns from each."""
    seen = facts(run, "worker_draws")
    if seen:
        whose = {"torch": "PyTorch's", "numpy": "NumPy's", "python": "Python's"}.get(seen["generator"])
        what = f"{whose} generator" if whose else "a generator that the data set holds"
        text = f"{seen['alike']} of {seen['workers']} workers begin with the same state of {what} and draw from it: "
        text += "each gives its samples the random numbers that another has given to others"
        where = f"{seen['line']}, {line}" if (line := line_of(run, "loader")) else seen["line"]
        suspects = ("data-order-or-sampling/workers-draw-alike",)
        yield Symptom("workers_draw_alike", "warning", text, 0, where, suspects)


def files_as_text(run: Run) -> Iterator[Symptom]:
    """Numbered files read in the order of their names as text, and a network that learns its samples by heart.

    Two kinds of files read so, images and their masks, may well belong together.
    """
    found = [kind for kind in (facts(run, "files") or {}).values() if kind["count"] >= 24]
    epoch, loss = run.steps["epoch"], run.steps["loss"]
    first = loss[(epoch == np.nanmin(epoch)) & np.isfinite(loss)] if np.isfinite(epoch).any() else loss[:0]
    if len(found) != 1 or len(first) < 20 or len(first) == len(loss):
        return
    (kind,) = found
    start, passed, last = (
        float(np.median(x)) for x in (first[:5], first[-10:], loss[np.isfinite(loss)][-10:])
    )
    text = f"{kind['names'][0]} is read before {kind['names'][1]}: the names are sorted as text, not by their numbers"
    if start > 0 and passed > 0.93 * start and last < 0.9 * start:
        text += (
            f"; in the first epoch, where every sample is new, the loss goes from {start:.3g} to {passed:.3g}, "
            f"then it falls to {last:.3g}: the network learns by heart what the labels of other files are"
        )
        level = "problem"
    else:
        level = "note"
    yield Symptom("files_as_text", level, text, None, kind["line"], ("data-target-misaligned/files-as-text",))


def clip_misses(run: Run) -> Iterator[Symptom]:
    """A clip that was given other parameters than those that are stepped, or one tensor at a time."""
    clip = facts(run, "clip")
    if clip and clip["steps"] >= 5 and clip["stepped"]:
        share = (clip["given"] + clip.get("copies", 0)) / clip[
            "stepped"
        ]  # master weights go with their parameters
        if share < 0.5:
            text = f"the clip is given {clip['given']} of the {clip['stepped']} tensors that the steps after it change"
            name, level = ("clip_misses_all", "problem") if share == 0 else ("clip_misses", "warning")
            suspects = ("grad-clip-misuse/wrong-parameters",)
            yield Symptom(name, level, text, 0, line_of(run, "clip"), suspects)
    tensors = len([p for p in run.info.get("parameters", []) if p.get("gradient")])
    counts = calls(run, "c")
    if tensors >= 3 and len(counts) >= 5 and float(np.median(counts)) >= max(3, 0.8 * tensors):
        text = f"clip_grad_norm_ is called {int(np.median(counts))} times a step, once a tensor: that turns the step"
        level = "warning" if trains_well(run) else "problem"
        yield Symptom(
            "clip_per_tensor", level, text, 0, line_of(run, "clip"), ("grad-clip-misuse/per-tensor",)
        )


def clip_sets_the_step(run: Run) -> Iterator[Symptom]:
    """A limit so far below the gradient that, without an optimizer that rescales, it divides the learning rate."""
    before, limit = run.steps["norm_before_clip"], run.steps["clip_limit"]
    known = (before > 0) & np.isfinite(before) & (limit > 0)
    kinds = {o.get("class") for o in run.info.get("optimizers", [])}
    if known.sum() < 20 or kinds != {"SGD"}:
        return
    kept = float(np.median(limit[known] / before[known]))
    if float(np.mean(before[known] > limit[known])) < 0.95 or kept > 0.05:
        return
    too_short = any(
        e.get("event") == "verdict" and e.get("id") == "lr-too-low/tiny-steps" for e in run.events
    )
    text = (
        f"the clip leaves {100 * kept:.2g} % of the gradient (norm {np.median(before[known]):.3g}, "
        f"limit {np.median(limit[known]):.3g}): it sets the step, as a {1 / kept:.0f} times smaller learning rate would"
    )
    level = "problem" if too_short else "warning"
    yield Symptom(
        "clip_sets_the_step", level, text, None, line_of(run, "clip"), ("grad-clip-misuse/limit-too-small",)
    )


def schedule(run: Run) -> Iterator[Symptom]:
    """A learning rate that dies early, never arrives, goes below zero, or swings in the wrong unit.

    What a schedule was meant to do is not in the record: a training that goes well under it speaks for it.
    """
    bases = [o.get("base_lr") for o in run.info.get("optimizers", [])]
    well = trains_well(run)
    for track in tracks(run):
        lr = track.lr[np.isfinite(track.lr)]
        found = below_zero(track)
        if found is None and len(lr) >= 20 and lr.max() > 0 and np.ptp(lr) >= 1e-3 * lr.max():
            number = int(np.nan_to_num(run.steps["optimizer"][track.rows[0]]))
            base = bases[number] if number < len(bases) else None
            found = died_early(run, track, lr) or swings(lr, well) or never_arrives(lr, base, well)
        if found:
            name, id, level, text = found
            label = f"{track.label}: " if track.label else ""
            step = int(track.steps[steps_below_zero(track)[0]]) if name == "below-zero" else 0
            yield Symptom(name, level, label + text, step, where_scheduled(run, id), (id,))


def clip_of_infinity(run: Run) -> Iterator[Symptom]:
    """A clip of a gradient that was infinite: it multiplies by 1/Inf, and Inf times 0 is NaN in every weight."""
    before, after, loss = (run.steps[column] for column in ("norm_before_clip", "grad_norm", "loss"))
    # a GradScaler that has seen the Inf lets no weight change
    taken = np.nan_to_num(run.steps["skipped"]) == 0
    hit = np.flatnonzero(
        np.isinf(before) & np.isnan(after) & run.seen["grad_norm"] & np.isfinite(loss) & taken
    )
    if not len(hit):
        return
    step = int(run.steps["step"][hit[0]])
    text = (
        f"the clip finds a norm of Inf and leaves NaN: Inf times 1/Inf; the loss is still {loss[hit[0]]:.4g}"
    )
    suspects = ("grad-clip-misuse/infinity-to-nan",)
    yield Symptom("clip_of_infinity", "warning", text, step, line_of(run, "clip"), suspects)


def where_scheduled(run: Run, id: str) -> str | None:
    """Of a schedule in the wrong unit, where it is stepped; of a wrong one, where it is made; or where lr is set."""
    order = ("scheduler made", "scheduler", "lr set")
    if id.endswith("/dies-early"):
        order = ("scheduler", "scheduler made", "lr set")
    return line_of(run, *order)


def below_zero(track: Track) -> tuple[str, str, str, str] | None:
    """PyTorch's optimizers take no rate below zero: only a schedule brings one about, and each such step climbs."""
    down = steps_below_zero(track)
    if not len(down) or not (track.lr > 0).any():
        return None
    first, least = int(track.steps[down[0]]), float(track.lr[down].min())
    text = f"the learning rate is below zero in {len(down)} steps, from step {first} on (down to {least:.2g}): each of "
    text += "them goes up the gradient, not down"
    before, then = (
        part[np.isfinite(part)] for part in (track.loss[: down[0]][-len(down) :], track.loss[down])
    )
    if len(before) and len(then):
        text += f"; the loss was {np.median(before):.4g} in as many steps before, and is {np.median(then):.4g} in these"
    return "below-zero", "lr-schedule-error/below-zero", "problem", text


def steps_below_zero(track: Track) -> np.ndarray:
    """Their places; what is hardly below is the rounding of a zero."""
    return np.flatnonzero(track.lr < -1e-6 * np.nanmax(track.lr, initial=0.0))


def died_early(run: Run, track: Track, lr: np.ndarray) -> tuple[str, str, str, str] | None:
    """Next to nothing of its peak for two fifths of the run, and not coming back; harmless once all is learned."""
    for share, level in ((1e-3, "problem"), (1e-2, "warning")):
        alive = np.flatnonzero(lr >= share * lr.max())
        first = int(alive[-1]) + 1
        if first > 0.6 * len(lr):
            continue
        called = float(np.mean(["l" in order for order in run.steps["order"][track.rows][:first]]))
        low = share * lr.max()
        text = f"the learning rate falls from {lr.max():.2g} to under {low:.2g} by step {first} of {len(lr)}"
        if called > 0.9:
            text += ", with scheduler.step() at every batch: was it meant once an epoch?"
        level = "note" if has_learned_by(track.loss, first) else level
        return "dies-early", "lr-schedule-error/dies-early", level, text
    return None


def has_learned_by(loss: np.ndarray, step: int) -> bool:
    """Whether the loss was by then a hundredth of what it was at the start: a schedule has come to its end."""
    start, then = loss[:3], loss[max(0, step - 5) : step + 5]
    start, then = start[np.isfinite(start)], then[np.isfinite(then)]
    return bool(len(start) and len(then)) and 0 <= float(np.median(then)) < 0.01 * float(np.median(start))


def never_arrives(lr: np.ndarray, base: float | None, well: bool) -> tuple[str, str, str, str] | None:
    """The learning rate that the optimizer was given is never nearly reached.

    That alone is no fault: a schedule may well multiply by what is no share (Noam's step^-0.5), and a run may be the
    beginning of a longer one.
    """
    if not base or lr.max() > 0.2 * base:
        return None
    rises = np.flatnonzero(np.diff(lr) > 0)
    if rises_throughout(lr):
        text = (
            f"warmup never ends: the learning rate rises all through the run, to {lr.max():.2g} of {base:.2g}"
        )
        level = "note" if well else "problem"
        if len(rises) < 0.5 * len(lr):
            each = len(lr) / (len(rises) + 1)
            text += f", once in {each:.0f} steps: is its length in steps, and the scheduler stepped once an epoch?"
            level = "warning" if well else "problem"
        return "warmup-never-ends", "lr-schedule-error/warmup-never-ends", level, text
    text = (
        f"the schedule keeps the learning rate at {lr.max():.2g} at most; the optimizer was given {base:.2g}"
    )
    id = "lr-schedule-error/multiplied"
    if math.isclose(lr.max(), base * base, rel_tol=0.01) and not falls_as_a_root(lr):
        level = "warning" if well else "problem"
        return "multiplied", id, level, f"{text}, and the schedule multiplies with it once more"
    return None if well else ("below-base", id, "warning", text)


def rises_throughout(lr: np.ndarray) -> bool:
    """At every step, or in stairs that go on to the end."""
    ways = np.diff(lr)
    rises = np.flatnonzero(ways > 0)
    in_stairs = len(rises) >= FEWEST_STAIRS and bool((ways >= 0).all()) and rises[-1] > 0.7 * len(lr)
    return len(rises) > 0.95 * len(ways) or in_stairs


def falls_as_a_root(lr: np.ndarray) -> bool:
    """Noam's schedule: after its warmup the learning rate falls as 1/√step, whatever it begins with."""
    peak = int(lr.argmax())
    after = lr[peak:] * np.sqrt(np.arange(peak, len(lr)) + 1)
    return len(after) >= 5 and lr[-1] < 0.95 * lr[peak] and float(np.ptp(after)) < 0.05 * float(after.max())


def swings(lr: np.ndarray, well: bool) -> tuple[str, str, str, str] | None:
    """Down and up again, many times, within a few steps each."""
    moves = np.diff(lr)
    moves = moves[np.abs(moves) > 1e-6 * lr.max()]
    turns = int(np.sum((moves[:-1] < 0) & (moves[1:] > 0)))
    period = len(lr) / max(turns, 1)
    if turns < 5 or period > 25 or lr.min() > 0.5 * lr.max():
        return None
    text = f"the learning rate falls and rises again {turns} times, every {period:.0f} steps"
    level = "problem" if period <= 12 else "warning"
    if well:  # short cycles may be meant
        level = "warning" if period <= 12 else "note"
    return "cycles-too-fast", "lr-schedule-error/cycles-too-fast", level, text


def optimizer_settings(run: Run) -> Iterator[Symptom]:
    """Settings outside of the range in which the optimizer can work."""
    well = trains_well(run)
    for index, optimizer in enumerate(run.info.get("optimizers", [])):
        lr_seen = run.steps["lr"][np.nan_to_num(run.steps["optimizer"]) == index]
        peak = float(np.nanmax(lr_seen)) if np.isfinite(lr_seen).any() else 0.0
        for number, group in enumerate(optimizer.get("groups", ())):
            label = f"{optimizer.get('class', '')}" + (
                f", group {number}" if len(optimizer.get("groups", ())) > 1 else ""
            )
            lr = max(float(group.get("lr") or 0.0), peak if len(optimizer.get("groups", ())) == 1 else 0.0)
            for id, level, text in settings_of(
                optimizer.get("class", ""), {**group, "lr": lr}, len(run), well
            ):
                yield Symptom(
                    "optimizer_settings", level, f"{label}: {text}", 0, optimizer.get("line") or None, (id,)
                )


def settings_of(kind: str, group: dict, steps: int, well: bool) -> Iterator[tuple[str, str, str]]:
    betas, momentum = group.get("betas"), group.get("momentum") or 0.0
    eps = group.get("eps")
    if betas and kind in ADAMS and betas[0] ** 2 >= betas[1] > 0:
        text = f"betas {tuple(betas)}: β1² = {betas[0] ** 2:.3g} is not below β2 = {betas[1]:g}: a step has no bound"
        yield "optimizer-config/betas", "problem", text
    if betas and kind in ADAMS and betas[1] == 0:
        yield (
            "optimizer-config/betas",
            "problem",
            "β2 = 0: every entry moves by the learning rate, whatever its gradient",
        )
    if betas and betas[0] > 0.99 and 1 / (1 - betas[0]) > steps / 20:
        text = f"β1 = {betas[0]:g} averages over {1 / (1 - betas[0]):.0f} steps; the run has {steps}"
        yield "optimizer-config/betas", "warning" if well else "problem", text
    if momentum >= 0.995:
        text = f"momentum {momentum:g} adds up {1 / (1 - momentum):.0f} steps; the run has {steps}"
        yield "optimizer-config/momentum", "problem" if 1 / (1 - momentum) > steps / 20 else "warning", text
    if kind in ADAMS and isinstance(eps, (int, float)) and eps >= 1e-3:
        text = f"ε = {eps:g} outweighs √v: the step is as small as the gradient"
        yield "optimizer-config/eps", "warning" if well and eps < 0.05 else "problem", text
    if kind == "SGD":
        rate = group["lr"] / (1 - min(momentum, 0.9999)) * (group.get("weight_decay") or 0)
    elif kind in ("AdamW", "NAdam"):
        rate = group["lr"] * (group.get("weight_decay") or 0)
    else:
        rate = 0.0
    if rate >= 3e-3:
        text = (
            f"weight decay {group['weight_decay']:g} takes away {100 * rate:.2g} % of every weight at each step: "
            f"what is learned is gone after {1 / rate:.0f} steps"
        )
        yield "optimizer-config/weight-decay", "problem" if rate >= 1e-2 or not well else "warning", text


def uneven_windows(run: Run) -> Iterator[Symptom]:
    """Gradients of very different numbers of backwards between steps: the count that decides when to step is off."""
    # closures clear each time
    single = calls(run, "z") <= 1
    # a second stage of training, with its own optimizer, may have windows of its own
    for track in tracks(run):
        counts = run.steps["backwards"][track.rows]
        counts = counts[np.isfinite(counts) & single[track.rows] & (counts > 0)].astype(int)
        yield from uneven(run, counts)


def uneven(run: Run, counts: np.ndarray) -> Iterator[Symptom]:
    if len(counts) < 10:
        return
    usual = int(np.bincount(counts).argmax())
    long = counts[counts > 2 * usual]
    if len(long) >= 2 and long.sum() > 0.5 * counts.sum():
        text = (
            f"most steps follow {usual} backward{'s' if usual > 1 else ''}, but {len(long)} of {len(counts)} follow "
            f"{long.min()} to {long.max()}: {100 * long.sum() / counts.sum():.0f} % of all backwards go into those"
        )
        where = line_of(run, "step condition") or line_of(run, "step")
        suspects = ("grad-accumulation-error/uneven-windows",)
        yield Symptom("uneven_windows", "problem", text, None, where, suspects)


def steps_stopped(run: Run) -> Iterator[Symptom]:
    """Backwards that go on at the one line where they always were, long after the last step of an optimizer."""
    after = facts(run, "backwards_after_the_last_step") or 0
    counts = run.steps["backwards"]
    usual = counts[np.isfinite(counts) & (counts > 0)]
    if not len(usual) or after < max(20, 10 * usual.max()) or len(set(lines_of(run, "backward"))) != 1:
        return
    last = int(run.steps["step"][-1])
    text = (
        f"after step {last} backward was called {after} times more, and no optimizer took a step: "
        f"{100 * after / (after + usual.sum()):.0f} % of all gradients were thrown away"
    )
    where = line_of(run, "step condition") or line_of(run, "step")
    yield Symptom("steps_stopped", "problem", text, last, where, ("param-not-updated/steps-stopped",))


def cleared_between_backwards(run: Run) -> Iterator[Symptom]:
    """zero_grad before each of several backwards of a step: only the last one counts.

    Backwards at several lines may each have a purpose; micro-batches come from one.
    """
    if facts(run, "moved_between_backwards") or len(set(lines_of(run, "backward"))) > 1:
        return
    kinds = [optimizer.get("class") for optimizer in run.info.get("optimizers", [])]
    orders = run.steps["order"][1:][calls(run, "b")[1:] > 1]
    if len(kinds) != 1 or kinds[0] == "LBFGS" or len(orders) < 4 or len(orders) < 0.9 * (len(run) - 1):
        return
    between = [order[order.index("b") : order.rindex("b")].count("z") for order in orders]
    backwards = int(np.median([order.count("b") for order in orders]))
    if np.mean(np.array(between) >= 1) > 0.9:
        text = f"zero_grad is called between the {backwards} backwards of a step: only the last one counts"
        suspects = ("grad-accumulation-error/overwritten",)
        where = line_of(run, "zero_grad")
        yield Symptom("cleared_between_backwards", "problem", text, 1, where, suspects)


def _momentum(run: Run) -> bool:
    return any(group.get("momentum") for o in run.info.get("optimizers", []) for group in o.get("groups", ()))


BOOKKEEPING = (
    validates_in_train_mode,
    evaluated_too_soon,
    loads_nothing,
    loads_overwritten,
    optimizer_state_lost,
    average_too_slow,
    stored_data_changed,
    pairs_change,
    workers_draw_alike,
    files_as_text,
    clip_misses,
    clip_sets_the_step,
    clip_of_infinity,
    schedule,
    optimizer_settings,
    uneven_windows,
    steps_stopped,
    cleared_between_backwards,
)
