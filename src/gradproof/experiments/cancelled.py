"""Does a ratio's gradient cancel? Two operands that both carry gradient and are one number, whatever the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Line, Operation, Ref, references

KEPT_ON_THE_WAY = (
    *VIEWS,
    "sum",
    "mean",
    "clamp",
    "clamp_min",
    "clamp_max",
    "mul",
    "neg",
)  # to the exponential
MOST = 8  # pairs that are looked at
MOVED = 0.1  # of each weight's own size


def does_a_ratio_cancel(evidence: Evidence) -> Iterator[Verdict]:
    """exp(new - old) or new / old, both with gradient and equal: ∂new − ∂old is 0, so nothing is learned from it.

    That they are equal now could be chance (the first epoch of PPO, a copy of a network); that they are equal
    with all weights moved at random means that they are one function.
    """
    pairs = list(ratios(evidence))[:MOST]
    slots = sorted({slot for _, one, two in pairs for slot in (one, two)})
    if not slots:
        return
    now = evidence.flow.values(slots)
    pairs = [pair for pair in pairs if are_one(now, pair[1], pair[2])]
    if not pairs:
        return
    moved = evidence.flow.values(slots, moved_at_random(evidence))
    for op, one, two in pairs:
        if not are_one(moved, one, two) or torch.equal(now[one], moved[one]):
            continue
        made = line_of(evidence, two) if one != two else None
        count = now[one].numel()
        yield confirmed(
            "missing-stop-gradient/ratio",
            f"both operands of {op.name} carry gradient and are equal in all of {count} entries, also with every "
            f"weight moved by {100 * MOVED:g} %: the ratio is 1 and its gradient 0, whatever is learned",
            f"the ratio is taken at {op.line}",
            where=place_of("", made or op.line),
            fix="what the ratio is taken against must be a constant: compute the old log-probabilities under "
            "torch.no_grad() when the data are gathered, or detach() them",
            lasting=True,
        )
        return


def ratios(evidence: Evidence) -> Iterator[tuple[Operation, int, int]]:
    """Quotients, and differences that go into an exponential: (operation, operand, operand), both with gradient."""
    flow = evidence.flow
    for op in flow.operations:
        refs = [arg for arg in op.args[:2] if isinstance(arg, Ref)]
        if op.name not in ("sub", "div") or len(refs) != 2 or not all(ref.tracked for ref in refs):
            continue
        one, two = refs[0].slot, refs[1].slot
        same_shape = evidence.slot(one).shape == evidence.slot(two).shape
        if not same_shape or torch.Size(evidence.slot(one).shape).numel() < 2:
            continue
        if op.name == "sub" and not goes_into_exponential(evidence, op):
            continue
        origins = flow.behind(one, VIEWS), flow.behind(two, VIEWS)
        # x - x.max() of one entry, x / x.clamp(...): of the one by the other, not twice computed
        if origins[0] != origins[1] and any(a in flow.ancestors(b) for a, b in (origins, origins[::-1])):
            continue
        yield op, one, two


def goes_into_exponential(evidence: Evidence, difference: Operation) -> bool:
    reach = set(difference.makes)
    for op in evidence.flow.operations:
        if op.index <= difference.index or reach.isdisjoint(op.reads):
            continue
        if op.name == "exp":
            return True
        if op.name in KEPT_ON_THE_WAY and len(list(references(op.args))) == 1:
            reach.update(op.makes)
    return False


def are_one(values: dict[int, Tensor], one: int, two: int) -> bool:
    """Equal in every entry, finite, and not one constant."""
    if one not in values or two not in values:
        return False
    first, second = values[one], values[two]
    differ = bool((first != first.reshape(-1)[0]).any())
    return differ and bool(torch.isfinite(first).all()) and torch.equal(first, second)


def moved_at_random(evidence: Evidence) -> dict[int, Tensor]:
    """Every trained weight, a tenth of its size away from where it was."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for slot in dict.fromkeys(evidence.tape.stepped):
        value = evidence.tape.leaf_value(slot)
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator).to(value)
            size = value.square().mean().sqrt()
            moved[slot] = value + MOVED * torch.where(size > 0, size, torch.ones_like(size)) * noise
    return moved


def line_of(evidence: Evidence, slot: int) -> Line | None:
    """Where an operand was made, looking through views."""
    maker = evidence.maker(evidence.flow.behind(slot, VIEWS))
    return maker.line if maker is not None else None
