"""Do units respond? Activations that put out one value for every sample, over several taped steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of
from gradproof.tape.operations import Operation

RECTIFIERS = ("relu", "relu_", "threshold", "threshold_")
SQUASHERS = {"sigmoid": 1e-3, "sigmoid_": 1e-3, "tanh": 4e-3, "tanh_": 4e-3}  # y(1−y) and 1−y² below this
UNCHANGED = ("view", "_unsafe_view", "squeeze", "unsqueeze", "reshape", "alias")
LIMITS = ("clamp", "clamp_", "hardtanh", "hardtanh_", "clamp_min", "clamp_max")
MANY = 0.3  # of the predictions
MOSTLY = 0.9  # of the units of a layer
FEWEST = 8  # values of a unit in a batch, to call it dead
MOST_OPERATIONS = 200  # whose values are held at once: the first layers of a very deep model
OFF = 0.05  # of the targets' deviation: a prediction that is nearer is where it should be


def do_units_respond(evidence: Evidence) -> Iterator[Verdict]:
    """Rectifiers whose units are zero for the whole batch, and squashers far out on their flat ends, at every look."""
    operations = [
        op
        for op in evidence.forward
        if op.module and op.grad_enabled and op.makes and op.name in (*RECTIFIERS, *SQUASHERS)
    ][:MOST_OPERATIONS]
    if not operations:
        return
    values = evidence.values([op.makes[0] for op in operations])
    silent: dict[tuple, tuple[Tensor, Operation]] = {}
    for operation in operations:
        value = values.get(operation.makes[0])
        if value is None or not value.is_floating_point() or units_of(value).shape[0] < FEWEST:
            continue
        key = (operation.module, operation.line.number if operation.line else 0, operation.name)
        mask = is_flat(operation, units_of(value))
        before = silent.get(key)
        if before is None or before[0].shape == mask.shape:  # called again: a unit that answers once is alive
            silent[key] = (mask if before is None else mask & before[0], operation)
    if not silent:
        yield undecided(
            "dead-activation", f"fewer than {FEWEST} values of each unit: too few to call one dead"
        )
        return
    history = evidence.memory.setdefault("silent units", {})
    shares = []
    for key, (mask, operation) in silent.items():
        seen, times = history.get(key, (mask, 0))
        history[key] = (mask & seen if mask.shape == seen.shape else mask, times + 1)
        shares.append(float(history[key][0].float().mean()))
        yield from judge(operation, *history[key])
    if max(shares) < MOSTLY:
        said = f"at most {100 * max(shares):.0f} % of the units of a layer are silent for the whole batch"
        yield from (excluded(f"dead-activation/{what}", said) for what in ("units", "saturated"))


def units_of(value: Tensor) -> Tensor:
    """(samples and positions, units): units are channels of an image, else the last dimension."""
    if value.dim() >= 4:
        value = value.transpose(1, -1)
    return value.reshape(-1, value.shape[-1]) if value.dim() else value.reshape(1, 1)


def is_flat(operation: Operation, units: Tensor) -> Tensor:
    """Which units pass no gradient for any sample."""
    if operation.name in RECTIFIERS:
        return (units == 0).all(dim=0)
    slope = units * (1 - units) if operation.name.startswith("sigmoid") else 1 - units * units
    return (slope < SQUASHERS[operation.name]).all(dim=0)


def judge(operation: Operation, mask: Tensor, times: int) -> Iterator[Verdict]:
    share = float(mask.float().mean())
    if share < MOSTLY:
        return
    if operation.name in RECTIFIERS:
        what, id = "put out zero for every sample", "dead-activation/units"
    else:
        what, id = "are at the flat end of their range for every sample", "dead-activation/saturated"
    yield confirmed(
        id,
        f"{int(mask.sum())} of {mask.numel()} units of {operation.name.rstrip('_')} {what}, at {times} looks",
        where=place_of(operation.module, operation.line),
        if_troubled=share < 1,
        confidence="proven"
        if share == 1 and operation.name in RECTIFIERS
        else "likely",  # no gradient passes
        lasting=False,
    )


def are_predictions_stuck(evidence: Evidence) -> Iterator[Verdict]:
    """Predictions at the limit of a clamp while their targets are elsewhere: those samples teach nothing."""
    clamps = [op for op in evidence.forward if op.name in LIMITS and op.makes and op.grad_enabled]
    pairs = list(zip(evidence.roles.prediction_slots, evidence.roles.target_slots, strict=False))
    if not clamps or not pairs:
        return
    wanted = [op.makes[0] for op in clamps] + [slot for pair in pairs for slot in pair]
    values = evidence.values(wanted)
    shares: list[float] = []
    for operation in clamps:
        low, high = limits_of(operation)
        for prediction, target in pairs:
            made, wished = values.get(prediction), values.get(target)
            if not comes_from(evidence, prediction, operation.makes[0]) or made is None or wished is None:
                continue
            if made.shape != wished.shape or not wished.is_floating_point():
                continue
            at_limit = torch.zeros_like(made, dtype=torch.bool)
            for limit in (low, high):
                at_limit |= made == limit if limit is not None else False
            off = (made - wished).abs() > OFF * wished.std()
            share = float((at_limit & off).float().mean())
            shares.append(share)
            if share >= MANY:
                yield confirmed(
                    "dead-activation/clamped-output",
                    f"{100 * share:.0f} % of the predictions sit at a limit of {operation.name} ({low} to {high}) "
                    "while their targets are elsewhere: they get no gradient",
                    f"targets go from {float(wished.min()):.3g} to {float(wished.max()):.3g}",
                    where=place_of(operation.module, operation.line),
                    confidence="likely",
                )
    if shares and max(shares) < MANY:
        said = f"at most {100 * max(shares):.0f} % of the predictions sit at a limit, away from their targets"
        yield excluded("dead-activation/clamped-output", said)


def limits_of(operation: Operation) -> tuple[float | None, float | None]:
    numbers = [a if isinstance(a, (int, float)) else None for a in (*operation.args[1:3], None, None)][:2]
    if operation.name == "clamp_max":
        return None, numbers[0]
    if operation.name.startswith("hardtanh"):
        return (-1.0 if numbers[0] is None else numbers[0]), (1.0 if numbers[1] is None else numbers[1])
    return numbers[0], numbers[1]


def comes_from(evidence: Evidence, slot: int, origin: int) -> bool:
    """Through views alone."""
    while slot != origin:
        maker = evidence.maker(slot)
        if maker is None or maker.name not in UNCHANGED:
            return False
        slot = maker.reads[0]
    return True
