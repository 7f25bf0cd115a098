"""Is attention healthy? How large its scores are, whether each query still weighs several keys, and who sees no key."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.attention import SOFTMAXES, padded_batches
from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation

MASKED = -1e4  # a score that is meant as minus infinity
LARGE = 50.0  # e^50 to one: next to such a score no other key counts, nor gets a gradient
ONE_KEY = 0.99  # of the weight on a single key
FEWEST = 8  # keys among which a query can choose
TIMES = 2  # taped steps in which the same is seen


def is_attention_healthy(evidence: Evidence) -> Iterator[Verdict]:
    """The first softmax over keys that leaves no choice, or has none to choose from."""
    flow = evidence.flow
    softmaxes = [op for op in flow.operations if op.name in SOFTMAXES and is_over_keys(evidence, op)][:50]
    if not softmaxes:
        return
    values = flow.values([op.reads[0] for op in softmaxes])
    for judge in (saturated, sees_nothing):
        for op in softmaxes:
            scores = values.get(op.reads[0])
            verdict = judge(evidence, op, scores.double()) if scores is not None else None
            if verdict is not None:
                yield verdict
                return


def is_over_keys(evidence: Evidence, op: Operation) -> bool:
    """Scores (…, queries, keys) inside a module, over their last axis; not the classes of an output."""
    shape = evidence.slot(op.makes[0]).shape
    over_last = op.args[1] % max(1, len(shape)) == len(shape) - 1
    return bool(op.module) and len(shape) >= 3 and over_last and shape[-1] >= 2


def saturated(evidence: Evidence, op: Operation, scores: Tensor) -> Verdict | None:
    open_keys = scores > MASKED
    several = open_keys.sum(-1) >= FEWEST
    if not bool(several.any()):
        return None
    rows = scores.masked_fill(~open_keys, -torch.inf)[several]
    top, second = rows.topk(2, dim=-1).values.unbind(-1)
    weights = rows.softmax(-1)
    alone = float((weights.amax(-1) > ONE_KEY).double().mean())
    gap = float((top - second).median())
    count = evidence.memory.setdefault("one key", {})
    # a head that learned to look at one place is healthy; one whose scores are that large from the start is not
    if alone < 0.95 or gap < LARGE or evidence.step > 10:
        return None
    count[op.module] = count.get(op.module, 0) + 1
    if count[op.module] < TIMES:
        return None
    spread = float(rows[rows > -torch.inf].std())
    return confirmed(
        "exploding-signal/attention-scores",
        f"{100 * alone:.0f} % of the queries put all their weight on one key: scores have a standard deviation of "
        f"{spread:.3g}, the best is {gap:.3g} ahead of the next (e^{gap:.0f} to one)",
        where=place_of(op.module, op.line),
        fix="divide the scores by the root of the head's size, and start query and key weights smaller",
        if_troubled=True,
        lasting=True,
    )


def sees_nothing(evidence: Evidence, op: Operation, scores: Tensor) -> Verdict | None:
    """Real queries all of whose keys are masked with a large negative number: their weights are equal, not zero."""
    finite = torch.isfinite(scores)
    most = scores.masked_fill(~finite, -torch.inf).amax(-1)
    least = scores.masked_fill(~finite, torch.inf).amin(-1)
    # (…, queries); all −inf would be a NaN, and scores that have grown to such numbers lie far apart
    hidden = finite.any(-1) & (most <= MASKED) & (most - least < 0.01 * most.abs())
    rows = hidden.reshape(-1, hidden.shape[-1])
    for is_pad in padded_batches(evidence).values():
        if (
            rows.shape[1] == is_pad.shape[1] and rows.shape[0] % is_pad.shape[0] == 0
        ):  # padding may see nothing
            rows = rows & ~is_pad.repeat_interleave(rows.shape[0] // is_pad.shape[0], dim=0)
    share = float(rows.double().mean())
    if share < 0.01:
        return None
    return confirmed(
        "attention-mask-error/all-masked-row",
        f"{100 * share:.0f} % of the queries have every key masked: with a finite mask they attend to all keys alike",
        where=place_of(op.module, op.line),
        fix="let each query see at least itself, and check which value of the mask means: hidden",
        level="warning",
        confidence="likely",
        if_troubled=True,
        lasting=True,
    )
