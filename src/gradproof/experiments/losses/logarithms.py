"""Does the loss take a value for its logarithm, or a logarithm for the value? Counts, variances, distributions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, VIEWS, Flow, place_of
from gradproof.instruments.volume import Stretch, find_stretches
from gradproof.instruments.weights import pull
from gradproof.tape.operations import Operation, Ref

FAMILY = "loss-activation-mismatch"
POSITIVE = ("softplus", "relu", "threshold", "exp", "abs", "sigmoid", "hardsigmoid", "_softmax")
RAW = ("addmm", "mm", "bmm", "matmul", "linear", "convolution", "baddbmm")
SAFE = 1e-3  # what is added before a logarithm to keep it finite is less than that
AT_THE_FLOOR = 0.2  # a logarithm that cannot be negative and lies below this wants to be
SUMS_TO_ONE = 0.02  # how far off a row may be: half precision leaves less of a sum of probabilities
NEARLY_ALL = 0.9  # of the rows: what is padded or masked may hold anything
OUTSIDE = 0.05  # share of targets beyond the range that is more than a few outliers


def are_logarithms_where_they_are_wanted(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, of_the_loss, of_determinants))


def of_the_loss(evidence: Evidence) -> Iterator[Verdict]:
    """A rate taken as its logarithm, an unbounded rate whose logarithm is taken, distributions not given as logs."""
    flow = evidence.flow
    for op in flow.operations:
        if not op.makes or op.makes[0] not in flow.tail:
            continue
        look = {
            "exp": positive_as_logarithm, "log": logarithm_of_raw, "sub": of_divergence, "_ctc_loss": of_paths,
            "_log_softmax": softmax_twice, "sigmoid": sigmoid_twice, "log_sigmoid_forward": sigmoid_twice,
        }.get(op.name)  # fmt: skip
        found = look(flow, op) if look is not None else None
        if found is not None:
            yield found
            return


# -- rates and variances ------------------------------------------------------------------------------------------


def positive_as_logarithm(flow: Flow, exp: Operation) -> Verdict | None:
    """exp(x) - target * x, x + error² / exp(x): there x is a logarithm, and an activation has made it positive."""
    x = flow.behind(_scaled(flow, exp.reads[0]), VIEWS)
    activation = positive_activation(flow, x)
    if activation is None:
        return None
    pair = combined(flow, x, exp)
    values = flow.values([x]).get(x)
    if pair is None or values is None or not values.numel():
        return None
    name = activation.name.strip("_")
    target = _counts(flow, pair)
    if target is None:
        line = f"{name} makes the logarithm of a variance (median {float(values.median()):.3g}) positive: "
        bound = float(values.double().median()) < AT_THE_FLOOR
        return confirmed(
            f"{FAMILY}/positive-as-log",
            line + "the loss takes its exponential, so that the variance cannot be less than 1",
            where=place_of(activation.module, activation.line),
            fix=f"remove the {name}, or take what it puts out for the variance itself, and its log() for the logarithm",
            level="problem" if bound else "warning",
            confidence="likely",
            lasting=False,
        )
    counts = flow.values([target]).get(target)
    below = float((counts < 1).double().mean()) if counts is not None else 0.0
    mean = f"; the targets' mean is {float(counts.double().mean()):.3g}" if counts is not None else ""
    return confirmed(
        f"{FAMILY}/rate-as-log-rate",
        f"the loss exp(x) - target * x takes x for the logarithm of a rate, but {name} has made it a positive number "
        f"({float(values.min()):.3g} to {float(values.max()):.3g}): the rate cannot be less than 1{mean}, "
        f"{100 * below:.0f} % of them are less than 1",
        where=place_of(exp.module, exp.line),
        fix=f"PoissonNLLLoss(log_input=False) for the rate that {name} puts out; or remove the {name}, and take exp() "
        "of the output for the rate",
        confidence="proven" if name == "exp" or below > OUTSIDE else "likely",
    )


def positive_activation(flow: Flow, slot: int) -> Operation | None:
    """The activation that keeps a value above zero, seen through a small number added and a limit."""
    maker = flow.maker(slot)
    while maker is not None and _keeps_positive(maker):
        maker = flow.maker(maker.args[0].slot)
    if maker is None:
        return None
    squared = maker.name == "pow" and maker.args[1] == 2
    return maker if squared or maker.name.rstrip("_") in POSITIVE else None


def _keeps_positive(op: Operation) -> bool:
    if not op.args or not isinstance(op.args[0], Ref):
        return False
    number = op.args[1] if len(op.args) > 1 else None
    moved = op.name in ("add", "mul", "div") and isinstance(number, (int, float)) and number > 0
    return moved or op.name in ("clamp", "clamp_min", "clamp_max", *VIEWS)


def _scaled(flow: Flow, slot: int) -> int:
    """What -x, 2 * x or x / 2 is made of."""
    maker = flow.maker(slot)
    scaled = maker is not None and (
        maker.name == "neg" or (maker.name in ("mul", "div") and len(maker.reads) == 1)
    )
    return maker.reads[0] if maker is not None and scaled else slot


def combined(flow: Flow, x: int, exp: Operation) -> tuple[int, int] | None:
    """(exponential's side, linear side) of the sum in which exp(x), scaled, and x, scaled or added to, meet."""
    size = math.prod(flow.tape.slots[x].shape)
    exponential, linear = set(exp.makes), {x}
    for op in flow.operations:
        reads, makes = flow.reads(op), flow.makes(op)
        if not makes or math.prod(flow.tape.slots[makes[0]].shape) != size or op.index == exp.index:
            continue
        grown, straight = exponential.intersection(reads), linear.intersection(reads)
        if op.name in ("add", "sub", "rsub") and grown and straight:
            return min(grown), min(straight)
        if op.name in VIEWS or op.name in ("mul", "div", "neg", "add", "sub"):
            exponential.update(makes if grown else ())
            others = [slot for slot in reads if slot not in linear]
            product = op.name in ("mul", "div") and any(slot in flow.tracked for slot in others)
            linear.update(makes if straight and not product else ())
    return None


def _counts(flow: Flow, pair: tuple[int, int]) -> int | None:
    """The targets that a logarithm is multiplied with; None where it stands alone, as that of a variance does."""
    maker = flow.maker(flow.behind(pair[1], VIEWS))
    if maker is None or maker.name != "mul" or len(maker.reads) != 2:
        return None
    return next((slot for slot in maker.reads if slot not in flow.tracked), None)


def logarithm_of_raw(flow: Flow, log: Operation) -> Verdict | None:
    """x - target * log(x), with an x that a layer puts out as it is, and that is negative somewhere."""
    slot = log.reads[0]
    maker = flow.maker(slot)
    if maker is not None and maker.name == "add" and len(maker.reads) == 1 and abs(maker.args[1]) <= SAFE:
        slot = maker.reads[0]
    layer = flow.maker(flow.behind(slot, VIEWS))
    if layer is None or layer.name not in RAW:
        return None
    if not is_weighed_by_targets(flow, log, slot):
        return None
    values = flow.values([slot]).get(slot)
    bad = float((~(values > 0)).double().mean()) if values is not None else 0.0  # NaN, too
    if not bad:
        return None
    return confirmed(
        f"{FAMILY}/raw-rate",
        f"the loss x - target * log(x) wants a rate above zero, but x is what a layer puts out as it is: "
        f"{100 * bad:.3g} % of the values are not above zero, and have no logarithm",
        where=place_of(log.module, log.line),
        confidence="proven",  # what a layer made goes into the logarithm
    )


def is_weighed_by_targets(flow: Flow, log: Operation, x: int) -> bool:
    """Whether a logarithm is multiplied with data, and the product put together with what it is the logarithm of."""
    products = [
        op.makes[0]
        for op in flow.operations
        if op.name == "mul" and log.makes[0] in flow.reads(op) and not flow.tracked.issuperset(flow.reads(op))
    ]
    return any(
        op.name in ("sub", "add", "rsub")
        and x in flow.reads(op)
        and not set(products).isdisjoint(flow.reads(op))
        for op in flow.operations
    )


# -- distributions ------------------------------------------------------------------------------------------------


def of_divergence(flow: Flow, difference: Operation) -> Verdict | None:
    """kl_div is target * log(target) - target * x: where the target sums to one, exp(x) must."""
    pair = [arg.slot for arg in difference.args[:2] if isinstance(arg, Ref)]
    own, product = (flow.maker(slot) for slot in pair) if len(pair) == 2 else (None, None)
    if own is None or product is None or own.name != "xlogy" or product.name != "mul":
        return None
    target = own.reads[0]
    x = next((slot for slot in product.reads if slot in flow.tail), None)
    if x is None or target not in product.reads:
        return None
    found = flow.values([x, target])
    if len(found) < 2 or found[x].shape != found[target].shape:
        return None
    axes = [axis for axis in range(found[target].dim()) if sums_to_one(found[target], axis)]
    if not axes or any(sums_to_one(found[x].double().exp(), axis) for axis in axes):
        return None
    return judge_log_probabilities(flow, x, found[x], axes[-1], "kl_div", difference)


def of_paths(flow: Flow, loss: Operation) -> Verdict | None:
    """ctc_loss wants log-probabilities over the last axis."""
    values = flow.values(loss.reads[:1]).get(loss.reads[0])
    if values is None:
        return None
    return judge_log_probabilities(flow, loss.reads[0], values, values.dim() - 1, "ctc_loss", loss)


def judge_log_probabilities(
    flow: Flow, slot: int, x: Tensor, axis: int, name: str, op: Operation
) -> Verdict | None:
    rows = x.double()
    maker = flow.maker(flow.behind(slot, VIEWS))
    made_by = maker.name if maker is not None else ""
    if x.shape[axis] < 2 or not bool(rows.isfinite().any()) or sums_to_one(rows.exp(), axis):
        return None
    where, fix = place_of("", op.line), f"give {name} log_softmax(scores, dim) of the raw scores"
    if sums_to_one(rows, axis):
        line = f"{name} is given probabilities (each row sums to 1), it wants their logarithms"
        return confirmed(
            f"{FAMILY}/missing-log",
            line,
            where=where,
            fix=fix,
            confidence="proven" if made_by == "_softmax" else "likely",  # what softmax made, or what looks so
        )
    total = float(rows.exp().sum(axis).median())
    softmax = flow.maker(flow.behind(slot, RESHAPES))
    if softmax is not None and softmax.name == "_log_softmax":
        shape = list(flow.tape.slots[softmax.makes[0]].shape)
        return confirmed(
            "axis-or-shape-error/softmax-axis",
            f"the log_softmax runs over axis {softmax.args[1]} of {shape}, and {name} takes {x.shape[axis]} classes "
            f"along another: their probabilities sum to {total:.3g} (median), not to 1",
            where=place_of(softmax.module, softmax.line),
            fix="take the log_softmax along the axis of the classes, as a rule dim=-1",
            confidence="proven",  # they were summed
        )
    line = (
        f"{name} wants log-probabilities, whose exponentials sum to 1 in each row; here they sum to {total:.3g} "
        f"(median), with values from {float(rows.min()):.3g} to {float(rows.max()):.3g}"
    )
    return confirmed(
        f"{FAMILY}/raw-scores",
        line,
        where=where,
        fix=fix,
        confidence="proven" if made_by in RAW else "likely",  # what a layer made, or what looks so
    )


def sums_to_one(values: Tensor, axis: int) -> bool:
    """Whether (nearly) all rows along an axis are distributions."""
    rows = values.double()
    sums = rows.sum(axis)
    near = ((sums - 1).abs() < SUMS_TO_ONE).double().mean() > NEARLY_ALL
    return values.shape[axis] >= 2 and sums.numel() >= 2 and bool((rows >= 0).all()) and bool(near)


def softmax_twice(flow: Flow, log_softmax: Operation) -> Verdict | None:
    """A log_softmax of a softmax, whatever kind of target it meets."""
    first = flow.maker(flow.behind(log_softmax.reads[0], VIEWS))
    if first is None or first.name != "_softmax":
        return None
    shape = flow.tape.slots[log_softmax.reads[0]].shape
    count = shape[log_softmax.args[1]] if shape else 1
    if count < 2:
        return None
    least = math.log(1 + (count - 1) / math.e)
    return confirmed(
        f"{FAMILY}/softmax-twice",
        f"log_softmax is given probabilities, not scores: softmax is applied twice, and no probability can be above "
        f"{math.exp(-least):.3g} of {count} classes",
        where=place_of(first.module, first.line),
        fix="give the loss the raw scores: remove the softmax",
        confidence="proven",  # two operations, one behind the other
    )


def sigmoid_twice(flow: Flow, second: Operation) -> Verdict | None:
    """A sigmoid of probabilities, in a loss that is written by hand."""
    first = flow.maker(flow.behind(second.reads[0], VIEWS))
    if first is None or first.name not in ("sigmoid", "_softmax"):
        return None
    word = first.name.strip("_")
    return confirmed(
        f"{FAMILY}/sigmoid-twice",
        f"a sigmoid is taken of probabilities, which {word} has made: what comes of it lies between 0.5 and 0.731, "
        "whatever the network says",
        where=place_of(first.module, first.line),
        fix=f"take the sigmoid once: remove the {word} in the network, or that in the loss",
        confidence="proven",  # two operations, one behind the other
    )


# -- determinants -------------------------------------------------------------------------------------------------

STRETCHES = 1e-3  # the logarithm of a determinant that is told from nothing


def of_determinants(evidence: Evidence) -> Iterator[Verdict]:
    """A density counts how much each layer stretches space: the more, the likelier the sample, the lower the loss."""
    right = []
    for stretch in find_stretches(evidence):
        slope = pull(evidence, stretch.slot)
        if (
            slope is None
            or not float(slope.double().sum())
            or float(stretch.measured.abs().median()) < STRETCHES
        ):
            continue
        way = float(slope.double().sum())
        if stretch.sign and way * stretch.sign > 0:
            yield verdict_on_stretch(
                evidence, stretch, "the loss rises with it, as if it were that of the inverse"
            )
            return
        right += [way] if stretch.sign else []
        # one that is added up with others that are right, and as they are, means to be one
        if not stretch.sign and any(math.isclose(abs(way), abs(other), rel_tol=1e-3) for other in right):
            yield verdict_on_stretch(
                evidence, stretch, "it is added up with those of other layers, which are right"
            )
            return


def verdict_on_stretch(evidence: Evidence, stretch: Stretch, why: str) -> Verdict:
    said, measured = (float(values[0]) for values in (stretch.said, stretch.measured))
    maker = evidence.maker(stretch.slot)
    return confirmed(
        "loss-scale-or-sign/log-determinant",
        f"{stretch.call.kind} returns {said:.4g} for the first sample; the logarithm of its Jacobian's determinant, "
        f"measured, is {measured:.4g}",
        why,
        where=place_of(stretch.call.path, maker.line if maker is not None else None),
        fix="a loss of -log p(x) takes away log|det J| of every layer from x to the noise, for each sample",
        confidence="proven",  # the samples were moved
    )
