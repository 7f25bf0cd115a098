"""What weighs how much? Terms of the loss, samples of the batch, parameters in the gradient."""

from __future__ import annotations

import torch

from gradproof.ask.answer import Answer, Row
from gradproof.ask.opened import Asked
from gradproof.ask.spots import find_spots, place_of, predictions
from gradproof.errors import UserError
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.weights import pull, take_apart

SILENT = 1e-12  # of the largest


def answer(asked: Asked) -> Answer:
    evidence = asked.evidence
    slots = [s.slot for s in find_spots(evidence, asked.of)] if asked.of else scores(evidence)
    terms = terms_of(evidence)
    samples, silent, count = samples_of(evidence, slots[:1])
    squares = {
        slot: float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
        for slot, g in evidence.gradients.items()
    }
    total = sum(squares.values())
    parameters: list[Row] = [
        {"what": f"parameter {evidence.slot(s).name}", "share": squares[s] / total}
        for s in sorted(squares, key=lambda s: -squares[s])[:8]
        if total > 0
    ]
    if not (terms or samples or parameters):
        raise UserError(f"step {evidence.step} has no gradient to be weighed")
    first = terms[0] if terms else None
    count_of = f"{len(terms)} term{'' if len(terms) == 1 else 's'} in the loss"
    parts = [f"{count_of}, the largest {first['what']}" if first else count_of]
    if samples:
        parts.append(
            f"{count} samples, of which the first takes {samples[0]['share']:.0%} of the pull on the prediction"
            + (f" and {silent} take nothing" if silent else "")
        )
    return Answer(
        "weighs",
        f"{'; '.join(parts)}.",
        "proven",
        numbers={"samples": count, "samples_without_weight": silent, "gradient_norm": total**0.5},
        place=first["line"] if first else None,
        rows=(*terms, *samples[:8], *parameters),
        not_looked_at=() if terms else ("the loss is no sum of terms that could be told apart",),
        ask_next=("gradproof ask RUN which_positions_count", "gradproof ask RUN are_terms_weighed_alike"),
    )


def scores(evidence: Evidence) -> list[int]:
    """Where the last weights end: behind a softmax every sample would pull alike."""
    return evidence.flow.predictions or predictions(evidence)


def terms_of(evidence: Evidence) -> list[Row]:
    terms = [term for root in evidence.tape.loss_slots for term in take_apart(evidence.flow, root)]
    made = [term.operation.makes[0] for term in terms if term.operation.makes]
    values = evidence.flow.values(made) if made else {}
    rows: list[Row] = [
        {
            "what": f"term {term.operation.name} of {list(term.operand)}",
            "value": float(values[term.operation.makes[0]].double().sum()) * factor(term.factors),
            "one_entry_counts": term.weight,
            "line": place_of(term.operation) or "",
        }
        for term in terms
        if term.operation.makes and term.operation.makes[0] in values
    ]
    return sorted(rows, key=lambda row: -abs(float(row["value"])))


def factor(factors: list[float]) -> float:
    found = 1.0
    for number in factors:
        found *= number
    return found


def samples_of(evidence: Evidence, slots: list[int]) -> tuple[list[Row], int, int]:
    """Each sample's share of the gradient at a prediction, the largest first; how many have none, and are there."""
    gradient = pull(evidence, slots[0]) if slots else None
    if gradient is None or gradient.dim() == 0:
        return [], 0, 0
    size = gradient.double().reshape(gradient.shape[0], -1).norm(dim=1)
    total = float(size.sum())
    silent = int((size <= SILENT * float(size.max())).sum())
    order = torch.argsort(size, descending=True).tolist()
    rows: list[Row] = [
        {"what": f"sample {i}", "share": float(size[i]) / total if total > 0 else 0.0} for i in order
    ]
    return rows, silent, len(size)
