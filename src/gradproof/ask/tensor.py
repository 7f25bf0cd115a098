"""Show me a tensor: statistics, a histogram, a part of it, and its largest entries with their samples."""

from __future__ import annotations

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import (
    PART,
    Spot,
    describe,
    find_spots,
    finite_of,
    in_parts,
    place_of,
    real,
    targets,
    values_of,
)
from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence

LARGEST = 10
BINS = 10
MOST_SHOWN = 64  # numbers of a part


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    if not asked.of:
        raise UserError(
            "which tensor? --of takes a parameter, NAME.grad, a module, input, target, prediction, loss or FILE:LINE"
        )
    spots = find_spots(evidence, asked.of)
    values = values_of(evidence, spots)
    spot, value = next(iter(values.items()))
    numbers: dict[str, object] = dict(describe(value))
    if asked.part:
        numbers["part"] = part_of(value, asked.part)
    rows = [*largest(evidence, spot, value), *histogram(value)]
    size = f", largest {rows[0]['value']} at {rows[0]['index']}" if rows and "index" in rows[0] else ""
    bad = numbers.get("nan", 0) or numbers.get("inf", 0)
    sentence = f"{spot.words}: {numbers['dtype']}{numbers['shape']}{size}" + (
        ", not all of it finite." if bad else "."
    )
    others = [s.words for s in values if s is not spot]
    maker = evidence.maker(spot.slot)
    return Answer(
        "tensor",
        sentence,
        "proven" if maker is not None or spot.gradient else "measured",
        numbers=numbers,
        place=None if spot.gradient else place_of(maker),
        rows=tuple(rows),
        not_looked_at=tuple(f"{len(others)} more called so: {', '.join(others[:4])}" for _ in others[:1]),
        ask_next=(f"gradproof ask RUN origin --of {asked.of}",),
    )


def part_of(value: Tensor, part: str) -> list[object]:
    """`0:4,2`: as Python would, flattened, and no more than some."""
    try:
        index = tuple(
            slice(*(int(n) if n.strip() else None for n in piece.split(":"))) if ":" in piece else int(piece)
            for piece in part.strip("[] ").split(",")
        )
        return list(value[index].reshape(-1)[:MOST_SHOWN].tolist())
    except (ValueError, IndexError, TypeError) as error:
        raise UserError(f"{part!r} is no part of a tensor of shape {list(value.shape)}: {error}") from None


def largest(evidence: Evidence, spot: Spot, value: Tensor) -> list[Row]:
    """The largest entries, those that are not finite first, and the target of the sample that each belongs to."""
    if not value.numel():
        return []
    order = largest_of(value.reshape(-1))
    labels = labels_of(evidence, value, spot)
    rows: list[Row] = []
    for at in order:
        index = [int(i) for i in torch.unravel_index(at, value.shape)] if value.dim() else []
        number = value.reshape(-1)[at].item()
        row: Row = {"index": index, "value": str(number) if isinstance(number, complex) else number}
        if labels is not None and index:
            row["sample"], row["target"] = index[0], labels[index[0]]
        rows.append(row)
    return rows


def largest_of(flat: Tensor) -> Tensor:
    """Where the largest are: first of each part, then of those."""
    best: list[tuple[float, int]] = []
    for number, part in enumerate(flat.split(PART)):
        size = part.abs().double()
        size = torch.where(torch.isnan(size), torch.inf, size)
        found = torch.topk(size, min(LARGEST, len(size)))
        best += [(-s, number * PART + at) for s, at in zip(found[0].tolist(), found[1].tolist(), strict=True)]
    return torch.tensor([at for _, at in sorted(best)[:LARGEST]], dtype=torch.int64)


def labels_of(evidence: Evidence, value: Tensor, spot: Spot) -> list[object] | None:
    """The target of each sample, where the first axis is the batch's."""
    if spot.gradient or evidence.slot(spot.slot).kind == "parameter" or not value.dim():
        return None
    for slot in targets(evidence):
        shape = evidence.slot(slot).shape
        if len(shape) == 1 and shape[0] == value.shape[0] and shape[0] > 1:
            found = (
                evidence.flow.values([slot])
                if evidence.maker(slot)
                else {slot: evidence.tape.leaf_value(slot)}
            )
            return list(found[slot].tolist()) if slot in found else None
    return None


def histogram(value: Tensor) -> list[Row]:
    flat = finite_of(real(value))
    if len(flat) < 2:
        return []
    low, high = (float(end) for end in torch.aminmax(flat))
    if low == high:
        return []
    parts = [torch.histc(part.cpu(), BINS, low, high).long() for part in in_parts(flat)]
    counts = torch.stack(parts).sum(0).tolist()
    width = (high - low) / BINS
    return [{"from": low + i * width, "to": low + (i + 1) * width, "count": n} for i, n in enumerate(counts)]
