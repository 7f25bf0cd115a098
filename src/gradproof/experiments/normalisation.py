"""Does a normalisation help or hurt? Values it averages, its ε against the variance, statistics that never move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS, Flow
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


# what may stand between a tensor and the factor it is rescaled with
WALK = VIEWS | {
    "add",
    "sqrt",
    "div",
    "mul",
    "rsqrt",
    "reciprocal",
    "pow",
    "square",
    "sub",
    "neg",
    "exp",
    "log",
}
REDUCES = ("mean", "sum", "linalg_vector_norm", "norm", "var", "std", "amax")
LIMITS = ("clamp", "clamp_max", "minimum", "tanh", "sigmoid", "hardtanh")
HUGE_FACTOR = 1e3


def is_rescaling_bounded(evidence: Evidence) -> Iterator[Verdict]:
    """A tensor multiplied with a factor made of its own size, that nothing limits, and that has become huge."""
    flow = evidence.flow
    for op in flow.operations:
        refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
        if op.name not in ("mul", "div") or len(refs) != 2 or not set(refs) & flow.tracked:
            continue
        for rescaled, factor in (refs, refs[::-1])[: 2 if op.name == "mul" else 1]:
            if not is_made_of_its_size(flow, rescaled, factor):
                continue
            value = flow.values([factor]).get(factor)
            if value is None or not value.numel():
                continue
            sizes = value.double().abs()
            largest = float(sizes.max() if op.name == "mul" else 1 / sizes.min().clamp_min(1e-300))
            if largest > HUGE_FACTOR:
                yield confirmed(
                    "normalization-error/unbounded-rescale",
                    f"a tensor is rescaled by its own size, by up to {largest:.3g} times: where it is nearly zero, "
                    "noise becomes signal and the gradient grows by the same factor",
                    where=place_of(op.module, op.line),
                    fix="limit the factor: scale.clamp(max=10.0), or add 1e-2 or so to the size it is divided by",
                    if_troubled=True,
                    confidence="likely",
                )
                return


def is_made_of_its_size(flow: Flow, tensor: int, factor: int) -> bool:
    """Whether a factor comes from a reduction of the tensor it is applied to, with no limit on the way."""
    source = flow.behind(tensor, VIEWS)
    waiting: list[tuple[int, bool]] = [(factor, False)]
    seen: set[int] = set()
    while waiting and len(seen) < 24:
        slot, reduced = waiting.pop()
        if slot in seen:
            continue
        seen.add(slot)
        if reduced and flow.behind(slot, VIEWS) == source:
            return True
        maker = flow.maker(slot)
        if maker is None or maker.name in LIMITS or not (maker.name in WALK or maker.name in REDUCES):
            continue
        waiting += [(read, reduced or maker.name in REDUCES) for read in maker.reads]
    return False


def is_it_normalised_over_features(evidence: Evidence) -> Iterator[Verdict]:
    """Vectors brought to length one along the batch: each feature then depends on who else is in the batch."""
    flow = evidence.flow
    if not flow.inputs:
        return
    batch = evidence.slot(flow.inputs[0]).shape[0]
    for op in flow.operations:
        if op.name not in ("linalg_vector_norm", "norm") or len(op.args) < 3 or op.args[2] != [0]:
            continue
        slot = op.reads[0]
        shape = evidence.slot(slot).shape
        embeddings = len(shape) == 2 and shape[1] > 1 and batch > 1 and shape[0] % batch == 0
        if embeddings and slot in flow.tracked and slot not in flow.weights and divides(flow, op, slot):
            yield confirmed(
                "axis-or-shape-error/normalised-over-the-batch",
                f"{list(shape)} is divided by its norm over axis 0, the batch of {batch}: columns have length one, "
                "not the vectors of the samples",
                where=place_of(op.module, op.line),
                fix="F.normalize(z, dim=1), or dim=-1",
                lasting=True,
            )
            return


def divides(flow: Flow, norm: Operation, slot: int) -> bool:
    """Whether the tensor whose norm it is gets divided by it."""
    reach = set(norm.makes)
    for op in flow.operations:
        reads = set(flow.reads(op))
        if op.index <= norm.index or not reads & reach:
            continue
        if op.name == "div" and slot in reads:
            return True
        if op.name in VIEWS or op.name in ("clamp_min", "add", "clamp"):
            reach.update(op.makes)
    return False


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
    if shape[0] == 1 and not is_instance_norm(evidence, operation):
        return confirmed(
            "normalization-error/one-sample",
            f"BatchNorm sees one sample at a time, {values} values a channel: it takes away what makes samples "
            "differ in level, and eval mode, which uses the statistics of many, is another network",
            where=where,
            fix="use GroupNorm or InstanceNorm, or more samples in each forward pass",
            level="warning",
            confidence="likely",
            lasting=True,
        )
    return None


def is_instance_norm(evidence: Evidence, operation: Operation) -> bool:
    """InstanceNorm is a BatchNorm of one sample, that has the channels of all samples."""
    view = evidence.maker(operation.reads[0])
    if view is None or view.name not in VIEWS:
        return False
    before, after = (evidence.slot(slot).shape for slot in (view.reads[0], operation.reads[0]))
    return before[0] > 1 and before[0] * before[1] == after[1]


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
