"""Is this gradient right? The step's gradients against float64, parameter by parameter."""

from __future__ import annotations

from gradproof.ask.answer import Answer
from gradproof.ask.opened import Asked
from gradproof.ask.spots import below, suggest
from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence
from gradproof.tape.shadow import Shadow, shadow


def judged(evidence: Evidence, wanted: str) -> Shadow:
    """The step against float64; of what is asked about alone, unless all of it is known already."""
    slots = [slot.index for slot in evidence.tape.parameters if below(slot.name, wanted)] if wanted else []
    return shadow(evidence.tape, slots) if slots and "shadow" not in vars(evidence) else evidence.shadow


def answer(asked: Asked) -> Answer:
    wanted = asked.of.removesuffix(".grad")
    found = judged(asked.evidence, wanted)
    mine = [p for p in found.parameters if below(p.name, wanted)]
    if not mine and wanted:
        raise UserError(f"no gradient of {wanted!r} is judged; {suggest(asked.evidence, wanted)}")
    wrong = [p for p in mine if p.verdict in ("wrong", "not finite")]
    open_ones = [p for p in mine if p.verdict == "undecided"]
    culprit = found.culprits[0] if found.culprits and (wrong or not wanted) else None
    worst = max((p for p in mine if p.verdict != "undecided"), key=lambda p: p.error, default=None)
    if wrong or culprit:
        said = str(culprit) if culprit else "no single place explains it"
        sentence = f"No: {len(wrong)} of {len(mine)} gradients are wrong: {said}"
    elif open_ones or not mine:
        sentence = f"{len(open_ones)} of {len(mine)} gradients could not be judged."
    else:
        far = f", the worst by {worst.error:.1e} ({worst.name})" if worst is not None else ""
        sentence = f"Yes: {len(mine)} gradients agree with float64{far}."
    rows = tuple(
        {
            "parameter": p.name,
            "verdict": p.verdict,
            "error": p.error,
            "allowed": p.tolerance,
            "how": p.pattern,
        }
        for p in sorted(mine, key=lambda p: (p.verdict == "right", -p.error))
    )
    line = getattr(culprit, "line", None)
    return Answer(
        "gradient",
        sentence,
        "proven" if wrong or culprit or not (open_ones or not mine) else "undecided",
        numbers={"loss": found.loss, "loss_in_float64": found.true_loss, "error": found.error},
        place=str(line) if line else None,
        rows=rows,
        not_looked_at=(*found.notes, *(f"{p.name}: {p.pattern or p.verdict}" for p in open_ones[:3])),
        ask_next=(
            ("gradproof ask RUN line --of FILE:LINE shows what ran there",)
            if line
            else ("gradproof ask RUN update", "gradproof ask RUN weighs")
        ),
    )
