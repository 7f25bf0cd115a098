"""Where does this number come from? Back through the operations that made it, to samples and to lines of the source."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.samples import place_of_sample
from gradproof.ask.spots import Spot, find_spots, is_kept, place_of, targets, value_of, values_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.source import lines_behind
from gradproof.tape.locate import FirstBad, find_first_bad_operation
from gradproof.tape.operations import Line, Operation, Slot
from gradproof.tape.rows import trace_rows

LONGEST_WAY = 40
ONE_SAMPLE = re.compile(r"batch row (\d+)(?!\d|–|, \d)")


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    spot = find_spots(evidence, asked.of or "loss")[-1]
    value = value_of(evidence, spot)
    at = int(worst(value)) if value.numel() else 0
    where = [int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)] if value.dim() else []
    rows, leaf = way_back(evidence, spot.slot)
    maker = evidence.maker(spot.slot)
    bad = find_first_bad_operation(evidence.tape) if not is_finite(value, at) else None
    sample = rows_not_finite(evidence) or bad.rows if bad is not None else ""
    sample = sample or ("" if spot.gradient else own_row(evidence, spot.slot, where))
    if not sample and maker is not None and not is_finite(value, at):
        sample = batch_rows(evidence, maker, spot.slot, value, at)
    file = file_of(evidence, sample)
    number = value.reshape(-1)[at].item() if value.numel() else float("nan")
    shown = f"{abs(number) if isinstance(number, complex) else number:.6g}"
    entry = f" at {where}" if where else ""
    source = source_lines(evidence, leaf)
    sentence = f"{shown}, the largest entry of {spot.words}{entry}, was made by {counted(rows)}"
    sentence += f", from {sample}" if sample else ""
    sentence += f", which is {file}." if file else "."
    if bad is not None:
        sentence += f" {first_said(bad)}"
    return Answer(
        "origin",
        sentence,
        "proven" if rows else "measured",
        numbers={
            "value": shown,
            "index": where,
            "samples": sample or "not told apart",
            "source": source,
            **({"file": file} if file else {}),
        },
        place=(short(bad.line) if bad is not None and bad.line is not None else place_of(maker)),
        rows=tuple(rows),
        not_looked_at=(
            "operands other than the largest of each operation",
            *(
                ()
                if file
                else ("the file and row of it: no DataLoader handed out this batch, or it says neither",)
            ),
        ),
        ask_next=tuple(
            f"gradproof ask RUN line --of {row['line'].split(' ')[0]}" for row in rows[1:2] if row["line"]
        ),
    )


def counted(rows: list[Row]) -> str:
    return f"{len(rows)} operation{'' if len(rows) == 1 else 's'}"


def is_finite(value: Tensor, at: int) -> bool:
    return not value.numel() or bool(torch.isfinite(value.reshape(-1)[at]))


def first_said(bad: FirstBad) -> str:
    """Where what is not finite begins: in an operation, or in the data themselves."""
    what = bad.operator if bad.kind == "operation" else bad.kind
    at = f" at {short(bad.line)}" if bad.line else ""
    return f"The first {bad.value} of the step is in {what}{at}: {bad.why}."


def short(line: Line) -> str:
    return f"{line.file.rsplit('/', 1)[-1]}:{line.number} in {line.function}"


def rows_not_finite(evidence: Evidence) -> str:
    """Of what came in, where that is what is not finite: the one sample that is bad."""
    spots = [Spot(slot, "batch") for slot in (*evidence.flow.inputs, *targets(evidence))]
    values = values_of(evidence, spots).values() if spots else ()
    bad = [(~torch.isfinite(v)).reshape(len(v), -1).any(1) for v in values if v.dim() and len(v)]
    rows = {row for each in bad for row in each.nonzero().flatten().tolist()}
    return f"batch row {rows.pop()}" if len(rows) == 1 else ""


def own_row(evidence: Evidence, slot: int, where: list[int]) -> str:
    """The sample, and the position, that an entry belongs to by its place: where the first axes are the batch's."""
    shape = evidence.slot(slot).shape
    if not where or evidence.slot(slot).kind in ("parameter", "buffer", "state"):
        return ""
    for given in (evidence.slot(each).shape for each in evidence.flow.inputs):
        samples, positions = (*given, 1, 1)[:2] if given else (0, 1)
        if samples > 1 and shape[0] == samples:
            at = f", position {where[1]}" if len(shape) > 1 and shape[1] == positions > 1 else ""
            return f"batch row {where[0]}{at}"
        if positions > 1 and shape[0] == samples * positions:
            return f"batch row {where[0] // positions}, position {where[0] % positions}"
    return ""


def worst(value: Tensor) -> Tensor:
    """The first entry that is not finite, else the largest."""
    flat = value.reshape(-1)
    size = flat.abs().double()
    return torch.where(torch.isfinite(size), size, torch.inf).argmax()


def way_back(evidence: Evidence, slot: int) -> tuple[list[Row], int]:
    """The operations behind a slot, each time by the operand that most was computed for."""
    rows: list[Row] = []
    op = evidence.maker(slot)
    while op is not None and len(rows) < LONGEST_WAY:
        made = evidence.slot(slot)
        rows.append(
            {
                "operation": op.name,
                "makes": f"{str(made.dtype).removeprefix('torch.')}{list(made.shape)}",
                "module": op.module,
                "line": place_of(op) or "",
            }
        )
        following = main_operand(evidence, op)
        if following is None:
            break
        slot, op = following, evidence.maker(following)
    return rows, slot


def main_operand(evidence: Evidence, op: Operation) -> int | None:
    """Of what an operation reads: what is no weight, real, and was itself computed, latest."""
    kinds = ("parameter", "buffer", "state", "input", "outside", "result")
    slots = [evidence.slot(slot) for slot in op.reads]

    def weight(slot: Slot) -> tuple[bool, bool, int, int]:
        made = -1 if slot.made_by is None else slot.made_by
        kind = kinds.index(slot.kind) if slot.kind in kinds else 0
        return slot.index not in evidence.flow.weights, slot.dtype.is_floating_point, made, kind

    return max(slots, key=weight).index if slots else None


def batch_rows(evidence: Evidence, maker: Operation, slot: int, value: Tensor, at: int) -> str:
    bad = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    bad[at] = True
    if maker.in_backward is not None or value.numel() < 2:
        return ""
    return trace_rows(evidence.tape, maker, maker, slot, bad.reshape(value.shape))


def file_of(evidence: Evidence, sample: str) -> str:
    """The file and row of the one sample that a number comes from."""
    found = ONE_SAMPLE.search(sample)
    sizes = {shape[0] for spot in evidence.flow.inputs if (shape := evidence.slot(spot).shape)}
    places = {place_of_sample(evidence, int(found[1]), size) for size in sizes} - {""} if found else set()
    return places.pop() if len(places) == 1 else ""


def source_lines(evidence: Evidence, leaf: int) -> list[str]:
    """The lines of the source at which what the way ends at was made."""
    readers = [op for op in evidence.forward if leaf in op.reads and op.line is not None]
    if not readers or not is_kept(evidence, leaf) or evidence.slot(leaf).kind == "parameter":
        return []
    line = readers[0].line
    assert line is not None
    file = line.file.rsplit("/", 1)[-1]
    return [f"{file}:{line.number}", *(f"{file}:{number}" for number in lines_behind(line))]
