"""Do class weights favour the rare? The weights that the loss was given against how often each class occurs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Ref

LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
APART = 1.5  # between the largest weight and the smallest, and
UNEVEN = 3.0  # between the most frequent class and the rarest: less may be chance
LIKE = 0.95  # correlation of their logarithms: a power of the frequency, not a wish for one class


def do_class_weights_favour_the_rare(evidence: Evidence) -> Iterator[Verdict]:
    """Weights that grow with the frequency of their class take from the rare ones what little they have."""
    for op in evidence.forward:
        if op.name not in LOSSES or len(op.args) < 3 or not all(isinstance(a, Ref) for a in op.args[1:3]):
            continue
        found = evidence.values([op.args[1].slot, op.args[2].slot])
        target, weight = found[op.args[1].slot].flatten(), found[op.args[2].slot].double().flatten()
        counts: Tensor = evidence.memory.setdefault("class counts", torch.zeros(len(weight)))
        inside = target[(target >= 0) & (target < len(weight))]
        if len(counts) != len(weight):
            return
        counts += torch.bincount(inside, minlength=len(weight)).cpu()
        if (verdict := compare(counts, weight.cpu())) is not None:
            yield confirmed(
                "loss-scale-or-sign/class-weights",
                verdict,
                where=place_of(op.module, op.line),
                # of two classes, the frequent one may be the one that matters
                level="problem" if int((counts > 0).sum()) > 2 else "warning",
                fix="weigh classes by one over their frequency (or its root), not by the frequency",
            )
        return


def compare(counts: Tensor, weight: Tensor) -> str | None:
    seen = (counts > 0) & (weight > 0)
    counts, weight = counts[seen], weight[seen]
    if len(counts) < 2 or counts.sum() < 50 * len(counts) or counts.max() < UNEVEN * counts.min():
        return None
    if weight.max() < APART * weight.min():
        return None
    if float(torch.corrcoef(torch.stack([counts.double(), weight]).log())[0, 1]) < LIKE:
        return None
    often, rare = int(counts.argmax()), int(counts.argmin())
    return (
        f"the loss weighs the most frequent class ({100 * float(counts[often] / counts.sum()):.3g} % of the targets) "
        f"with {float(weight[often]):.3g} and the rarest ({100 * float(counts[rare] / counts.sum()):.3g} %) with "
        f"{float(weight[rare]):.3g}: the weights grow with the frequency"
    )
