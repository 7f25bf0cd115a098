"""Are whole numbers kept? Positions, times and ids, counted before and after they are cast to too few digits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation
from gradproof.tape.replay import replay_forward

ID = "low-precision-error/whole-numbers"
EXACT_UP_TO = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}  # all whole numbers
LONGEST = 1_000_000  # entries of a buffer that may be a range
FEWEST = 2  # numbers that have become others
WRONG = 0.1  # of a sine or cosine, whose whole range is 2
MANY = 0.2  # of the sines and cosines
# what a number may go through and still be the number of a position; then what asks which number it is
CARRIES = VIEWS | {
    "mul",
    "div",
    "add",
    "sub",
    "neg",
    "mm",
    "bmm",
    "cat",
    "stack",
    "pow",
    "floor",
    "frac",
    "unbind",
    "split",
}
PHASES = ("sin", "cos", "sin_", "cos_", "polar", "complex")
IDENTITIES = (
    "embedding",
    "index",
    "gather",
    "index_select",
    "eq",
    "remainder",
    "fmod",
    "floor_divide",
    "one_hot",
)


def are_whole_numbers_kept(evidence: Evidence) -> Iterator[Verdict]:
    """Pixels from 0 to 255, masks and one-hot rows are exact; positions from 257 on are not."""
    for op, made, before in whole_numbers(evidence):
        dtype = evidence.slot(made).dtype
        columns = whole_columns(before, EXACT_UP_TO[dtype])
        changed = int((columns.to(dtype).double() != columns).sum())
        if changed < FEWEST:
            continue
        numbers, kept = len(torch.unique(columns)), len(torch.unique(columns.to(dtype)))
        name = str(dtype).removeprefix("torch.")
        lines = [
            f"{changed} of {columns.numel()} whole numbers (up to {int(columns.abs().max())}) are rounded to others in "
            f"{name}, which knows every one only up to {EXACT_UP_TO[dtype]}; {numbers} different ones become {kept}"
        ]
        sure, said = what_it_does(evidence, made, before, columns)
        if not said:
            continue
        yield confirmed(
            ID,
            *lines,
            said,
            where=place_of(op.module, op.line),
            fix="keep positions, times and ids in float32 or int64, and cast what is computed from them",
            level="problem" if sure else "warning",
            confidence="proven" if sure else "likely",
            lasting=sure,
        )
        return


def whole_numbers(evidence: Evidence) -> Iterator[tuple[Operation, int, Tensor]]:
    """(operation, numbers of few digits, the numbers before): casts of data, and ranges counted so."""
    flow = evidence.flow
    for leaf in evidence.tape.leaves():
        limit, count = EXACT_UP_TO.get(leaf.dtype, 0), math.prod(leaf.shape)
        if leaf.kind not in ("buffer", "input") or not limit or not limit < count < LONGEST:
            continue
        before = torch.arange(count, dtype=torch.float64, device=leaf.device)
        reader = next((op for op in flow.operations if leaf.index in op.reads), None)
        value = evidence.tape.leaf_value(leaf.index)
        if reader is not None and torch.equal(value.flatten(), before.to(leaf.dtype)):
            yield reader, leaf.index, before.reshape(leaf.shape)
    for op in flow.operations:
        made = next(iter(op.makes), None)
        if made is None or evidence.slot(made).dtype not in EXACT_UP_TO or made in flow.tracked:
            continue
        if op.name == "arange":
            numbers = [arg for arg in op.args if isinstance(arg, (int, float))]
            before = torch.arange(*numbers, dtype=torch.float64)
        elif op.name == "_to_copy" and holds_more(
            evidence.slot(op.reads[0]).dtype, evidence.slot(made).dtype
        ):
            found = flow.values([op.reads[0]]).get(op.reads[0])
            if found is None or found.is_complex() or found.dtype == torch.bool:
                continue
            before = found.detach().double()
        else:
            continue
        yield op, made, before


def holds_more(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether one dtype knows whole numbers that the other does not."""
    return EXACT_UP_TO.get(dtype, 1 << 53) > EXACT_UP_TO[other]


def whole_columns(values: Tensor, limit: int) -> Tensor:
    """The columns that hold whole numbers only, some of them beyond the limit."""
    columns = values.reshape(-1, values.shape[-1] if values.dim() > 1 else 1)
    if not columns.numel():
        return columns
    return columns[:, (columns == columns.round()).all(0) & (columns.abs().amax(0) > limit)]


def what_it_does(evidence: Evidence, made: int, before: Tensor, columns: Tensor) -> tuple[bool, str]:
    """(whether it is proof, what comes of it): a wrong row, a wrong phase, or differences that are gone."""
    reach, phases = {made}, []
    rows: list[tuple[Operation, int]] = []
    for op in evidence.flow.operations:
        if reach.isdisjoint(op.reads):
            continue
        if op.name == "_to_copy" and not evidence.slot(op.makes[0]).dtype.is_floating_point:
            rows.append((op, op.makes[0]))
        elif op.name in IDENTITIES:
            rows.append((op, next(slot for slot in op.reads if slot in reach)))
        elif op.name in PHASES:
            phases += op.makes
        elif op.name in CARRIES:
            reach.update(op.makes)
    slots = [*phases, *(slot for _, slot in rows)]
    here = evidence.values(slots) if slots else {}
    true = replay_forward(evidence.tape, torch.float64, {made: before}, keep=slots).values if slots else {}
    for op, slot in rows:
        if slot in here and slot in true and (wrong := share_off([here[slot]], [true[slot]], 0.5)) > 0:
            place = place_of(op.module, op.line)
            return True, f"{100 * wrong:.0f} % of them are another number where {op.name} uses them ({place})"
    known = [slot for slot in phases if slot in here and slot in true]
    wrong = share_off([here[s] for s in known], [true[s] for s in known], WRONG)
    if wrong > 0:
        text = f"{100 * wrong:.0f} % of the sines and cosines made of them are off by more than {WRONG} of ±1"
        return wrong > MANY, text
    rounded = columns.to(evidence.slot(made).dtype).double()
    error = float((rounded - columns).square().mean().sqrt() / columns.std().clamp_min(1e-12))
    if error > 0.2:
        return error > 1, f"the rounding moves them by {error:.2g} standard deviations of the batch"
    return False, ""


def share_off(here: list[Tensor], true: list[Tensor], allowed: float) -> float:
    """Of the numbers in some tensors, how many are further than allowed from the true ones."""
    apart = [torch.view_as_real(t.to(torch.complex128)) for t in here]
    truth = [torch.view_as_real(t.to(torch.complex128)) for t in true]
    wrong = sum(int(((a - b).abs() > allowed).sum()) for a, b in zip(apart, truth, strict=True))
    return wrong / max(1, sum(t.numel() for t in here))
