"""Does a normalisation help or hurt? What it averages, its ε against the variance, its statistics, its factors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Flow, place_of
from gradproof.tape.operations import Operation, Ref


def does_normalisation_help(evidence: Evidence) -> Iterator[Verdict]:
    looks = (of_torchs_own, of_ones_own_over_the_batch, of_one_value, of_unbounded_factors)
    yield from causes_of(each(evidence, *looks))


# operator -> places of training, momentum and ε among its arguments
BATCH_NORMS = {
    "native_batch_norm": (5, 6, 7),
    "_native_batch_norm_legit": (5, 6, 7),
    "cudnn_batch_norm": (5, 6, 7),
    "miopen_batch_norm": (5, 6, 7),
    "_batch_norm_with_update": (None, 5, 6),
}
LARGE_EPS = 1e-3  # a hundred times PyTorch's own: an ε below is hardly ever what is wrong
SETTLED = 5  # steps after which they are of some batch
OF_ONE_BATCH = 0.6  # of running statistics that the last batch brings
UNLIKE = 0.25  # standard deviations between the means of two batches, and of their variances
LATE = 90  # steps after which running statistics should have left their start
LAYER_NORMS = {"native_layer_norm": 4}


def of_torchs_own(evidence: Evidence) -> Iterator[Verdict]:
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
    "add", "sqrt", "div", "mul", "rsqrt", "reciprocal", "pow", "square", "sub", "neg", "exp", "log",
}  # fmt: skip
REDUCES = ("mean", "sum", "linalg_vector_norm", "norm", "var", "std", "amax")
LIMITS = ("clamp", "clamp_max", "minimum", "tanh", "sigmoid", "hardtanh")
HUGE_FACTOR = 1e3  # what has shrunk so far is mostly noise, and its gradient grows by as much


def of_unbounded_factors(evidence: Evidence) -> Iterator[Verdict]:
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
                    if_troubled=True,
                    confidence="likely",
                    lasting=False,
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
            confidence="proven",  # what the operation was given
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
            if_troubled=values > 2,
            confidence="proven" if values <= 2 else "likely",  # of two it makes +1 and -1, whatever they are
        )
    if shape[0] == 1 and not is_instance_norm(evidence, operation):
        return confirmed(
            "normalization-error/one-sample",
            f"BatchNorm sees one sample at a time, {values} values a channel: it takes away what makes samples "
            "differ in level, and eval mode, which uses the statistics of many, is another network",
            where=where,
            level="warning",
            confidence="likely",
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
    """Running statistics that are mostly what they started as, or those of one batch, and far from this batch's."""
    if not isinstance(momentum, float):
        return None
    left = (1 - momentum) ** (evidence.step + 1)
    late, hasty = evidence.step >= LATE and left > 0.5, evidence.step >= SETTLED and momentum > OF_ONE_BATCH
    apart = apart_from_the_batch(evidence, operation) if late or hasty else None
    if apart is None:
        return None
    shift, ratio = apart
    numbers = f"of a typical channel the mean is {shift:.2g} standard deviations off, the variance {ratio:.2g} times"
    where = place_of(operation.module, operation.line)
    fix = f"momentum is the share of the new batch: use momentum=0.1, not {momentum:g}"
    if late and (shift >= 1 or ratio >= 2):
        return confirmed(
            "normalization-error/running-statistics-lag",
            f"BatchNorm has momentum {momentum:g}: after {evidence.step + 1} steps {100 * left:.0f} % of its running "
            "statistics are still what they started as, and eval mode uses those",
            numbers,
            where=where,
            fix=fix,
            confidence="likely",
        )
    if hasty and (shift > UNLIKE or ratio > 1 + UNLIKE):
        return confirmed(
            "normalization-error/running-statistics-of-one-batch",
            f"BatchNorm has momentum {momentum:g}: {100 * momentum:.0f} % of its running statistics are those of the "
            "last batch alone, and eval mode uses those, though one batch is not like the next",
            f"against the statistics that the batch before has left, {numbers}",
            where=where,
            fix=fix,
            confidence="likely",
        )
    return None


def apart_from_the_batch(evidence: Evidence, operation: Operation) -> tuple[float, float] | None:
    """How far a typical channel's running mean is from the batch's, in its standard deviations, and how many times as
    large one variance is as the other; as they stood before this batch was added."""
    running = operation.args[3:5]
    if len(running) < 2 or not all(isinstance(arg, Ref) for arg in running):
        return None
    before = [arg.slot for arg in running if arg.slot in evidence.tape.memory_of]
    batch = evidence.values([operation.reads[0]]).get(operation.reads[0])
    if len(before) < 2 or batch is None:
        return None
    mean, variance = (evidence.tape.leaf_value(slot).double() for slot in before)
    channels = batch.double().transpose(0, 1).flatten(1)
    shift = ((channels.mean(1) - mean).abs() / channels.std(1).clamp_min(1e-12)).median()
    ratio = (channels.var(1) / variance.clamp_min(1e-12)).clamp_min(1e-12).log().abs().median().exp()
    return float(shift), float(ratio)


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
        if eps >= LARGE_EPS and variance < eps:
            yield confirmed(
                "normalization-error/eps",
                f"ε = {eps:g} is larger than the variance {variance:.2g} of what comes in: "
                f"it leaves with a standard deviation of {(variance / (variance + eps)) ** 0.5:.2g}, not 1",
                where=place_of(operation.module, operation.line),
                confidence="likely",
            )
            return


def variances(operation: Operation, value: Tensor) -> Tensor:
    if operation.name in LAYER_NORMS:
        dims = tuple(range(-len(operation.args[1]), 0))
        return value.var(dim=dims, unbiased=False)
    return value.transpose(0, 1).flatten(1).var(dim=1, unbiased=False)


def argument(operation: Operation, place: int | None) -> Any:
    return operation.args[place] if place is not None and place < len(operation.args) else None


# written by hand, over the batch ----------------------------------------------------------------------------

SPREADS = ("var", "std", "var_mean", "std_mean")


def of_ones_own_over_the_batch(evidence: Evidence) -> Iterator[Verdict]:
    """x less its mean over axis 0, scaled by parameters of the same module, which keeps no running statistics.

    With running statistics it would be a BatchNorm; without, what a sample becomes depends on its company,
    in evaluation, too, and a sample alone becomes zero.
    """
    trained = {slot.index for slot in evidence.tape.parameters}
    for operation in evidence.forward:
        maker = evidence.maker(operation.reads[1]) if is_difference(operation) else None
        if maker is None or maker.name != "mean" or maker.module != operation.module:
            continue
        shape = evidence.slot(operation.reads[0]).shape
        if maker.reads[0] != operation.reads[0] or not is_over_batch(maker) or len(shape) < 2:
            continue
        inside = [op for op in evidence.forward if op.module == operation.module]
        scaled = any(op.name in ("mul", "addcmul") and trained & set(op.reads) for op in inside)
        spread = any(op.name in SPREADS and is_over_batch(op) for op in inside)
        if scaled and spread and not keeps_statistics(evidence, operation.module):
            yield confirmed(
                "normalization-error/over-the-batch",
                f"mean and variance of {list(shape)} are taken over axis 0, the {shape[0]} samples: what one sample "
                "becomes depends on the others, and there are no running statistics for evaluation",
                where=place_of(operation.module, maker.line),
                confidence="likely",
            )
            return


def is_difference(operation: Operation) -> bool:
    return bool(operation.module) and operation.name == "sub" and len(operation.reads) == 2


def is_over_batch(operation: Operation) -> bool:
    return len(operation.args) > 1 and operation.args[1] in ([0], (0,))


def keeps_statistics(evidence: Evidence, path: str) -> bool:
    """Whether a module of that path has a buffer of numbers; unknown modules are given the benefit of the doubt."""
    for model in evidence.models.values():
        module: nn.Module | None = dict(model.named_modules()).get(path)
        if module is not None:
            return any(buffer.is_floating_point() for buffer in module.buffers())
    return True


# of one value -----------------------------------------------------------------------------------------------

FIXES = {
    "GroupNorm": "use fewer groups, so that each has several values (GroupNorm(num_groups=4, ...)), or normalise "
    "before pooling",
    "LayerNorm": "give LayerNorm the size of the features, or leave it out where there is one feature",
}
OWN_FIX = "take mean and variance over the features, an axis with more than one value"
MOST_NAMES = 3  # in one sentence: more of them say no more


def of_one_value(evidence: Evidence) -> Iterator[Verdict]:
    """A normalisation with one value for each mean and variance; a problem where something can only pass through it."""
    flow = evidence.flow
    for op in flow.operations:
        kind = single_value_norm(flow, op)
        if kind is None or not set(flow.makes(op)) & flow.tracked:
            continue
        shape = list(evidence.slot(flow.reads(op)[0]).shape)
        lines = [
            f"{kind} of {shape} takes each mean and variance of one value: what it puts out is a constant"
        ]
        cut = what_is_cut_off(flow, op)
        if cut:
            lines.append(
                f"{names(evidence, cut)} reach the loss through it only, and have no influence on it"
            )
        yield confirmed(
            "normalization-error/one-value",
            *lines,
            where=place_of(op.module, op.line),
            fix=FIXES.get(kind, OWN_FIX),
            if_troubled=not cut,
            confidence="proven",  # a value less itself
        )
        return


def single_value_norm(flow: Flow, op: Operation) -> str | None:
    """What an operation is called, if it normalises single values."""
    if op.name == "native_group_norm":
        channels, positions, groups = op.args[4:7]
        return "GroupNorm" if channels * positions == groups else None
    if op.name == "native_layer_norm":
        return "LayerNorm" if math.prod(op.args[1]) == 1 else None
    return "a normalisation" if op.name in ("div", "mul") and is_own_norm_of_one(flow, op) else None


def is_own_norm_of_one(flow: Flow, scaling: Operation) -> bool:
    """x - x.mean(axis), divided by or multiplied with something that is made of x; the axis has length one."""
    pair = [arg.slot for arg in scaling.args[:2] if isinstance(arg, Ref)]
    for difference, scale in (pair, pair[::-1]) if len(pair) == 2 else ():
        source = less_its_own_mean_of_one(flow, flow.maker(difference))
        if source is not None and source not in flow.weights and source in flow.ancestors(scale):
            return True
    return False


def less_its_own_mean_of_one(flow: Flow, op: Operation | None) -> int | None:
    """The tensor that has its mean over an axis of length one (not the batch) taken away, and is zero after that."""
    pair = (
        [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
        if op is not None and op.name == "sub"
        else []
    )
    mean = flow.maker(pair[1]) if len(pair) == 2 else None
    if mean is None or mean.name != "mean" or flow.reads(mean) != pair[:1] or len(mean.args) < 2:
        return None
    shape = flow.tape.slots[pair[0]].shape
    axes = [axis % len(shape) for axis in mean.args[1] or () if shape]
    single = axes and 0 not in axes and math.prod(shape[axis] for axis in axes) == 1
    return pair[0] if single else None


def what_is_cut_off(flow: Flow, norm: Operation) -> list[int]:
    """Trained matrices and inputs from which every way to the loss leads through one operation."""
    other_ways = set(flow.tape.loss_slots)
    for op in reversed(flow.forward):
        if op.index != norm.index and not other_ways.isdisjoint(flow.touches(op)):
            other_ways.update(flow.reads(op))
    before = set().union(*(flow.ancestors(slot) for slot in flow.reads(norm) if slot not in flow.weights))
    matrices = [slot.index for slot in flow.tape.parameters if len(slot.shape) >= 2]
    return [slot for slot in (*matrices, *flow.inputs) if slot in before and slot not in other_ways]


def names(evidence: Evidence, slots: list[int]) -> str:
    known = [evidence.slot(slot).name for slot in slots if evidence.slot(slot).kind == "parameter"]
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return ", ".join(known[:MOST_NAMES]) + more if known else "the inputs"
