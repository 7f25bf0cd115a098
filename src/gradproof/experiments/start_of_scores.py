"""Where do yes-or-no scores start? All far on one side of zero, a network begins by unlearning what it never knew."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import Comparison
from gradproof.experiments.initial import inputs_are_large
from gradproof.experiments.nonfinite import place_of

ID = "bad-init/scores-one-sided"
GUESS = math.log(2)
FAR = 3.0  # the mean score, in logits: sure to 95 %
ONE_SIDED = 0.95  # of the scores that have the same sign
FEWEST = 16


def where_do_scores_start(evidence: Evidence) -> Iterator[Verdict]:
    """Before the first step nothing is known: no loss should be far above ln 2, with nearly all scores on one side."""
    if evidence.step > 1 or inputs_are_large(evidence):
        return
    for comparison in evidence.flow.comparisons:
        if comparison.operation.name != "binary_cross_entropy_with_logits":
            continue
        found = evidence.flow.values([comparison.prediction, comparison.target])
        if len(found) < 2:
            continue
        scores, target = found[comparison.prediction].double(), found[comparison.target].double()
        verdict = judge(evidence, comparison, scores, target) if scores.shape == target.shape else None
        if verdict is not None:
            yield verdict
            return


def judge(evidence: Evidence, comparison: Comparison, scores: Tensor, target: Tensor) -> Verdict | None:
    if scores.numel() < FEWEST:
        return None
    loss = float(F.binary_cross_entropy_with_logits(scores, target))
    mean, spread = float(scores.mean()), float(scores.std())
    same = float((scores.sign() == math.copysign(1, mean)).double().mean())
    began = evidence.losses[0] if evidence.losses else loss
    if not (loss > 2 * GUESS + 1 and abs(mean) > FAR and same > ONE_SIDED and began > 2 * GUESS + 1):
        return None
    weight = largest_weight(evidence, comparison)
    last = evidence.flow.maker(comparison.prediction)
    lines = [
        f"at step {evidence.step} the scores are {mean:.3g} ± {spread:.2g}, {100 * same:.0f} % of one sign, and lose "
        f"{loss:.3g}; {100 * float(target.mean()):.0f} % of the targets are 1, and guessing loses at most {GUESS:.2g}"
    ]
    fix = "start with scores near zero: weights drawn around zero (torch.randn(...) * 0.1), not torch.rand"
    where = place_of(last.module, last.line) if last is not None else None
    if weight is not None:
        name, value = weight
        lines.append(f"{name} starts at {float(value.mean()):.3g} ± {float(value.std()):.2g}")
        where = place_of_parameter(evidence, name) or where
    alone = abs(began - loss) < 0.2 * loss  # the loss is little more than this term
    return confirmed(
        ID,
        *lines,
        where=where,
        fix=fix,
        if_troubled=True,
        confidence="likely",
        lasting=True,
        numbers={"guess": GUESS} if alone else {},
    )


def largest_weight(evidence: Evidence, comparison: Comparison) -> tuple[str, Tensor] | None:
    """The weights behind the scores that are furthest from having a mean of zero."""
    behind = evidence.flow.ancestors(comparison.prediction)
    found = []
    for slot in evidence.tape.parameters:
        if slot.index in behind and slot.dtype.is_floating_point and slot.name:
            value = evidence.tape.leaf_value(slot.index).double()
            width = math.sqrt(slot.shape[-1]) if len(slot.shape) > 1 else 1.0
            found.append((abs(float(value.mean())) * width, slot.name, value))
    best = max(found, key=lambda entry: entry[0], default=None)
    return (best[1], best[2]) if best is not None and best[2].numel() > 1 and best[0] > 0.5 else None


def place_of_parameter(evidence: Evidence, name: str) -> str | None:
    """The line of a script's own module that makes a parameter: `self.user = nn.Parameter(...)`."""
    files = dict.fromkeys(op.line.file for op in evidence.forward if op.line is not None)
    module, _, own = name.rpartition(".")
    for attribute in filter(None, (own, module.rpartition(".")[2])):
        made = re.compile(rf"\bself\.{re.escape(attribute)}\s*(?::[^=]+)?=(?!=)")
        for file in files:
            for number, text in enumerate(linecache.getlines(file), 1):
                if made.search(text):
                    return f"{name} ({file.rsplit('/', 1)[-1]}:{number})"
    return None
