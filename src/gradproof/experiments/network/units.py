"""Do units respond? Activations that put out one value for every sample, over several taped steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES
from gradproof.tape.operations import Operation

RECTIFIERS = ("relu", "relu_", "threshold", "threshold_")
SQUASHERS = {"sigmoid": 1e-3, "sigmoid_": 1e-3, "tanh": 4e-3, "tanh_": 4e-3}  # y(1−y) and 1−y² below this
LIMITS = ("clamp", "clamp_", "hardtanh", "hardtanh_", "clamp_min", "clamp_max")
MANY = 0.3  # of the predictions
MOSTLY = 0.9  # of the units of a layer
FEWEST = 8  # values of a unit in a batch, to call it dead
MOST_OPERATIONS = 200  # whose values are held at once: the first layers of a very deep model
OFF = 0.05  # of the targets' deviation: a prediction that is nearer is where it should be


def do_units_respond(evidence: Evidence) -> Iterator[Verdict]:
    """Rectifiers whose units are zero for the whole batch, and squashers far out on their flat ends, at every look."""
    known = (op for op in evidence.forward if op.name in (*RECTIFIERS, *SQUASHERS))
    operations = [op for op in known if op.module and op.grad_enabled and op.makes][:MOST_OPERATIONS]
    values = evidence.values([op.makes[0] for op in operations]) if operations else {}
    silent: dict[tuple, tuple[Tensor, Operation]] = {}
    for op in operations:
        value = values.get(op.makes[0])
        if value is None or not value.is_floating_point() or units_of(value).shape[0] < FEWEST:
            continue
        key = (op.module, op.line.number if op.line else 0, op.name)
        mask = is_flat(op, units_of(value))
        before, _ = silent.get(key, (mask, op))
        if before.shape == mask.shape:  # called again: a unit that answers once is alive
            silent[key] = (mask & before, op)
    if operations and not silent:
        said = f"fewer than {FEWEST} values of each unit: too few to call one dead"
        yield undecided("dead-activation", said)
    history = evidence.memory.setdefault("silent units", {})
    shares = []
    for key, (mask, op) in silent.items():
        seen, times = history.get(key, (mask, 0))
        history[key] = (mask & seen if mask.shape == seen.shape else mask, times + 1)
        shares.append(float(history[key][0].float().mean()))
        yield from judge(op, *history[key])
    if shares and max(shares) < MOSTLY:
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


def judge(op: Operation, mask: Tensor, times: int) -> Iterator[Verdict]:
    share, rectifies = float(mask.float().mean()), op.name in RECTIFIERS
    what = (
        "put out zero for every sample"
        if rectifies
        else "are at the flat end of their range for every sample"
    )
    if share >= MOSTLY:
        yield confirmed(
            "dead-activation/units" if rectifies else "dead-activation/saturated",
            f"{int(mask.sum())} of {mask.numel()} units of {op.name.rstrip('_')} {what}, at {times} looks",
            at=op,
            if_troubled=share < 1,
            confidence="proven" if share == 1 and rectifies else "likely",  # no gradient passes
            lasting=False,
        )


def are_predictions_stuck(evidence: Evidence) -> Iterator[Verdict]:
    """Predictions at the limit of a clamp while their targets are elsewhere: those samples teach nothing."""
    clamping = (op for op in evidence.forward if op.name in LIMITS and op.makes and op.grad_enabled)
    clamps = {op.makes[0]: op for op in clamping}
    pairs = list(zip(evidence.roles.prediction_slots, evidence.roles.target_slots, strict=False))
    if not clamps or not pairs:
        return
    values = evidence.values([*clamps, *(slot for pair in pairs for slot in pair)])
    shares: list[float] = []
    for prediction, target in pairs:
        clamp = clamps.get(prediction) or clamps.get(evidence.flow.behind(prediction, RESHAPES))
        made, wished = values.get(prediction), values.get(target)
        if clamp is None or made is None or wished is None:
            continue
        if made.shape != wished.shape or not wished.is_floating_point():
            continue
        low, high = limits_of(clamp)
        at_limit = torch.zeros_like(made, dtype=torch.bool)
        for limit in (each for each in (low, high) if each is not None):
            at_limit |= made == limit
        off = (made - wished).abs() > OFF * wished.std()
        shares.append(float((at_limit & off).float().mean()))
        if shares[-1] >= MANY:
            yield confirmed(
                "dead-activation/clamped-output",
                f"{100 * shares[-1]:.0f} % of the predictions sit at a limit of {clamp.name} ({low} to {high}) "
                "while their targets are elsewhere: they get no gradient",
                f"targets go from {float(wished.min()):.3g} to {float(wished.max()):.3g}",
                at=clamp,
                confidence="likely",
            )
    if shares and max(shares) < MANY:
        said = f"at most {100 * max(shares):.0f} % of the predictions sit at a limit, away from their targets"
        yield excluded("dead-activation/clamped-output", said)


def limits_of(operation: Operation) -> tuple[float | None, float | None]:
    usual = (-1.0, 1.0) if operation.name.startswith("hardtanh") else (None, None)
    given = [a if isinstance(a, (int, float)) else None for a in (*operation.args[1:3], None, None)]
    low, high = (usual if number is None else number for number, usual in zip(given, usual, strict=False))
    return (None, low) if operation.name == "clamp_max" else (low, high)
