"""How fast do weights shrink? The factor that the optimizer multiplies them with at every step, read off the tape."""

from __future__ import annotations

from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.owners import line_of_optimizer

FAST = 0.02  # of a weight, at every step: half of it is gone after 35
TIMES = 3  # taped steps
USUAL = 0.5  # a decay up to here is not what is wrong with lr * decay


def how_fast_do_weights_shrink(evidence: Evidence) -> Iterator[Verdict]:
    """A decay apart from the gradient is a factor just below one (1 - lr * decay, about 0.9999); one that takes some
    per cent at every step leaves only what the last dozens of steps have taught."""
    stepped = {evidence.slot(slot).storage: slot for slot in evidence.tape.stepped}
    found = []
    for op in evidence.tape.operations:
        if op.phase != "optimizer" or op.name not in ("mul_", "_foreach_mul_") or len(op.args) < 2:
            continue
        factor = op.args[1]
        if not isinstance(factor, float) or not 0 < factor < 1:
            continue
        shrunk = [s for w in op.writes if (s := stepped.get(evidence.slot(w).storage)) is not None]
        found += [(1 - factor, op) for slot in shrunk if len(evidence.slot(slot).shape) >= 2]
    if not found:
        return
    share, op = sorted(found, key=lambda pair: pair[0])[len(found) // 2]
    count = evidence.memory.setdefault("shrinking", [0])
    count[0] = count[0] + 1 if share >= FAST and not is_the_rates_fault(evidence, share) else 0
    if count[0] >= TIMES:
        yield confirmed(
            "optimizer-config/shrinks",
            f"the optimizer takes {100 * share:.3g} % off the weights at every step ({len(found)} matrices, {count[0]} "
            f"taped steps in a row): half of what they have learned is gone after {0.69 / share:.0f} steps",
            where=place_of("", op.line) or line_of_optimizer(evidence) or None,
            fix="decay by lr * weight_decay at a step, not by weight_decay alone; 0.01 to 0.1 is usual for AdamW",
        )


def is_the_rates_fault(evidence: Evidence, share: float) -> bool:
    """Whether it is the learning rate times a decay as many use it."""
    groups = [group for optimizer in evidence.optimizers for group in optimizer.param_groups]
    decays = [(float(g.get("weight_decay") or 0.0), float(g.get("lr") or 0.0)) for g in groups]
    return any(decay <= USUAL and abs(share - rate * decay) < 0.01 * share for decay, rate in decays)
