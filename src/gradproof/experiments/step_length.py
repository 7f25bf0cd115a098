"""Is the step too long or too short? The loss along the step that was really taken, on the batch it was taken for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded

SHARES = (0.01, 0.1, 0.5, 1.0, 2.0)
FAR = (10.0, 100.0, 1000.0)


def is_the_step_too_long_or_short(evidence: Evidence) -> Iterator[Verdict]:
    """Too long: the loss falls for a small part of the step and has risen at its end. Too short: it still falls at a
    hundred times the step."""
    if not evidence.updates:
        return
    start = evidence.loss_at({})
    if not math.isfinite(start):
        return
    losses = {share: evidence.loss_at(evidence.moved(share)) for share in SHARES}
    history = evidence.memory.setdefault("line probe", [])
    gained = start - losses[1.0]
    best = max(SHARES, key=lambda share: start - losses[share] if math.isfinite(losses[share]) else -math.inf)
    slack = 1e-5 * abs(start) + 1e-9
    overshoots = losses[1.0] > start + slack or not math.isfinite(losses[1.0])
    downhill = any(losses[share] < start - 1e-7 * abs(start) for share in (0.01, 0.1))
    history.append({"step": evidence.step, "overshoots": overshoots and downhill, "rise": -gained})
    text = ", ".join(f"{losses[share]:.4g} at {share:g}" for share in SHARES)
    line = f"the loss along the step taken: {start:.4g} at 0, {text}"
    recent = history[-3:]
    if sum(entry["overshoots"] for entry in recent) >= min(2, len(recent)) and overshoots and downhill:
        lr = max(group["lr"] for optimizer in evidence.optimizers for group in optimizer.param_groups)
        fix = f"lower the learning rate: {lr * best:.1e} instead of {float(lr):.1e} is where this batch's loss is least"
        yield confirmed(
            "lr-too-high/overshoot", line, if_troubled=True, fix=fix, numbers={"lr_factor": min(best, 0.5)}
        )
    elif not overshoots:
        yield excluded(
            "lr-too-high", f"a step lowers the loss of its own batch: {start:.4g} to {losses[1.0]:.4g}"
        )
    if 0 <= gained < 1e-3 * abs(start):
        yield from is_far_better(evidence, start)


def is_far_better(evidence: Evidence, start: float) -> Iterator[Verdict]:
    """Whether the same direction, followed much further, keeps paying."""
    losses = {share: evidence.loss_at(evidence.moved(share)) for share in FAR}
    if losses[100.0] < start - 1e-4 * abs(start) and losses[100.0] < losses[10.0]:
        lr = max(float(group["lr"]) for optimizer in evidence.optimizers for group in optimizer.param_groups)
        text = ", ".join(f"{losses[share]:.4g} at {share:g}" for share in FAR)
        line = f"the loss along the step, followed further: {start:.4g} at 0, {text}"
        best = min(FAR, key=lambda share: losses[share])
        fix = f"raise the learning rate: {lr:.1e} could be {lr * best / 3:.1e}"
        numbers = {"lr_factor": best / 3}
        yield confirmed("lr-too-low/tiny-steps", line, if_troubled=True, fix=fix, numbers=numbers)
