"""What ran at this line, with shapes and values?"""

from __future__ import annotations

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import Spot, describe, operations_at, values_of
from gradproof.errors import UserError

MOST = 60  # operations whose values are brought back


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    if ":" not in asked.of:
        raise UserError("which line? --of FILE:LINE, for example --of train.py:42")
    here = operations_at(evidence, asked.of)
    kept = here[:MOST]
    spots = [Spot(slot, op.name) for op in kept for slot in op.makes]
    try:
        values = {spot.slot: value for spot, value in values_of(evidence, spots).items()} if spots else {}
    except UserError:
        values = {}
    rows: list[Row] = []
    for op in kept:
        row: Row = {"operation": op.name, "phase": op.phase, "module": op.module}
        row["reads"] = [str(evidence.slot(slot)) for slot in op.reads[:4]]
        row["makes"] = [str(evidence.slot(slot)) for slot in op.makes[:4]]
        found = next((values[slot] for slot in op.makes if slot in values), None)
        if found is not None:
            seen = describe(found)
            row |= {key: seen[key] for key in ("min", "max", "mean", "nan", "inf") if key in seen}
        rows.append(row)
    line = here[0].line
    assert line is not None
    source = evidence.specimen.sources.get(line.file, "").splitlines()  # what ran, and never another file
    text = source[line.number - 1].strip() if 0 < line.number <= len(source) else ""
    phases = sorted({op.phase for op in here})
    return Answer(
        "line",
        f"{len(here)} operations ran at {asked.of} ({', '.join(phases)}): {text or 'its source is not kept'}",
        "proven" if values else "measured",
        place=f"{line.file.rsplit('/', 1)[-1]}:{line.number} in {line.function}",
        rows=tuple(rows),
        not_looked_at=(f"the values of {len(here) - MOST} further operations",) if len(here) > MOST else (),
        ask_next=(f"gradproof ask RUN origin --of {asked.of}", f"gradproof ask RUN digits --of {asked.of}"),
    )
