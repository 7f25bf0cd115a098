"""What the curve of the loss shows: whether it falls, rises, stands, swings or leaps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradproof.diagnosis.findings import Symptom
from gradproof.diagnosis.places import facts
from gradproof.diagnosis.series import Track, spikes, tracks, trend, turn
from gradproof.diagnosis.turned import is_of_its_batch
from gradproof.record.run import Run

BACK = 1.2  # times its start: where a loss that has leapt to twice that or more is taken to be back
CALMER = 0.5  # of the highest rate: at less than that, steps do not begin to overshoot


def trains_well(run: Run) -> bool:
    """The loss falls in every track that is long enough to say so."""
    found = [t for track in tracks(run) if (t := trend(track.loss)) is not None]
    return bool(found) and all(t.fell for t in found)


def largest_leap(run: Run) -> float:
    """How many times the loss at its largest was the loss at its start."""
    leaps = [1.0]
    for track in tracks(run):
        loss = track.loss[np.isfinite(track.loss)]
        if len(loss) > 8 and float(np.median(loss[:3])) > 0:
            leaps.append(float(loss.max()) / float(np.median(loss[:3])))
    return max(leaps)


def share_of_steps_above(run: Run, level: float) -> float:
    """How much of a run went by before its loss, smoothed, was first below a level."""
    shares = [0.0]
    for track in tracks(run):
        loss = track.loss[np.isfinite(track.loss)]
        if len(loss) >= 30:
            width = max(1, len(loss) // 30)
            smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
            below = np.flatnonzero(smooth < level)
            shares.append((float(below[0]) if len(below) else len(smooth)) / len(smooth))
    return max(shares)


def loss_fell(run: Run) -> bool:
    """The loss falls, or need not: how a policy's goes, and that of values against its returns, tells nothing."""
    return bool(facts(run, "policy_loss")) or any(
        found.fell for track in tracks(run) if (found := trend(track.loss))
    )


def is_an_objective(loss: np.ndarray) -> bool:
    """Negative at times, and no larger at its end than it was: a policy's or a bound's, which may rise and be well."""
    loss = loss[np.isfinite(loss)]
    early, late = loss[: len(loss) // 4], loss[-max(3, len(loss) // 10) :]
    return bool((loss < 0).any()) and float(np.median(np.abs(late))) < 3 * float(
        np.abs(early).max(initial=0.0)
    )


def loss_not_improving(run: Run) -> Iterator[Symptom]:
    """The loss ends where it began, or higher."""
    several, policy = len(list(tracks(run))) > 1, facts(run, "policy_loss")
    for track in tracks(run):
        found = trend(track.loss)
        if found is None or found.points < 30 or found.fell or at_optimum(track):
            continue
        suspects: tuple[str, ...]
        numbers = f"{found.beginning:.4g} at the start, {found.last:.4g} at the end of {found.points} steps"
        if found.rose:
            # of two players, one may lose what the other wins
            name, level = ("player_losing", "note") if several else ("loss_rising", "problem")
            if not several and (policy or is_an_objective(track.loss)):
                name, level = "objective_rising", "note"
            elif (
                not several and found.last < 0.8 * found.start
            ):  # it has learned, and gives some of that back
                name, level = "loss_drifting", "note" if found.last < 0.5 * found.start else "warning"
            elif not several and found.end < BACK * min(found.start, float(np.nanmax(track.loss)) / 2):
                name, level = "loss_came_back", "note"  # it had leapt, and is nearly where it was
            suspects = () if policy or was_calm_at_higher_rates(track) else ("lr-too-high/diverged",)
            yield of_track(track, name, level, f"the loss rises: {numbers}", suspects)
        else:
            suspects = ("lr-too-low/tiny-updates", "lr-too-high/overshoot", "detached-graph/cut")
            name, level = ("player_standing", "note") if several else ("loss_not_improving", "warning")
            if policy and not several:
                name, level = "objective_standing", "note"
            yield of_track(track, name, level, f"the loss does not improve: {numbers}", suspects)


def was_calm_at_higher_rates(track: Track) -> bool:
    """Whether the loss leapt at a rate that had been higher by far before, and had done no harm then."""
    found = turn(track.loss)
    return found is not None and found.leaps and rate_was_higher(track, found.place)


def rate_was_higher(track: Track, place: int) -> bool:
    rates = track.lr[: place + 1]
    return len(rates) > 0 and bool(np.isfinite(rates).all()) and bool(rates[-1] < CALMER * rates.max())


def loss_turned(run: Run) -> Iterator[Symptom]:
    """The loss leaves its course late and stays off it: no cause by itself, but what a cause has to explain."""
    with_loss = [track for track in tracks(run) if np.isfinite(track.loss).any()]
    if len(with_loss) > 1 or facts(run, "policy_loss"):
        return  # of two players one may lose; the returns of a policy go up and down
    for track in with_loss:
        found = turn(track.loss)
        if found is not None and not is_an_objective(track.loss):
            how = "leaps" if found.leaps else "was least"
            step = int(track.steps[found.place])
            text = (
                f"the loss {how} at about step {step}: {found.before:.4g} then, {found.after:.4g} in the end"
            )
            yield Symptom("loss_turned", "note", text, step)


def leap_to_look_into(run: Run) -> tuple[int, bool] | None:
    """(the step, whether it was a passing thing): where the loss turned for good, or else its highest spike."""
    for symptom in loss_turned(run):
        return int(symptom.step or 0), False
    for symptom in loss_spike(run):
        return int(symptom.step or 0), True
    return None


def loss_hardly_falling(run: Run) -> Iterator[Symptom]:
    """A loss that falls, but by so little that nobody would call it training."""
    for track in () if facts(run, "policy_loss") else tracks(run):
        found = trend(track.loss)
        if found is None or found.points < 50 or not found.fell:
            continue
        start = min(found.start, found.first)
        if start <= 0:  # shares of a loss that may be negative say nothing
            continue
        share = (start - found.last) / start
        if share < 0.05 and not at_optimum(track):
            numbers = f"{start:.4g} to {found.last:.4g}"
            text = f"the loss falls by only {100 * share:.1f} % in {found.points} steps: {numbers}"
            yield of_track(track, "loss_hardly_falling", "note", text, ())


NOTHING = 0.03  # of the targets explained: a constant explains 0, give or take a batch
AROUND = 10  # steps whose losses say what it was
TIME_TO_LEARN = 50  # steps, and a third of the run
FELL = 0.03  # of the loss at that step: more is learning


def nothing_learned(run: Run) -> Iterator[Symptom]:
    """A network that does no better than a constant, and a loss that has stopped falling."""
    only = list(tracks(run))
    if len(only) != 1 or facts(run, "policy_loss") or len(only[0].steps) < 2 * TIME_TO_LEARN:
        return
    steps = only[0].steps
    last = _around(only[0], len(steps))
    guess = float(np.median([guess for _, guess in facts(run, "guessing") or [(0, math.inf)]]))
    known = [
        (step, f"at step {step} the predictions explain {100 * share:.1f} % of their targets")
        for step, share in facts(run, "learned") or ()
        if share < NOTHING
    ]
    if last > (1 - FELL) * guess:
        known.append((len(steps) * 2 // 3, f"a constant has a loss of {guess:.4g}"))
    for step, said in known:
        then, left = _around(only[0], step), len(steps) - step
        if left >= max(TIME_TO_LEARN, len(steps) // 3) and last > (1 - FELL) * then > 0:
            text = f"{said}, and the loss has not fallen since step {step}: {then:.4g} to {last:.4g}"
            yield of_track(only[0], "nothing_learned", "note", text, (), step)
            return


def _around(track: Track, step: int) -> float:
    """The loss at a step, as those around it have it; nan where none is finite."""
    near = track.loss[abs(track.steps - step) <= AROUND]
    return float(np.median(near[np.isfinite(near)])) if np.isfinite(near).any() else math.nan


def at_optimum(track: Track) -> bool:
    """A loss that starts at, and stays within noise of, zero has nothing left to learn."""
    finite = track.loss[np.isfinite(track.loss)]
    return bool(len(finite)) and float(np.median(np.abs(finite))) < 1e-3


def loss_oscillating(run: Run) -> Iterator[Symptom]:
    """Up and down from step to step, by much, without getting anywhere."""
    for track in () if facts(run, "policy_loss") else tracks(run):
        values = track.loss[np.isfinite(track.loss)]
        found = trend(values)
        if found is None or found.points < 30 or found.fell:
            continue
        moves = np.diff(values)
        turns = float(np.mean(np.sign(moves[1:]) != np.sign(moves[:-1])))
        size = float(np.median(np.abs(moves))) / (abs(float(np.median(values))) + 1e-12)
        # batches drawn at random turn 2 times in 3 and do not remember; an overshooting step swings back
        if turns > 0.8 and swings_back(values) and size > 0.05:
            text = f"the loss swings by {100 * size:.0f} % from step to step and stays at {np.median(values):.4g}"
            yield of_track(track, "loss_oscillating", "warning", text, ("lr-too-high/overshoot",))


def swings_back(values: np.ndarray) -> bool:
    """What is above the middle at one step is below it at the next: correlation under −0.5."""
    centred = np.clip(values, *np.percentile(values, (5, 95))) - np.median(values)
    return bool(np.sum(centred[1:] * centred[:-1]) < -0.5 * np.sum(centred * centred))


def loss_spike(run: Run) -> Iterator[Symptom]:
    """A jump far above what the last fifty steps showed; a policy's loss jumps with what was seen last."""
    for track in () if facts(run, "policy_loss") else tracks(run):
        found = spikes(track.loss, track.steps)
        if found:
            step, value, usual = max(found, key=lambda spike: spike[1] / (abs(spike[2]) + 1e-12))
            text = f"the loss jumps to {value:.4g} from {usual:.4g}" + (
                f", one of {len(found)} spikes" if len(found) > 1 else ""
            )
            calm = rate_was_higher(track, int(np.searchsorted(track.steps, step))) or is_of_its_batch(
                run, step
            )
            yield of_track(track, "loss_spike", "note", text, () if calm else ("lr-too-high/spike",), step)


def all_at_optimum(run: Run) -> bool:
    return all(at_optimum(track) for track in tracks(run))


def of_track(
    track: Track, name: str, level: str, text: str, suspects: tuple[str, ...], step: int | None = None
) -> Symptom:
    if track.label:
        text = f"{track.label}: {text}"
    return Symptom(name, level, text, step, track.label or None, suspects)
