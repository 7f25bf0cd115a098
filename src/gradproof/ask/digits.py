"""Which digits are lost? What each module computed, against the same step in float64; and updates that vanish."""

from __future__ import annotations

import math

import torch

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import find_spots, place_of, relative
from gradproof.errors import UserError
from gradproof.instruments.digits import against_float64, swallowed_updates
from gradproof.instruments.evidence import Evidence

MOST = 400  # results compared
MANY = 1000  # times the format's own rounding: digits that were lost on the way


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    slots = [s.slot for s in find_spots(evidence, asked.of)] if asked.of else of_modules(evidence)
    real = [
        s for s in slots if evidence.slot(s).dtype.is_floating_point and evidence.slot(s).made_by is not None
    ]
    if not real:
        raise UserError(f"{asked.of or 'the step'} makes no real numbers that could be compared")
    rows = []
    for slot, (here, true) in against_float64(evidence, real[:MOST]).items():
        here, true = here.detach().double(), true.detach().double()
        error = relative(float((here - true).norm()), float(true.norm()))
        eps = torch.finfo(evidence.slot(slot).dtype).eps
        maker = evidence.maker(slot)
        rows.append(
            {
                "what": maker.module or maker.name if maker is not None else f"slot {slot}",
                "dtype": str(evidence.slot(slot).dtype).removeprefix("torch."),
                "error": error,
                "roundings": error / eps,
                "digits": digits_of(error),
                "line": place_of(maker) or "",
            }
        )
    rows.sort(key=lambda row: -number(row["roundings"]))
    stays: list[Row] = [
        {"what": f"update of {evidence.slot(s.slot).name}", "share_that_stays": s.stay / max(1, s.wanted)}
        for s in swallowed_updates(evidence)
        if s.stay
    ]
    worst = rows[0] if rows else None
    lost = [row for row in rows if number(row["roundings"]) > MANY]
    if lost:
        sentence = (
            f"{len(lost)} of {len(rows)} results are off by more than {MANY} roundings of their format, most "
        )
        sentence += f"{lost[0]['what']}: {number(lost[0]['digits']):.1f} digits are left."
    elif worst:
        sentence = f"No result is off by more than {number(worst['roundings']):.0f} roundings of its format."
    else:
        sentence = "Nothing could be compared with float64."
    if stays:
        sentence += f" {len(stays)} half-precision updates vanish in part."
    return Answer(
        "digits",
        sentence,
        "proven" if worst else "undecided",
        place=str(lost[0]["line"]) if lost else None,
        numbers={"compared": len(rows)},
        rows=(*stays, *rows),
        not_looked_at=(f"{len(real) - MOST} further results",) if len(real) > MOST else (),
        ask_next=("gradproof ask RUN which_digits_are_lost", "gradproof ask RUN is_it_precision"),
    )


def of_modules(evidence: Evidence) -> list[int]:
    """What modules hand out, and the losses; of a script without modules, whatever leads to the loss."""
    made = [slot for call in evidence.tape.modules for slot in call.outputs]
    made = made or [slot for op in evidence.flow.operations for slot in op.makes]
    return list(dict.fromkeys([*evidence.tape.loss_slots, *made]))


def digits_of(error: float) -> float:
    """
    >>> digits_of(0.01), digits_of(0.0)
    (2.0, 16.0)
    """
    return 16.0 if error == 0 else max(0.0, -math.log10(error)) if math.isfinite(error) else 0.0


def number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not math.isnan(value) else math.inf
