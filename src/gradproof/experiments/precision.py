"""Is it precision? Updates that half-precision weights swallow, gradients that half precision flushes to zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of, step_is_nonfinite
from gradproof.experiments.owners import named_parameters
from gradproof.tape.operations import Operation
from gradproof.tape.replay import differentiate

HALF = (torch.float16, torch.bfloat16)
MOSTLY = 0.9
MUCH = 0.5


def is_it_precision(evidence: Evidence) -> Iterator[Verdict]:
    """Only where half precision is on the tape at all."""
    if not any(slot.dtype in HALF for slot in evidence.tape.slots) or step_is_nonfinite(evidence):
        return
    found = lost_updates(evidence) or lost_gradients(evidence)
    if found is not None:
        yield found


def lost_updates(evidence: Evidence) -> Verdict | None:
    """Entries that a step (or an average) writes to and that stay, because the change is below half a last digit."""
    tape = evidence.tape
    halves = [slot for slot in tape.stepped if evidence.slot(slot).dtype in HALF]
    if not halves:
        return None
    named = named_parameters(evidence)
    lost = total = 0
    worst: tuple[float, int] = (0.0, halves[0])
    for slot in halves:
        change = evidence.updates.get(slot)
        if change is None:
            continue
        parameter = named.get(evidence.slot(slot).name)
        gradient = None if parameter is None else parameter.grad
        wanted = torch.ones_like(change, dtype=torch.bool) if gradient is None else gradient != 0
        if wanted.shape != change.shape or change.numel() < 16:
            continue
        here = int((wanted & (change == 0)).sum())
        lost, total = lost + here, total + int(wanted.sum())
        worst = max(worst, (here / max(int(wanted.sum()), 1), slot))
    share = lost / total if total else 0.0
    history = evidence.memory.setdefault("lost updates", [])
    history.append(share)
    if len(history) < 2 or min(history[-2:]) < MUCH:
        return None
    hit = evidence.slot(worst[1])
    writer = writer_of(evidence, worst[1])
    averaged = writer is not None and writer.phase != "optimizer"
    dtype = str(hit.dtype).removeprefix("torch.")
    return confirmed(
        "low-precision-error/lost-updates",
        f"{100 * share:.0f} % of the entries that {'an average' if averaged else 'the optimizer'} writes to stay: "
        f"the change is below the last digit of {dtype}",
        f"worst: {hit.name}, {100 * worst[0]:.0f} %",
        where=place_of(hit.name, writer.line) if averaged and writer is not None else hit.name,
        fix="keep the weights (and their averages) in float32, and use autocast for the computing",
        if_troubled=share < MOSTLY,
        lasting=share >= MOSTLY,
    )


def writer_of(evidence: Evidence, slot: int) -> Operation | None:
    return next((op for op in evidence.tape.operations if slot in op.writes), None)


def lost_gradients(evidence: Evidence) -> Verdict | None:
    """Gradient entries that are zero in the step and not in float64: below the smallest float16."""
    if not any(slot.dtype == torch.float16 for slot in evidence.tape.slots):
        return None
    named = named_parameters(evidence)
    truth = differentiate(evidence.tape, torch.float64).gradients
    lost = total = 0
    for slot in evidence.tape.parameters:
        parameter, right = named.get(slot.name), truth.get(slot.index)
        if (
            parameter is None
            or right is None
            or parameter.grad is None
            or right.shape != parameter.grad.shape
        ):
            continue
        alive: Tensor = right != 0
        lost += int((alive & (parameter.grad == 0)).sum())
        total += int(alive.sum())
    if total == 0 or lost < 0.3 * total:
        return None
    scaled = bool(evidence.tape.scaled)
    return confirmed(
        "low-precision-error/underflow",
        f"{100 * lost / total:.0f} % of the gradient's entries are zero in float16 and not in float64",
        "the loss is scaled, but not enough" if scaled else "the loss is not scaled",
        fix="use torch.amp.GradScaler, or bfloat16 in place of float16",
        if_troubled=lost < MUCH * total,
    )
