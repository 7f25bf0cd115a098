"""Does a normalisation help or hurt? Values it averages, its ε against the variance, statistics that never move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation, Ref

# operator -> places of training, momentum and ε among its arguments
BATCH_NORMS = {
    "native_batch_norm": (5, 6, 7),
    "_native_batch_norm_legit": (5, 6, 7),
    "cudnn_batch_norm": (5, 6, 7),
    "miopen_batch_norm": (5, 6, 7),
    "_batch_norm_with_update": (None, 5, 6),
}
LATE = 90  # steps after which running statistics should have left their start
LAYER_NORMS = {"native_layer_norm": 4}


def does_normalisation_help(evidence: Evidence) -> Iterator[Verdict]:
    """Each BatchNorm and LayerNorm of the step, one verdict for the first that hurts."""
    norms = [op for op in evidence.forward if op.grad_enabled and op.name in (*BATCH_NORMS, *LAYER_NORMS)]
    for operation in norms:
        if operation.name in BATCH_NORMS:
            found = judge_batch_norm(evidence, operation)
            if found is not None:
                yield found
                return
    yield from judge_epsilon(evidence, norms)


def judge_batch_norm(evidence: Evidence, operation: Operation) -> Verdict | None:
    training, momentum, _ = (argument(operation, place) for place in BATCH_NORMS[operation.name])
    if training is False:
        return None
    where = place_of(operation.module, operation.line)
    if momentum == 0 and len(operation.args) > 3 and isinstance(operation.args[3], Ref):
        return confirmed(
            "normalization-error/running-statistics-never-move",
            "BatchNorm has momentum 0: its running statistics stay at 0 and 1, and eval mode uses those",
            where=where,
            fix="use momentum=0.1, the share of the new batch",
            lasting=True,
        )
    slow = judge_momentum(evidence, operation, momentum)
    if slow is not None:
        return slow
    shape = evidence.slot(operation.reads[0]).shape
    values = 1
    for place, size in enumerate(shape):
        values *= size if place != 1 else 1
    if values <= 4:
        return confirmed(
            "normalization-error/tiny-batch",
            f"BatchNorm takes mean and variance of {values} values a channel: what it puts out is mostly noise",
            where=where,
            fix="use LayerNorm or GroupNorm, or more samples in each forward pass",
            if_troubled=values > 2,
            lasting=True,
        )
    return None


def judge_momentum(evidence: Evidence, operation: Operation, momentum: Any) -> Verdict | None:
    """Running statistics that are still mostly what they started as, and far from those of the batch."""
    if not isinstance(momentum, float) or evidence.step < LATE:
        return None
    left = (1 - momentum) ** (evidence.step + 1)
    running = operation.args[3:5]
    if left < 0.5 or not all(isinstance(arg, Ref) for arg in running):
        return None
    slots = [operation.reads[0], *(arg.slot for arg in running)]
    values = evidence.values(slots)
    if len(values) < len(slots):
        return None
    batch, mean, variance = (values[slot].double() for slot in slots)
    channels = batch.transpose(0, 1).flatten(1)
    shift = ((channels.mean(1) - mean).abs() / channels.std(1).clamp_min(1e-12)).median()
    ratio = (channels.var(1) / variance.clamp_min(1e-12)).clamp_min(1e-12).log().abs().median().exp()
    if shift < 1 and ratio < 2:
        return None
    return confirmed(
        "normalization-error/running-statistics-lag",
        f"BatchNorm has momentum {momentum:g}: after {evidence.step + 1} steps {100 * left:.0f} % of its running "
        "statistics are still what they started as, and eval mode uses those",
        f"of a typical channel the mean is {shift:.2g} standard deviations off, the variance {ratio:.2g} times",
        where=place_of(operation.module, operation.line),
        fix=f"momentum is the share of the new batch: use momentum=0.1, not {momentum:g}",
        lasting=True,
    )


def judge_epsilon(evidence: Evidence, norms: list[Operation]) -> Iterator[Verdict]:
    """A variance below ε is not brought to one: the layer shrinks what it should normalise."""
    values = evidence.values([op.reads[0] for op in norms][:100])
    for operation in norms:
        value = values.get(operation.reads[0])
        place = LAYER_NORMS.get(operation.name) or BATCH_NORMS[operation.name][2]
        eps = argument(operation, place)
        if value is None or not isinstance(eps, float):
            continue
        variance = float(variances(operation, value.float()).median())
        if eps >= 1e-3 and variance < eps:
            yield confirmed(
                "normalization-error/eps",
                f"ε = {eps:g} is larger than the variance {variance:.2g} of what comes in: "
                f"it leaves with a standard deviation of {(variance / (variance + eps)) ** 0.5:.2g}, not 1",
                where=place_of(operation.module, operation.line),
                fix="use eps=1e-5",
                lasting=True,
            )
            return


def variances(operation: Operation, value: Tensor) -> Tensor:
    if operation.name in LAYER_NORMS:
        dims = tuple(range(-len(operation.args[1]), 0))
        return value.var(dim=dims, unbiased=False)
    return value.transpose(0, 1).flatten(1).var(dim=1, unbiased=False)


def argument(operation: Operation, place: int | None) -> Any:
    return operation.args[place] if place is not None and place < len(operation.args) else None
