"""Does an update by hand do what its rule does in the textbook? Its operations on the tape, its changes in float64.

A script that changes its parameters itself may keep no state between two steps, share one between two parameters, or
forget what the averages of Adam need at their start.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator

import numpy as np

from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.rules import FEWEST, FITS, ROUNDING, Rule, adam_way, fitted, recognise
from gradproof.instruments.update import Update, groups_of, is_by_hand, line_of, read_update, shown
from gradproof.tape.operations import Operation

ROOTS = ("sqrt", "sqrt_", "rsqrt", "rsqrt_", "_foreach_sqrt")
CLEARS = ("zero_", "_foreach_zero_")
MADE_ANEW = ("zeros_like", "zeros", "new_zeros", "full", "full_like", "zero", "new_full", "empty_like")
CALLED_LOSS = re.compile(r"loss|cost|nll|error|energy", re.I)
FAINT = 1e-3  # of the largest gradient: below, an ε may weigh
ALIKE = 5e-3  # of a length: what an ε and float32 leave of equal lengths
OFF = 0.05  # of the size of the changes: how far the textbook's own must be off, before another is said to be wrong


def is_the_update_the_textbooks(evidence: Evidence) -> Iterator[Verdict]:
    """What is cleared too soon, shared or thrown away; then the rule, and what it lacks."""
    if not is_by_hand(evidence):
        return
    update = read_update(evidence.tape)
    slips = (look(evidence, update) for look in (cleared_too_soon, shared_state, climbs_its_loss))
    yield from filter(None, slips)
    yield from judge_rule(evidence, update)


def names_of(evidence: Evidence, slots: list[int]) -> str:
    return shown([evidence.slot(slot).name for slot in slots])


def cleared_too_soon(evidence: Evidence, update: Update) -> Verdict | None:
    """Gradients set to zero after backward, and before the update has read them."""
    cleared: dict[int, Operation] = {}
    for op in update.operations:
        storages = {update.storage(slot) for slot in op.writes}
        if op.name in CLEARS:
            cleared |= {update.gradients[s]: op for s in storages if s in update.gradients}
        elif storages & update.parameters.keys():
            break
    moved = any(bool((evidence.updates.get(slot, np.zeros(1)) != 0).any()) for slot in cleared)
    if not cleared or moved or len(cleared) < len(update.gradients):
        return None
    where = line_of(next(iter(cleared.values())))
    return confirmed(
        "zero-grad-error/before-step",
        f"the gradients of {names_of(evidence, list(cleared))} are set to zero at {where}, after backward and "
        f"before the update at {update.line or 'the end of the step'} has read them: it changes nothing",
        where=where or None,
        confidence="proven",  # the step replayed
        fix="clear the gradients after the update, or before backward",
        lasting=False,
    )


def shared_state(evidence: Evidence, update: Update) -> Verdict | None:
    """One tensor that takes in the gradients of two parameters, entry by entry, and lives on to the next step."""
    slots = update.tape.slots
    behind: dict[int, set[int]] = {storage: {slot} for storage, slot in update.gradients.items()}
    taken: dict[int, dict[int, Operation]] = {}
    states = {slot.storage for slot in update.tape.leaves() if slot.kind == "state"}
    for op in update.operations:
        made = [*op.makes, *op.writes]
        shapes = {slots[slot].shape for slot in made}
        read = [slot for slot in op.reads if slots[slot].shape in shapes and slots[slot].shape]
        parameters = set().union(*(behind.get(update.storage(slot), set()) for slot in read))
        for slot in made:
            storage = update.storage(slot)
            if slot in op.writes and storage in states and len(parameters) == 1:
                # what is read from it later belongs to whom it was last given
                taken.setdefault(storage, {}).update(dict.fromkeys(parameters, op))
            elif storage not in update.gradients:
                behind[storage] = set(parameters)
    owners = next((owners for owners in taken.values() if len(owners) > 1), None)
    if owners is None:
        return None
    where = line_of(next(iter(owners.values())))
    return confirmed(
        "optimizer-config/state-shared",
        f"one tensor at {where} averages the gradients of {names_of(evidence, list(owners))}: each is moved "
        "by what others want",
        where=where or None,
        confidence="proven",  # the same memory
    )


def climbs_its_loss(evidence: Evidence, update: Update) -> Verdict | None:
    """Every update so far adds the gradient of something that the script calls a loss, and that has risen since.

    Where the loss compares predictions with targets, those are asked instead (see terms).
    """
    losses = list(filter(math.isfinite, evidence.losses))
    up = any(group.get("maximize") for group in groups_of(evidence)) and not evidence.flow.comparisons
    if not up or len(losses) < 3 or not losses[-1] > losses[0]:
        return None
    line = next((call.line for call in evidence.tape.top_backwards if call.line is not None), None)
    text = linecache.getline(line.file, line.number) if line is not None else ""
    if not CALLED_LOSS.search(text) or "-" in text.partition("loss")[0]:
        return None
    return confirmed(
        "optimizer-config/maximize",
        f"every update so far goes up the gradient, and the loss has gone from {losses[0]:.4g} to {losses[-1]:.4g}: "
        f"the update adds what it ought to subtract",
        where=update.line or None,
        confidence="likely",  # that it is to be minimised is read off its name
    )


# the rule ---------------------------------------------------------------------------------------------------


def judge_rule(evidence: Evidence, update: Update) -> Iterator[Verdict]:
    """The rule by its changes; what Adam's averages lack, and a state that is thrown away."""
    history = evidence.facts.own_updates
    if not history or len(history["gradients"]) < FEWEST:
        return
    gradients, before, after = (history[key].double().numpy() for key in ("gradients", "before", "after"))
    moved = (after != before).any(axis=0)
    gradients, before, changes = gradients[:, moved], before[:, moved], (after - before)[:, moved]
    if not changes.size:
        return
    rules = recognise(gradients, before, changes)
    evidence.noted["update_rule"] = {
        "rule": str(rules[0]) if rules else "something else",
        "line": update.line,
    }
    length = length_of_each(gradients, before, changes)
    if length is None or not takes_roots(update):
        yield from judge_correction(rules, gradients, before, changes, update.line)
        return
    anew = made_anew(update)
    where = line_of(anew) if anew is not None else update.line
    yield confirmed(
        "optimizer-config/state-not-kept",
        f"in each of {len(changes)} updates all entries move by the same length ({length:.3g} in the last), "
        "against the sign of their gradients, whatever those are and were before: the averages of the gradient and "
        f"of its square begin at zero at every step{f'; it is made anew at {where}' if anew is not None else ''}",
        where=where or None,
        confidence="proven",  # the changes are those of sign descent, to float64
    )


def judge_correction(
    rules: list[Rule], gradients: np.ndarray, before: np.ndarray, changes: np.ndarray, line: str
) -> Iterator[Verdict]:
    if not rules:
        said = "the changes of the parameters follow no rule of the textbook at one rate"
        yield undecided("optimizer-config", said)
        return
    is_adam = rules[0].name in ("Adam", "AdamW")
    best = min(rules, key=lambda rule: rule.error) if is_adam else rules[0]
    if not is_adam or all(best.corrected):
        said = f"{len(changes)} updates are {best} to {best.error:.0e}, in float64"
        yield excluded("optimizer-config/rule", said)
        return
    first, second, eps = (value for _, value in best.settings)
    right = fitted(Rule("Adam"), adam_way(gradients, first, second, eps), before, changes)
    if not (best.error <= FITS and right.error > OFF):
        return
    lacks = {(True, False): "the average of the squares is not", (False, True): "the average is not"}
    times = (1 - first) / np.sqrt(1 - second)
    yield confirmed(
        "optimizer-config/no-bias-correction",
        f"{len(changes)} updates are {best} to {best.error:.0e} if {lacks.get(best.corrected, 'neither average is')} "
        f"divided by 1 - β^t, and {100 * right.error:.0f} % off the textbook's Adam",
        "" if any(best.corrected) else f"the first steps are {times:.2g} times as long as the rate says",
        where=line or None,
        confidence="proven",  # float64 disagrees
    )


def length_of_each(gradients: np.ndarray, before: np.ndarray, changes: np.ndarray) -> float | None:
    """How far every entry moved in the last update, where in each update all moved alike, whatever their gradients."""
    length = None
    for gradient, weight, change in zip(gradients, before, changes, strict=True):
        clear = np.abs(gradient) > np.abs(gradient).max() * FAINT
        lengths = np.abs(change[clear])
        if len(lengths) < 4 or (change[clear] * gradient[clear] >= 0).any():
            return None
        allowed = ALIKE * lengths.max() + ROUNDING * np.abs(weight[clear])
        if (np.abs(lengths - lengths.max()) > allowed).any():
            return None
        length = float(np.median(lengths))
    return length


def takes_roots(update: Update) -> bool:
    """Whether something is divided by the root of a square: a rule that means to keep an average."""
    return any(
        op.name in ROOTS or (op.name in ("pow", "pow_") and 0.5 in op.args) for op in update.operations
    )


def made_anew(update: Update) -> Operation | None:
    """An operation of the update that makes a state of nothing but zeros, of the shape of a parameter."""
    shapes = {slot.shape for slot in update.tape.parameters}
    made = (op for op in update.operations if op.name in MADE_ANEW)
    return next((op for op in made if any(update.tape.slots[s].shape in shapes for s in op.makes)), None)
