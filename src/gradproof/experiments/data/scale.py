"""Are the numbers of a size that a network can take, and do they vary? Inputs and targets as they are fed in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, Flow, place_of, place_of_data
from gradproof.instruments.moved import hold_against_before
from gradproof.instruments.neighbours import LATE, learned_line, loss_and_guess, share_learned
from gradproof.instruments.source import say_where_made
from gradproof.tape.operations import Operation

FAMILY = "input-or-target-scale"
LARGE = 30.0  # root mean square of a feature; standardised ones have 1
TINY = 0.02  # the same: a fiftieth of what weights are made for, beside which the bias is all
HUGE = 100.0  # so large that a troubled run needs no other reason
BEYOND = 1e-3  # 0 and 1: rounding in float16 goes no further
LOW = -1e3  # added to a score: whose exponential is 0 then in every format
FEWEST_PIXELS = 64  # of an image, 8 × 8
BRIGHT = (30, 200)  # of an image's pixels, and of a table of counts, which seldom ends just below 256
ALIKE = 0.01  # of a loss: what rounding in half precision makes of it
LITTLE = 0.2  # of the targets' variance or entropy explained, late
# of an input's size that is not the same for all samples: a fiftieth drowns in the rest, a fifth is seen
HARDLY, SEEN = 0.02, 0.2
FEWEST = 8  # samples
SHRINKS = 0.1  # a factor that makes numbers ten times smaller or more
LONGEST = 64  # operations on the way of a batch
NORMS = {
    "native_batch_norm", "native_layer_norm", "_native_batch_norm_legit", "native_group_norm", "cudnn_batch_norm",
}  # fmt: skip


def are_numbers_of_a_fitting_size(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, of_their_size, that_hardly_vary, have_the_data_moved))


def of_their_size(evidence: Evidence) -> Iterator[Verdict]:
    """Pixels up to 255, raw features, raw targets, targets of a yes-or-no loss that are neither."""
    flow = evidence.flow
    found, learned = [], None
    for comparison in flow.comparisons:
        learned = share_learned(evidence, comparison) if evidence.step >= LATE else None
        target = flow.value(comparison.target)
        if target is not None and target.is_floating_point() and target.numel():
            found += [
                of_yes_or_no(evidence, comparison, target),
                of_targets(evidence, comparison, target, learned),
            ]
    note_what_is_learned(evidence)
    said = [verdict for verdict in found if verdict is not None]
    yield from said
    tiny = of_first_layer(evidence)
    if tiny is not None:
        yield tiny
        return
    for slot in flow.inputs:
        value = flow.value(slot)
        if value is None or not value.is_floating_point() or value.dim() < 2:
            continue
        if is_mask(value) or is_normalised(flow, slot):
            continue
        verdict = of_pixels(evidence, slot, value, learned) or of_features(evidence, slot, value, learned)
        if verdict is None and not said and bool(value.any()):  # a first state of zeros tells nothing
            size = float(value.double().pow(2).mean().sqrt())
            verdict = excluded(f"{FAMILY}/raw-features", f"the inputs have a root mean square of {size:.3g}")
        if verdict is not None:
            yield verdict
            return


def note_what_is_learned(evidence: Evidence) -> None:
    """Into the run's facts, where targets are data and not a network's: how much of them a late step explains, and
    the loss of the best constant, where the loss of the step is this one."""
    data = [c for c in evidence.flow.comparisons if not evidence.flow.is_learned(c.target)]
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


# targets ----------------------------------------------------------------------------------------------------


def of_yes_or_no(evidence: Evidence, comparison: Comparison, target: Tensor) -> Verdict | None:
    low, high = float(target.min()), float(target.max())
    if comparison.kind != "binary" or (low >= -BEYOND and high <= 1 + BEYOND):
        return None
    return confirmed(
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
) -> Verdict | None:
    """Targets far larger than what a network puts out at its start; what a network says has its own size."""
    mean, spread, size = sizes_of(target)
    if comparison.kind != "value" or target.numel() < 8 or not size > LARGE:
        return None
    if evidence.flow.is_learned(comparison.target):
        return None
    return confirmed(
        f"{FAMILY}/raw-targets",
        f"the targets are {mean:.4g} ± {spread:.3g}; a network starts near 0 ± 1",
        *learned_line(evidence, learned),
        *say_where_made(evidence, comparison.target, comparison.operation.line, target=True),
        where=evidence.flow.origin(comparison.target, comparison.operation.line),
        fix=f"standardise the targets: (y - {mean:.4g}) / {spread:.3g}",
        **harm(learned, size),
    )


def sizes_of(value: Tensor) -> tuple[float, float, float]:
    """Mean, deviation, root mean square."""
    wide = value.double()
    return float(wide.mean()), float(wide.std()), float(wide.square().mean().sqrt())


def harm(learned: float | None, size: float) -> dict[str, Any]:
    """A problem where next to nothing is learned; elsewhere one only if the run is in trouble."""
    stuck = learned is not None and learned < LITTLE
    sure = "likely" if stuck or size > HUGE else "possible"
    return {"if_troubled": not stuck, "confidence": sure, "lasting": False}


# inputs -----------------------------------------------------------------------------------------------------


def is_mask(value: Tensor) -> bool:
    """0 and −inf, or 0 and a number as low: what is added to scores says who may look, and is no feature."""
    low, high = float(value.min()), float(value.max())
    return low == -math.inf or (high == 0 and low <= LOW and bool(((value == low) | (value == high)).all()))


def is_normalised(flow: Flow, slot: int) -> bool:
    """Whether the first thing the network does is to normalise."""
    return any(op.name in NORMS and flow.behind(op.reads[0], VIEWS) == slot for op in flow.operations)


def of_pixels(evidence: Evidence, slot: int, value: Tensor, learned: float | None) -> Verdict | None:
    low, high = float(value.min()), float(value.max())
    bright = BRIGHT[value[0].numel() < FEWEST_PIXELS]
    if not bright < high <= 255 or low < 0 or bool((value != value.round()).any()):
        return None
    return confirmed(
        f"{FAMILY}/pixels-to-255",
        f"the inputs are whole numbers from {low:g} to {high:g}: pixels that were not scaled",
        *learned_line(evidence, learned),
        *say_where_made(evidence, slot),
        where=evidence.flow.origin(slot),
        **harm(learned, high),
    )


def of_features(evidence: Evidence, slot: int, value: Tensor, learned: float | None) -> Verdict | None:
    columns = value.double().reshape(-1, value.shape[-1] if value.dim() == 2 else 1)
    sizes = columns.pow(2).mean(0).sqrt()
    worst, several = int(sizes.argmax()), len(sizes) > 1
    if not float(sizes[worst]) > LARGE:
        return None
    mean, spread, size = sizes_of(columns[:, worst])
    what = f"feature {worst} of {len(sizes)}" if several else "the input"
    beside = f", the smallest feature has the size {float(sizes.min()):.2g}" if several else ""
    return confirmed(
        f"{FAMILY}/raw-features",
        f"{what} is {mean:.4g} ± {spread:.3g}{beside}",
        *learned_line(evidence, learned),
        *say_where_made(evidence, slot),
        where=evidence.flow.origin(slot),
        **harm(learned, size),
    )


# what the first layer reads ---------------------------------------------------------------------------------


def first_read(flow: Flow, fewest: int) -> tuple[Operation, int, Tensor] | None:
    """(layer, slot, value): the batch as the first layer reads it, unless that normalises or looks rows up."""
    made = flow.tracked | flow.weights
    for op in flow.layers:
        for slot in (flow.tape.slots[read] for read in op.reads):
            if slot.index in made or len(slot.shape) < 2 or slot.shape[0] < fewest:
                continue
            value = None if slot.is_sparse or op.name in NORMS else flow.value(slot.index)
            known = value is not None and value.is_floating_point() and value.numel() > 0
            return (op, slot.index, value) if known and value is not None else None
    return None


def of_first_layer(evidence: Evidence) -> Verdict | None:
    """After all that is done to the data: so small that only its bias matters."""
    found = first_read(evidence.flow, 2)
    if found is None:
        return None
    op, _, value = found
    _, _, size = sizes_of(value)
    if not 0 < size < TINY or is_normalised(evidence.flow, op.makes[0]):
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


def that_hardly_vary(evidence: Evidence) -> Iterator[Verdict]:
    """What the first layer reads, less what is the same for all samples, against its size."""
    flow, found = evidence.flow, first_read(evidence.flow, FEWEST)
    if found is None or any(n.name in NORMS and found[0].makes[0] in n.reads[:1] for n in flow.operations):
        return
    op, slot, value = found
    _, _, size = sizes_of(value)
    _, _, left = sizes_of(value.double() - value.double().mean(0))
    share = left / size if size > 0 else 0.0
    if not math.isfinite(left):  # a NaN is no matter of scale
        return
    if left == 0 or share >= HARDLY:  # all the same: nothing is meant to be in it
        if share >= SEEN:
            said = f"{100 * share:.0f} % of the first layer's input differ between samples"
            yield excluded(f"{FAMILY}/hardly-varies", said)
        return
    scalings = [*shrinkings(flow, slot)]
    place = scalings[0][0].line if scalings else flow.origin_line(slot, op.line)
    stuck = is_nothing_learned(evidence)
    yield confirmed(
        f"{FAMILY}/hardly-varies",
        f"the first layer is given much the same for all of {len(value)} samples: numbers of the size "
        f"{size:.3g}, of which {left:.2g} ({100 * share:.2g} %) differ",
        *(f"multiplied by {factor:.3g} at {place_of_data(s.line)}" for s, factor in scalings if s.line),
        *say_where_made(evidence, slot),
        where=place_of_data(place) if place is not None else None,
        fix="scale the inputs once: a division by 255 beside that of ToTensor (or a mean and deviation of other units) "
        f"is one too many; as they are, they want (x - mean) / {left:.2g}",
        confidence="likely" if stuck else "possible",
        if_troubled=not stuck,
        lasting=False,
    )


def shrinkings(flow: Flow, slot: int) -> Iterator[tuple[Operation, float]]:
    """Multiplications by a small number on the way of a batch, the last one first."""
    for op in islice(flow.chain(slot), LONGEST):
        number = next((a for a in op.args[1:2] if isinstance(a, (int, float)) and a), None)
        factor = {"mul": number, "div": 1 / number}.get(op.name.rstrip("_")) if number else None
        if factor is not None and abs(factor) <= SHRINKS:
            yield op, factor


def is_nothing_learned(evidence: Evidence) -> bool:
    late = evidence.flow.comparisons if evidence.step >= LATE else ()
    learned = [share for c in late if (share := share_learned(evidence, c)) is not None]
    return bool(learned) and max(learned) < LITTLE
