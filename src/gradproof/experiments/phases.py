"""Are phases kept? A sine of 300 radians needs all of its digits: half precision is off by a radian there.

Either the phase is computed in half precision (autocast casts the product that makes it), or the time or coordinate
it is made of was kept in half precision, and different samples have become one.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of, step_is_nonfinite
from gradproof.experiments.provenance import cut_line, forward_line, lines_behind
from gradproof.experiments.rounding import share_off
from gradproof.numerics.stored import HALF, format_of, spacing
from gradproof.tape.operations import Operation
from gradproof.tape.replay import replay_forward

FAMILY = "low-precision-error"
WAVES = ("sin", "cos", "sin_", "cos_", "polar")
WRONG = 0.1  # of a sine or cosine, whose whole range is 2
WRONG_OF_TRAINED = 0.3  # where weights are trained to live with it
MANY = 0.2  # of the sines and cosines
MOST = 24  # sines of a step that are looked at
KEPT = 8192  # samples remembered
PAIRS = 30  # samples that another sample has the same stored numbers as
APART = 0.3  # of the targets' variance that is left among samples with the same numbers
CASTS = {"_to_copy", "lift_fresh", "detach", "alias", "clone"}


def are_phases_kept(evidence: Evidence) -> Iterator[Verdict]:
    """The sines of a step against those of float64; then against those of what its inputs may have been."""
    waves = [op for op in evidence.flow.operations if op.name in WAVES and op.makes][:MOST]
    if not waves or step_is_nonfinite(evidence):
        return
    found = computed_in_half(evidence, waves) or stored_in_half(evidence, waves)
    if found is not None:
        yield found


def computed_in_half(evidence: Evidence, waves: list[Operation]) -> Verdict | None:
    flow, tape = evidence.flow, evidence.tape
    short = {slot.index for slot in tape.slots if slot.dtype in HALF}
    waves = [op for op in waves if short and not short.isdisjoint(flow.ancestors(op.reads[0]))]
    if not waves:
        return None
    slots = [op.makes[0] for op in waves]
    here, true = evidence.values(slots), replay_forward(tape, torch.float64, keep=slots).values
    for op in waves:
        made = op.makes[0]
        if made not in here or made not in true:
            continue
        allowed = WRONG_OF_TRAINED if made in flow.tracked else WRONG
        wrong = share_off([here[made]], [true[made]], allowed)
        if wrong <= MANY:
            continue
        maker = first_in_half(evidence, op, short)
        phase = flow.values([op.reads[0]]).get(op.reads[0])
        size = float(phase.double().abs().max()) if phase is not None else 0.0
        name = str(evidence.slot(maker.makes[0]).dtype).removeprefix("torch.")
        return confirmed(
            f"{FAMILY}/phases",
            f"{100 * wrong:.0f} % of what {op.name} makes is off by more than {allowed} of ±1 against float64: its "
            f"argument goes up to {size:.3g} radians and is computed in {name}, whose last digit is worth "
            f"{float(spacing(torch.tensor(size), evidence.slot(maker.makes[0]).dtype)):.2g} there",
            f"in {name} since {maker.name} at {place_of(maker.module, maker.line)}",
            where=place_of(maker.module, maker.line),
            fix="compute the phases in float32: with torch.autocast(device, enabled=False) around them, .float() on "
            "what they are made of; cast their sines",
            lasting=True,
        )
    return None


def first_in_half(evidence: Evidence, wave: Operation, short: set[int]) -> Operation:
    """The first operation on the way to a phase that computes in half precision; a cast where none computes."""
    behind = evidence.flow.ancestors(wave.reads[0])
    makers = [op for op in evidence.forward if any(m in behind and m in short for m in op.makes)]
    computing = [op for op in makers if op.name not in CASTS and op.line is not None]
    return next(iter([*computing, *makers]), wave)


def stored_in_half(evidence: Evidence, waves: list[Operation]) -> Verdict | None:
    """Move each stored number within its last digit: if the sines do not know it again, they never knew the sample."""
    flow = evidence.flow
    for slot in candidates(evidence, waves):
        value = flow.values([slot]).get(slot)
        dtype = format_of(value) if value is not None else None
        if value is None or dtype is None:
            continue
        behind = [op.makes[0] for op in waves if slot in flow.ancestors(op.reads[0])]
        wrong = share_that_moves(evidence, slot, value, dtype, behind)
        if wrong <= MANY:
            continue
        apart, count = remember(evidence, slot, value)
        if count < PAIRS or apart < APART:
            continue
        name = str(dtype).removeprefix("torch.")
        return confirmed(
            f"{FAMILY}/stored-phases",
            f"the numbers that phases are made of were kept in {name} (up to {float(value.abs().max()):.3g}, where its "
            f"last digit is worth {float(spacing(value.double().abs().max(), dtype)):.2g}): within that digit "
            f"{100 * wrong:.0f} % of the sines and cosines change by more than {WRONG} of ±1",
            f"{count} samples have the same numbers as another one; {100 * apart:.0f} % of the targets' variance is "
            "left among those",
            where=place_of_storing(evidence, slot),
            fix="keep times and coordinates in float32 (or float64) from the start; cast what is made of them",
            lasting=True,
        )
    return None


def candidates(evidence: Evidence, waves: list[Operation]) -> list[int]:
    """Data behind the phases: the batch as the network is given it, and what was widened on its way."""
    flow = evidence.flow
    behind = set().union(*(flow.ancestors(op.reads[0]) for op in waves))
    widened = [
        op.reads[0]
        for op in flow.forward
        if op.name == "_to_copy" and op.reads[0] in behind and evidence.slot(op.reads[0]).dtype in HALF
    ]
    read_first = [slot.index for slot in evidence.tape.inputs if slot.index in behind and slot.shape]
    found = dict.fromkeys([*widened, *(s for s in flow.inputs if s in behind), *read_first])
    data = [s for s in found if s not in flow.tracked and evidence.slot(s).dtype.is_floating_point]
    return [s for s in data if evidence.slot(s).kind in ("input", "result")][:4]


def share_that_moves(
    evidence: Evidence, slot: int, value: Tensor, dtype: torch.dtype, waves: list[int]
) -> float:
    generator = torch.Generator().manual_seed(0)
    jitter = (torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5).to(value.device)
    moved = value.double() + jitter * spacing(value, dtype)
    base = replay_forward(evidence.tape, torch.float64, {slot: value.double()}, keep=waves).values
    other = replay_forward(evidence.tape, torch.float64, {slot: moved}, keep=waves).values
    known = [w for w in waves if w in base and w in other]
    return share_off([base[w] for w in known], [other[w] for w in known], WRONG)


def remember(evidence: Evidence, slot: int, value: Tensor) -> tuple[float, int]:
    """(share of the targets' variance among samples that have become one, how many these are) of all steps so far."""
    kept = evidence.memory.setdefault("stored phases", {"x": [], "y": [], "count": 0})
    comparison = next((c for c in evidence.flow.comparisons if c.kind == "value"), None)
    target = evidence.flow.values([comparison.target]).get(comparison.target) if comparison else None
    if target is None or not target.dim() or len(target) != len(value) or value.dim() > 2:
        return 0.0, 0
    if kept["count"] < KEPT:
        kept["x"].append(value.reshape(len(value), -1).double().cpu())
        kept["y"].append(target.reshape(len(target), -1)[:, 0].double().cpu())
        kept["count"] += len(value)
    y = torch.cat(kept["y"])
    _, group, size = torch.unique(torch.cat(kept["x"]), dim=0, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, y) / size
    several = size[group] > 1
    # of two equal samples each is half as far from their mean as it seems: n / (n - 1)
    within = ((y - mean[group]).square() * size[group] / (size[group] - 1).clamp_min(1))[several]
    total = float(y.var()) if len(y) > 1 else 0.0
    return (float(within.mean()) / total if total > 0 and len(within) else 0.0), int(several.sum())


def place_of_storing(evidence: Evidence, slot: int) -> str | None:
    """The line behind a batch that names a short format, or the nearest one."""
    line = cut_line(evidence.flow, slot) or forward_line(evidence)
    if line is None:
        return evidence.flow.origin(slot)
    numbers = [line.number, *lines_behind(line)]
    short = [n for n in numbers if names_a_format(linecache.getline(line.file, n))]
    return f"{line.file.rsplit('/', 1)[-1]}:{next(iter([*short, *numbers[1:], line.number]))}"


def names_a_format(text: str) -> bool:
    return any(word in text for word in ("half", "float16", "dtype", ".type("))
