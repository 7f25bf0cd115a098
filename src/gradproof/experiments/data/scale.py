"""Are the numbers of a size that a network can take, and do they vary? Inputs and targets as they are fed in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradproof.experiments.data.targets import LATE, loss_and_guess, share_learned
from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, Flow, place_of, place_of_data
from gradproof.instruments.moved import hold_against_before
from gradproof.instruments.source import say_where_made
from gradproof.tape.operations import Operation


def are_numbers_of_a_fitting_size(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, of_their_size, that_hardly_vary, have_the_data_moved))


FAMILY = "input-or-target-scale"
LARGE = 30.0  # root mean square of a feature; standardised ones have 1
TINY = 0.02  # the same: a fiftieth of what weights are made for, beside which the bias is all
HUGE = 100.0  # so large that a troubled run needs no other reason
BEYOND = 1e-3  # 0 and 1: rounding in float16 goes no further
LOW = -1e3  # added to a score: whose exponential is 0 then in every format
FEWEST_PIXELS = 64  # of an image, 8 × 8
ALIKE = 0.01  # of a loss: what rounding in half precision makes of it
LITTLE = 0.2  # of the targets' variance or entropy explained, late
NORMS = {
    "native_batch_norm", "native_layer_norm", "_native_batch_norm_legit", "native_group_norm", "cudnn_batch_norm",
}  # fmt: skip


def of_their_size(evidence: Evidence) -> Iterator[Verdict]:
    """Pixels up to 255, raw features, raw targets, targets of a yes-or-no loss that are neither."""
    flow = evidence.flow
    values = flow.values([*flow.inputs, *(c.target for c in flow.comparisons)])
    found, learned = False, None
    for comparison in flow.comparisons:
        learned = share_learned(evidence, comparison) if evidence.step >= LATE else None
        target = values.get(comparison.target)
        if target is not None and target.is_floating_point() and target.numel():
            for verdict in (
                *of_yes_or_no(evidence, comparison, target),
                *(of_targets(evidence, comparison, target, learned) if is_data(flow, comparison) else ()),
            ):
                found = True
                yield verdict
    note_what_is_learned(evidence)
    tiny = of_first_layer(evidence)
    if tiny is not None:
        yield tiny
        return
    for slot in flow.inputs:
        value = values.get(slot)
        if (
            value is not None
            and value.is_floating_point()
            and value.dim() >= 2
            and not is_mask(value)
            and not _is_normalised(flow, slot)
        ):
            for verdict in of_inputs(evidence, slot, value, learned):
                yield verdict
                return
            if not found:
                size = float(value.double().pow(2).mean().sqrt())
                yield excluded(f"{FAMILY}/raw-features", f"the inputs have a root mean square of {size:.3g}")
                return


def is_data(flow: Flow, comparison: Comparison) -> bool:
    """Whether no network has made the targets: what a reference or a target network says has the size that it has."""
    return flow.is_given(comparison.target)


def note_what_is_learned(evidence: Evidence) -> None:
    """Into the run's facts, where targets are data and not a network's: how much of them a late step explains, and
    the loss of the best constant, where the loss of the step is this one."""
    flow = evidence.flow
    data = [c for c in flow.comparisons if is_data(flow, c)]
    found = [pair for c in data if (pair := loss_and_guess(evidence, c)) and all(map(math.isfinite, pair))]
    if not found:
        return
    known = evidence.memory.setdefault("learned", {"learned": [], "guessing": []})
    if evidence.step >= LATE:
        known["learned"].append([evidence.step, max(1 - loss / guess for loss, guess in found)])
    (loss, guess), *others = found
    if not others and len(data) == 1 and abs(evidence.loss - loss) <= ALIKE * loss:
        known["guessing"].append([evidence.step, guess])
    evidence.noted |= {name: list(pairs) for name, pairs in known.items() if pairs}


def have_the_data_moved(evidence: Evidence) -> Verdict | None:
    """Where the loss leaps: are its data still what they were?"""
    held = hold_against_before(evidence)
    if held is None:
        return None
    if not held.what:
        said = f"where the loss leaps, inputs and targets have the size they had at {held.steps} steps before"
        return excluded(f"{FAMILY}/moved", said)
    return confirmed(
        f"{FAMILY}/moved",
        f"the {held.what} of the numbers {list(evidence.slot(held.slot).shape)} is {held.now:.4g}; at the {held.steps} "
        f"steps recorded before it was {held.low:.4g} to {held.high:.4g}",
        f"the loss leaps with it, from {held.usual_loss:.4g} to {held.loss:.4g}",
        *say_where_made(evidence, held.slot),
        where=evidence.flow.origin(held.slot),
        level="warning",
        confidence="likely",
        lasting=False,
    )


def of_first_layer(evidence: Evidence) -> Verdict | None:
    """What the first layer reads, after all that is done to the data: so small that only its bias matters."""
    flow = evidence.flow
    for op in flow.layers:
        for slot in op.reads:
            shape = evidence.slot(slot).shape
            if slot in flow.tracked or slot in flow.weights or len(shape) < 2 or shape[0] < 2:
                continue
            if evidence.slot(slot).is_sparse:
                return None
            value = flow.values([slot]).get(slot)
            if value is None or not value.is_floating_point() or not value.numel() or op.name in NORMS:
                return None
            size = float(value.double().square().mean().sqrt())
            if not 0 < size < TINY or _is_normalised(flow, op.makes[0]):
                return None
            return confirmed(
                f"{FAMILY}/tiny-features",
                f"the first layer is given numbers of the size {size:.2g} (at most {float(value.abs().max()):.2g}); "
                "its weights are made for about 1",
                where=place_of(op.module, op.line),
                confidence="likely",
                if_troubled=True,
                lasting=False,
            )
    return None


def of_yes_or_no(evidence: Evidence, comparison: Comparison, target: Tensor) -> Iterator[Verdict]:
    if comparison.kind != "binary":
        return
    low, high = float(target.min()), float(target.max())
    if low < -BEYOND or high > 1 + BEYOND:
        yield confirmed(
            f"{FAMILY}/yes-or-no-target",
            f"the targets of the binary cross-entropy go from {low:.4g} to {high:.4g}; it wants 0 to 1, "
            "and has no lower bound outside",
            *say_where_made(evidence, comparison.target, comparison.operation.line, target=True),
            where=evidence.flow.origin(comparison.target, comparison.operation.line),
            fix=f"divide the targets by {high:.4g}" if low >= 0 else "bring the targets to 0 … 1",
            confidence="proven",  # outside, the loss has no bound
        )


def of_targets(
    evidence: Evidence, comparison: Comparison, target: Tensor, learned: float | None
) -> Iterator[Verdict]:
    """Targets far larger than what a network puts out at its start."""
    if comparison.kind != "value" or target.numel() < 8:
        return
    mean, spread = float(target.double().mean()), float(target.double().std())
    size = float(target.double().pow(2).mean().sqrt())
    if size > LARGE:
        yield confirmed(
            f"{FAMILY}/raw-targets",
            f"the targets are {mean:.4g} ± {spread:.3g}; a network starts near 0 ± 1",
            *explain(evidence, learned),
            *say_where_made(evidence, comparison.target, comparison.operation.line, target=True),
            where=evidence.flow.origin(comparison.target, comparison.operation.line),
            fix=f"standardise the targets: (y - {mean:.4g}) / {spread:.3g}",
            **harm(learned, size),
        )


def explain(evidence: Evidence, learned: float | None) -> list[str]:
    if learned is None:
        return []
    return [
        f"after {evidence.step} steps the predictions explain {100 * max(learned, 0.0):.0f} % of the targets"
    ]


def harm(learned: float | None, size: float) -> dict[str, Any]:
    """A problem where next to nothing is learned; elsewhere one only if the run is in trouble."""
    stuck = learned is not None and learned < LITTLE
    sure = "likely" if stuck or size > HUGE else "possible"
    return {"if_troubled": not stuck, "confidence": sure, "lasting": False}


def is_mask(value: Tensor) -> bool:
    """0 and −inf, or 0 and a number as low: what is added to scores says who may look, and is no feature."""
    low, high = float(value.min()), float(value.max())
    return low == -math.inf or (high == 0 and low <= LOW and bool(((value == low) | (value == high)).all()))


def of_inputs(evidence: Evidence, slot: int, value: Tensor, learned: float | None) -> Iterator[Verdict]:
    where = evidence.flow.origin(slot)
    low, high = float(value.min()), float(value.max())
    bright = 30 if value[0].numel() >= FEWEST_PIXELS else 200  # a table of counts seldom ends just below 256
    if bright < high <= 255 and low >= 0 and bool((value == value.round()).all()):
        yield confirmed(
            f"{FAMILY}/pixels-to-255",
            f"the inputs are whole numbers from {low:g} to {high:g}: pixels that were not scaled",
            *explain(evidence, learned),
            *say_where_made(evidence, slot),
            where=where,
            **harm(learned, high),
        )
        return
    columns = (
        value.double().reshape(-1, value.shape[-1]) if value.dim() == 2 else value.double().reshape(-1, 1)
    )
    sizes = columns.pow(2).mean(0).sqrt()
    worst = int(sizes.argmax())
    if not float(sizes[worst]) > LARGE:
        return
    smallest = float(sizes.min())
    what = f"feature {worst} of {len(sizes)}" if len(sizes) > 1 else "the input"
    mean, spread = float(columns[:, worst].mean()), float(columns[:, worst].std())
    yield confirmed(
        f"{FAMILY}/raw-features",
        f"{what} is {mean:.4g} ± {spread:.3g}"
        + (f", the smallest feature has the size {smallest:.2g}" if len(sizes) > 1 else ""),
        *explain(evidence, learned),
        *say_where_made(evidence, slot),
        where=where,
        **harm(learned, float(sizes[worst])),
    )


def _is_normalised(flow: Flow, slot: int) -> bool:
    """Whether the first thing the network does is to normalise."""
    return any(op.name in NORMS and flow.behind(op.reads[0], VIEWS) == slot for op in flow.operations)


# how much they vary -----------------------------------------------------------------------------------------

# of an input's size that is not the same for all samples: a fiftieth drowns in the rest, a fifth is seen
HARDLY, SEEN = 0.02, 0.2
FEWEST = 8  # samples
SHRINKS = 0.1  # a factor that makes numbers ten times smaller or more


def that_hardly_vary(evidence: Evidence) -> Iterator[Verdict]:
    """What the first layer reads, less what is the same for all samples, against its size."""
    found = first_read(evidence.flow)
    if found is None:
        return
    op, slot, value = found
    share, left = share_that_varies(value.double())
    if not math.isfinite(left):  # a NaN is no matter of scale
        return
    if left == 0 or share >= HARDLY:  # all the same: nothing is meant to be in it
        if share >= SEEN:
            yield excluded(
                f"{FAMILY}/hardly-varies",
                f"{100 * share:.0f} % of the first layer's input differ between samples",
            )
        return
    scalings = [*shrinkings(evidence.flow, slot)]
    place = scalings[0][0].line if scalings else evidence.flow.origin_line(slot, op.line)
    stuck = is_nothing_learned(evidence)
    yield confirmed(
        f"{FAMILY}/hardly-varies",
        f"the first layer is given much the same for all of {len(value)} samples: numbers of the size "
        f"{float(value.double().square().mean().sqrt()):.3g}, of which {left:.2g} ({100 * share:.2g} %) differ",
        *(f"multiplied by {factor:.3g} at {place_of_data(s.line)}" for s, factor in scalings if s.line),
        *say_where_made(evidence, slot),
        where=place_of_data(place) if place is not None else None,
        fix="scale the inputs once: a division by 255 beside that of ToTensor (or a mean and deviation of other units) "
        f"is one too many; as they are, they want (x - mean) / {left:.2g}",
        confidence="likely" if stuck else "possible",
        if_troubled=not stuck,
        lasting=False,
    )


def first_read(flow: Flow) -> tuple[Operation, int, Tensor] | None:
    """(layer, slot, value): the batch as the first layer reads it, unless that normalises or looks rows up."""
    for op in flow.layers:
        for slot in op.reads:
            shape = flow.tape.slots[slot].shape
            if slot in flow.tracked or slot in flow.weights or len(shape) < 2 or shape[0] < FEWEST:
                continue
            if flow.tape.slots[slot].is_sparse:
                return None
            value = flow.values([slot]).get(slot)
            if value is None or not value.is_floating_point() or not value.numel() or op.name in NORMS:
                return None
            normalised = any(n.name in NORMS and op.makes[0] in n.reads[:1] for n in flow.operations)
            return None if normalised else (op, slot, value)
    return None


def share_that_varies(value: Tensor) -> tuple[float, float]:
    """(share of the size that differs between samples, how much that is): less the mean sample."""
    size = float(value.square().mean().sqrt())
    left = float((value - value.mean(0)).square().mean().sqrt())
    return (left / size if size > 0 else 0.0), left


def shrinkings(flow: Flow, slot: int) -> Iterator[tuple[Operation, float]]:
    """Multiplications by a small number on the way of a batch, the last one first."""
    for _ in range(64):
        maker = flow.maker(slot)
        if maker is None or not maker.reads:
            return
        number = next((a for a in maker.args[1:2] if isinstance(a, (int, float)) and a), None)
        name = maker.name.rstrip("_")
        factor = {"mul": number, "div": 1 / number}.get(name) if number else None
        if factor is not None and abs(factor) <= SHRINKS:
            yield maker, factor
        slot = maker.reads[0]


def is_nothing_learned(evidence: Evidence) -> bool:
    if evidence.step < LATE:
        return False
    learned = [share_learned(evidence, comparison) for comparison in evidence.flow.comparisons]
    known = [share for share in learned if share is not None]
    return bool(known) and max(known) < LITTLE
