"""What was the model fed? The batch of a step, its targets, and where the loaders and the validation come in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.samples import also_validated, by_source, last_opened
from gradproof.ask.spots import Spot, describe, find_spots, place_of, values_of
from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence

MOST_CLASSES = 12


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    inputs, targets = spots_of(evidence, "input"), spots_of(evidence, "target")
    if not inputs and not targets:
        raise UserError(f"step {evidence.step} has no input that could be told apart")
    values = values_of(evidence, [*inputs, *targets])
    rows: list[Row] = [
        {
            "what": spot.words,
            **look_at(value, spot in targets),
            "made_at": evidence.flow.origin(spot.slot) or "",
        }
        for spot, value in values.items()
    ]
    rows += [
        {"what": f"validation at {line}", "samples": sum(map(len, batches))}
        for line, batches in evidence.facts.evaluated.items()
    ]
    sources = by_source(evidence)
    rows += sources
    opened = last_opened(evidence)
    rows += opened
    rows += [{"what": "sampler", **plain_part(sampler)} for sampler in evidence.facts.samplers[:4]]
    first = rows[0]
    repeated = int(first.get("repeated_rows", 0))
    sentence = f"{len(inputs)} inputs and {len(targets)} targets; "
    sentence += f"{first['what']} is {first['shape']} of {first['dtype']}"
    sentence += (
        f", {repeated} rows twice." if repeated else ", no row twice." if "repeated_rows" in first else "."
    )
    files = [str(row["what"]).removeprefix("source ") for row in sources if "samples" in row]
    if files:
        sentence += (
            f" They come from {', '.join(files[:3])}{f' and {len(files) - 3} more' if files[3:] else ''}."
        )
    elif opened:
        name, step = str(opened[0]["what"]).removeprefix("file "), opened[0]["opened_at_step"]
        sentence += f" The file opened last before it is {name}, at step {step}."
    again = also_validated(evidence, [value for spot, value in values.items() if spot in inputs])
    if again:
        sentence += f" {again} samples that were validated on are in this batch."
    return Answer(
        "fed",
        sentence,
        "measured",
        place=first["made_at"] or place_of(evidence.maker(inputs[0].slot)) if inputs else None,
        rows=tuple(rows),
        not_looked_at=(
            "other steps: ask again with --step",
            "data that the loop has not come to yet",
            *(() if sources else ("rows and splits: no DataLoader handed out this batch",)),
        ),
        ask_next=("gradproof ask RUN do_batches_differ", "gradproof ask RUN tensor --of input"),
    )


def spots_of(evidence: Evidence, word: str) -> list[Spot]:
    try:
        return find_spots(evidence, word)
    except UserError:
        return []


def look_at(value: Tensor, target: bool) -> Row:
    row: Row = dict(describe(value))
    if value.dim() and value.shape[0] > 1:
        flat = value.reshape(value.shape[0], -1)
        row["repeated_rows"] = value.shape[0] - len(torch.unique(flat, dim=0))
        row["constant_features"] = int((flat == flat[:1]).all(0).sum())
        if target:
            row.pop("repeated_rows")
    if not value.is_floating_point() and not value.is_complex() and value.numel():
        numbers, counts = torch.unique(value, return_counts=True)
        order = torch.argsort(counts, descending=True)[:MOST_CLASSES].tolist()
        row["distinct"] = len(numbers)
        row["most_frequent"] = {str(numbers[i].item()): int(counts[i]) for i in order}
    return row


def plain_part(data: dict[str, Any]) -> Row:
    """The plain values of what the probes noted; tensors stay where they are."""
    return {str(k): v for k, v in data.items() if isinstance(v, (str, int, float, bool))}
