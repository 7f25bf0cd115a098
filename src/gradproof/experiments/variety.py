"""Do the inputs vary? Numbers that hardly differ from sample to sample leave the first layer with its bias alone.

Pixels that are divided by 255 twice and then standardised are -2.1 ± 0.004: neither large nor small, only constant.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import Flow, place_of_data
from gradproof.experiments.provenance import say_where_made
from gradproof.experiments.scale import LITTLE, NORMS
from gradproof.experiments.targets import LATE, share_learned
from gradproof.tape.operations import Operation

ID = "input-or-target-scale/hardly-varies"
HARDLY = 0.02  # of an input's size that is not the same for all samples
FEWEST = 8  # samples
SHRINKS = 0.1  # a factor that makes numbers ten times smaller or more


def do_inputs_vary(evidence: Evidence) -> Iterator[Verdict]:
    """What the first layer reads, less what is the same for all samples, against its size."""
    found = first_read(evidence.flow)
    if found is None:
        return
    op, slot, value = found
    share, left = share_that_varies(value.double())
    if left == 0 or share >= HARDLY:  # all the same: nothing is meant to be in it
        if share >= 0.2:
            yield excluded(ID, f"{100 * share:.0f} % of the first layer's input differ between samples")
        return
    scalings = [*shrinkings(evidence.flow, slot)]
    place = scalings[0][0].line if scalings else evidence.flow.origin_line(slot, op.line)
    stuck = is_nothing_learned(evidence)
    yield confirmed(
        ID,
        f"the first layer is given much the same for all of {len(value)} samples: numbers of the size "
        f"{float(value.double().square().mean().sqrt()):.3g}, of which {left:.2g} ({100 * share:.2g} %) differ",
        *(f"multiplied by {factor:.3g} at {place_of_data(s.line)}" for s, factor in scalings if s.line),
        *say_where_made(evidence, slot),
        where=place_of_data(place) if place is not None else None,
        fix="scale the inputs once: a division by 255 beside that of ToTensor (or a mean and deviation of other units) "
        f"is one too many; as they are, they want (x - mean) / {left:.2g}",
        confidence="proven" if stuck else "likely",
        if_troubled=not stuck,
    )


def first_read(flow: Flow) -> tuple[Operation, int, Tensor] | None:
    """(layer, slot, value): the batch as the first layer reads it, unless that normalises or looks rows up."""
    for op in flow.layers:
        for slot in op.reads:
            shape = flow.tape.slots[slot].shape
            if slot in flow.tracked or slot in flow.weights or len(shape) < 2 or shape[0] < FEWEST:
                continue
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
