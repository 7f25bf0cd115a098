"""Can the loss fall without end? Learned weights of its terms, and the outputs of the network, are moved alone, far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.choices import policy_terms
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, place_of
from gradproof.instruments.walk import users
from gradproof.tape.operations import Operation, Slot, references


def does_the_loss_run_away(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, along_a_weight, along_an_output))


# weights ----------------------------------------------------------------------------------------------------

FEW = 16  # numbers: a weight for each term, not a layer's bias
FAR = 8.0  # e^8: what is weighed by an exponential counts for three thousand times less, or more
ON = 1.5  # times as far down, twice as far away: a line falls twice as far, what has a floor hardly further


def along_a_weight(evidence: Evidence) -> Iterator[Verdict]:
    """exp(-s) · loss + s/2 is lowest somewhere; exp(s) · loss + s/2 falls without end, and the loss counts for less."""
    if not evidence.flow.comparisons or policy_terms(evidence.flow):
        return
    for parameter in evidence.tape.parameters:
        user = user_in_the_loss(evidence, parameter) if parameter.index in evidence.tape.stepped else None
        if user is None:
            continue
        value = evidence.tape.leaf_value(parameter.index)
        for way in (-1.0, 1.0):
            near, far = (
                evidence.loss_at({parameter.index: value + way * share * FAR}) for share in (0.5, 1.0)
            )
            fallen = evidence.loss - near
            if math.isfinite(far) and far < 0 < fallen and evidence.loss - far > ON * fallen:
                yield confirmed(
                    "loss-scale-or-sign/weight-runs-away",
                    f"{parameter.name} moved by {way * FAR:g}, and nothing else, takes the loss from "
                    f"{evidence.loss:.3g} to {far:.3g}, and on without end: what it weighs counts for less and less",
                    where=place_of(user.module, user.line),
                    confidence="proven",  # it was moved alone
                )
                return


def user_in_the_loss(evidence: Evidence, parameter: Slot) -> Operation | None:
    """The first operation on a parameter that never meets more than a few numbers on its way to the loss."""
    if math.prod(parameter.shape) > FEW:
        return None
    reach, first = {parameter.index}, None
    for op in evidence.flow.operations:
        if reach.isdisjoint(op.reads):
            continue
        if any(math.prod(evidence.slot(slot).shape) > FEW for slot in (*op.makes, *op.reads)):
            return None
        reach.update((*op.makes, *op.writes))
        first = first or op
    return first


# outputs ----------------------------------------------------------------------------------------------------

DECADES = (10.0, 100.0, 1000.0)  # a logarithm falls as far in each of them, what has a floor does not
NO_LESS = 0.9  # of the decade before: those of a logarithm are equal, but for where it begins
EACH = 0.2  # of its share of the fall: no group of samples may pay for the others
# of an output, along its features
PARTS = ("split", "chunk", "split_with_sizes", "slice", "select", "unbind")
PASSES = RESHAPES.union(PARTS)
MOST = 6  # outputs that are shifted
GROUPS = 4  # of samples, each shifted alone: all must agree


def along_an_output(evidence: Evidence) -> Iterator[Verdict]:
    """A residual weighed by a learned variance whose logarithm has the wrong sign: the loss goes to −∞ with it.

    Only of a loss that compares values with targets, whose samples are not weighed (a policy's are), and that is on
    its way to −∞ in this run.
    """
    flow, losses = evidence.flow, evidence.losses
    if not runs_down(losses) or not flow.comparisons:
        return
    if any(c.kind != "value" for c in flow.comparisons) or are_samples_weighed(evidence):
        return
    for slots, way in product(outputs(evidence)[:MOST], (1.0, -1.0)):
        now = flow.values([*slots, *evidence.tape.loss_slots])
        fallen = falls_without_end(evidence, now, slots, way) if now.keys() >= set(slots) else None
        if fallen is None:
            continue
        readers = users(flow, slots[:1], PASSES)
        shifts, far = ", ".join(f"{way * d:g}" for d in DECADES), ", ".join(f"{loss:.3g}" for loss in fallen)
        yield confirmed(
            "loss-scale-or-sign/unbounded",
            f"one output {list(evidence.slot(slots[0]).shape)} of the network, shifted by {shifts} and nothing else, "
            f"takes the loss from {evidence.loss:.3g} to {far}: it falls without "
            "end for all samples, however far predictions are from their targets",
            f"the loss of the run goes that way: {losses[0]:.3g} at first, {losses[-1]:.3g} now",
            where=place_of("", readers[-1].line if readers else None),
            confidence="proven",  # it was shifted alone
        )
        return


def runs_down(losses: Sequence[float]) -> bool:
    """Whether the loss has become negative and lies further below its start than that was from zero."""
    first, last = losses[:3], losses[-3:]
    if len(losses) < 6 or not all(map(math.isfinite, (*first, *last))):
        return False
    return median(last) < 0 and median(last) < median(first) - max(1.0, abs(median(first)))


def are_samples_weighed(evidence: Evidence) -> bool:
    """Whether the loss multiplies what it learns from with numbers from outside, other than a mask."""
    flow = evidence.flow
    for op in flow.operations:
        refs = list(references(op.args))
        if op.name not in ("mul", "div", "dot", "mm") or len(refs) != 2 or flow.tail.isdisjoint(op.makes):
            continue
        given = [ref.slot for ref in refs if not ref.tracked and math.prod(evidence.slot(ref.slot).shape) > 1]
        values = flow.value(given[0]) if len(given) == 1 else torch.zeros(())
        if values is None or not bool(((values == 0) | (values == 1)).all()):
            return True
    return False


def outputs(evidence: Evidence) -> list[list[int]]:
    """What trained layers put out, and its parts along features; one list for all calls of a layer, the last first."""
    flow, trained = evidence.flow, set(evidence.tape.stepped)
    found: dict[tuple, list[int]] = {}
    key_of: dict[int, tuple] = {}
    for op in flow.operations:
        weights = trained.intersection(op.reads)
        if weights and op.makes and op.makes[0] in flow.tail:
            key_of[op.makes[0]] = (tuple(sorted(weights)),)
        elif op.name in PASSES and op.reads[0] in key_of and not cuts_batch(evidence, op):
            for place, slot in enumerate(op.makes):
                rest = tuple(arg for arg in op.args[1:] if isinstance(arg, int))
                key_of[slot] = (*key_of[op.reads[0]], (op.name, place, rest))
        else:
            continue
        for slot in op.makes:
            if slot in flow.tail and slot in key_of:
                found.setdefault(key_of[slot], []).append(slot)
    return [slots for _, slots in sorted(found.items(), key=lambda item: -len(item[0]))]


def cuts_batch(evidence: Evidence, op: Operation) -> bool:
    """Whether a part is taken out of the batch: real and generated samples of a critic."""
    if op.name not in PARTS:
        return False
    numbers = [arg for arg in op.args[1:] if isinstance(arg, int)]
    place = {"slice": 0, "select": 0, "unbind": 0}.get(op.name, len(numbers) - 1)
    dim = op.kwargs.get(
        "dim", numbers[place] if 0 <= place < len(numbers) and (place or op.name in PARTS[3:]) else 0
    )
    return dim in (0, -len(evidence.slot(op.reads[0]).shape))


def falls_without_end(
    evidence: Evidence, now: dict[int, Tensor], slots: list[int], way: float
) -> list[float] | None:
    """The losses at three shifts, if each is lower and the last decade brings no less than the one before."""
    before = loss_of(evidence, now)

    def loss_at(shift: float, rows: slice = slice(None)) -> float:
        moved = {slot: now[slot].clone() for slot in slots}
        for value in moved.values():
            value[rows] += way * shift
        return loss_of(evidence, evidence.flow.values(evidence.tape.loss_slots, moved))

    fallen = [loss_at(shift) for shift in DECADES]
    first, second, third = (a - b for a, b in zip([before, *fallen], fallen, strict=False))
    if not all(map(math.isfinite, fallen)) or not min(first, second, third) > 0:
        return None
    count = min(now[slot].shape[0] if now[slot].dim() else 0 for slot in slots)
    if not fallen[-1] < 0 or not third > NO_LESS * second or count < GROUPS:
        return None
    whole = before - fallen[1]
    parts = (before - loss_at(DECADES[1], slice(group, None, GROUPS)) for group in range(GROUPS))
    return fallen if all(part > EACH * whole / GROUPS for part in parts) else None


def loss_of(evidence: Evidence, values: dict[int, Tensor]) -> float:
    found = [values[slot] for slot in evidence.tape.loss_slots if slot in values]
    return float(torch.stack([loss.double().sum() for loss in found]).sum()) if found else math.nan
