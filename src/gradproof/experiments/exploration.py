"""Is exploring rewarded? The entropy of a policy, found in its loss by its numbers, and which way the loss pulls it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.terms import policy_terms
from gradproof.tape.operations import Operation, Ref
from gradproof.tape.replay import differentiate


def is_exploring_rewarded(evidence: Evidence) -> Iterator[Verdict]:
    """Beside a policy's gradient, an entropy belongs into the loss with a minus: minimised, it ends exploring."""
    if not policy_terms(evidence.flow):
        return
    products = entropies(evidence)
    if not products:
        return
    gradients = differentiate(evidence.tape, gradients_at=[op.makes[0] for op in products]).slot_gradients
    up = -1.0 if any(g.get("maximize") for o in evidence.optimizers for g in o.param_groups) else 1.0
    for op in products:
        gradient = gradients.get(op.makes[0])
        # of Σ p log p, the negative entropy
        if gradient is None or not float((up * gradient).max()) < 0:
            continue
        yield confirmed(
            "loss-scale-or-sign/entropy-sign",
            "the loss falls as the policy's entropy falls: what is meant to keep it exploring makes it certain",
            where=place_of("", op.line),
            fix="subtract it: loss = policy_loss - coefficient * entropy",
            confidence="likely",
            lasting=True,
        )
        return


def entropies(evidence: Evidence) -> list[Operation]:
    """The products p · log p of the loss: one operand is a distribution, the other its logarithm."""
    flow = evidence.flow
    found = []
    for op in flow.operations:
        refs = [arg for arg in op.args if isinstance(arg, Ref) and arg.tracked]
        if op.name != "mul" or len(refs) != 2 or op.makes[0] not in flow.tail:
            continue
        if evidence.slot(refs[0].slot).shape != evidence.slot(refs[1].slot).shape:
            continue
        values = flow.values([ref.slot for ref in refs])
        pair = [values.get(ref.slot) for ref in refs]
        if any(is_logarithm(a, b) for a, b in (pair, pair[::-1]) if a is not None and b is not None):
            found.append(op)
    return found


def is_logarithm(logs: Tensor, p: Tensor) -> bool:
    """Whether rows of p are distributions and `logs` their logarithms."""
    if p.dim() < 1 or p.shape[-1] < 2 or not bool((p >= 0).all()):
        return False
    p, logs = p.double(), logs.double()
    some = p > 1e-6
    sums = p.sum(-1)
    whole = torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    return whole and torch.allclose(logs[some], p[some].log(), atol=1e-2)
