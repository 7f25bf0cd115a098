"""Where does this number come from? Back through the operations that made it, to samples and to lines of the source."""

from __future__ import annotations

import torch
from torch import Tensor

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import find_spots, is_kept, place_of, value_of
from gradproof.ask.tools import Evidence, lines_behind
from gradproof.tape.operations import Operation, Slot
from gradproof.tape.rows import trace_rows

LONGEST_WAY = 40


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    spot = find_spots(evidence, asked.of or "loss")[-1]
    value = value_of(evidence, spot)
    at = int(worst(value)) if value.numel() else 0
    where = [int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)] if value.dim() else []
    rows, leaf = way_back(evidence, spot.slot)
    maker = evidence.maker(spot.slot)
    sample = batch_rows(evidence, maker, spot.slot, value, at) if maker is not None else ""
    number = value.reshape(-1)[at].item() if value.numel() else float("nan")
    shown = f"{abs(number) if isinstance(number, complex) else number:.6g}"
    entry = f" at {where}" if where else ""
    source = source_lines(evidence, leaf)
    sentence = f"{shown}, the largest entry of {spot.words}{entry}, was made by {len(rows)} operations"
    sentence += f", from {sample}." if sample else "."
    return Answer(
        "origin",
        sentence,
        "proven" if rows else "measured",
        numbers={"value": shown, "index": where, "samples": sample or "not told apart", "source": source},
        place=place_of(maker),
        rows=tuple(rows),
        not_looked_at=("operands other than the largest of each operation",),
        ask_next=tuple(
            f"gradproof ask RUN line --of {row['line'].split(' ')[0]}" for row in rows[1:2] if row["line"]
        ),
    )


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


def source_lines(evidence: Evidence, leaf: int) -> list[str]:
    """The lines of the source at which what the way ends at was made."""
    readers = [op for op in evidence.forward if leaf in op.reads and op.line is not None]
    if not readers or not is_kept(evidence, leaf) or evidence.slot(leaf).kind == "parameter":
        return []
    line = readers[0].line
    assert line is not None
    file = line.file.rsplit("/", 1)[-1]
    return [f"{file}:{line.number}", *(f"{file}:{number}" for number in lines_behind(line))]
