"""Does the loss take a value for its logarithm, or a logarithm for the value? Rates, variances, determinants."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gradproof.experiments.losses.activation import OUTSIDE, RAW
from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Flow, place_of
from gradproof.instruments.volume import Stretch, find_stretches
from gradproof.instruments.weights import pull
from gradproof.tape.operations import Operation

FAMILY = "loss-activation-mismatch"
POSITIVE = ("softplus", "relu", "threshold", "exp", "abs", "sigmoid", "hardsigmoid", "softmax")
LIMITS = VIEWS | {"clamp", "clamp_min", "clamp_max"}
SUMS = ("add", "sub", "rsub")
SAFE = 1e-3  # what is added before a logarithm to keep it finite is less than that
AT_THE_FLOOR = 0.2  # a logarithm that cannot be negative and lies below this wants to be


def are_logarithms_where_they_are_wanted(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, of_rates_and_variances, of_determinants))


def of_rates_and_variances(evidence: Evidence) -> Iterator[Verdict]:
    """A positive number taken for a logarithm, and a rate that may be negative whose logarithm is taken."""
    flow = evidence.flow
    for op in flow.operations:
        look = {"exp": positive_as_logarithm, "log": logarithm_of_raw}.get(op.name)
        found = look(flow, op) if look is not None and not flow.tail.isdisjoint(op.makes[:1]) else None
        if found is not None:
            yield found
            return


def positive_as_logarithm(flow: Flow, exp: Operation) -> Verdict | None:
    """exp(x) - target * x, x + error² / exp(x): there x is a logarithm, and an activation has made it positive."""
    scaled = flow.maker(exp.reads[0])
    x = scaled.reads[0] if scaled is not None and is_scaling(scaled) else exp.reads[0]
    x = flow.behind(x, VIEWS)
    activation = positive_activation(flow, x)
    linear = side_by_side(flow, x, exp) if activation is not None else None
    values = flow.value(x) if linear is not None else None
    if activation is None or linear is None or values is None or not values.numel():
        return None
    name = activation.name.strip("_")
    product = flow.follow(linear, {"mul"})
    target = next((slot for slot in product.reads if slot not in flow.tracked), None) if product else None
    if target is None:
        bound = float(values.double().median()) < AT_THE_FLOOR
        return confirmed(
            f"{FAMILY}/positive-as-log",
            f"{name} makes the logarithm of a variance (median {float(values.median()):.3g}) positive: the loss takes "
            "its exponential, so that the variance cannot be less than 1",
            where=place_of(activation.module, activation.line),
            fix=f"remove the {name}, or take what it puts out for the variance itself, and its log() for the logarithm",
            level="problem" if bound else "warning",
            confidence="likely",
            lasting=False,
        )
    counts = flow.value(target)
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
    for maker in flow.chain(slot):
        number = maker.args[1] if len(maker.args) > 1 else None
        kept = is_scaling(maker, ("add", "mul", "div")) and isinstance(number, (int, float)) and number > 0
        if not kept and maker.name not in LIMITS:
            squared = maker.name == "pow" and number == 2
            return maker if squared or maker.name.strip("_") in POSITIVE else None
    return None


def is_scaling(op: Operation, names: tuple[str, ...] = ("mul", "div")) -> bool:
    """-x, 2 * x or x / 2."""
    return op.name == "neg" or (op.name in names and len(op.reads) == 1)


def side_by_side(flow: Flow, x: int, exp: Operation) -> int | None:
    """The linear side of the sum in which exp(x), scaled, and x, scaled or added to, meet."""
    size = math.prod(flow.tape.slots[x].shape)
    exponential, linear = set(exp.makes), {x}
    for op in flow.operations:
        reads, makes = flow.reads(op), flow.makes(op)
        if not makes or math.prod(flow.tape.slots[makes[0]].shape) != size or op.index == exp.index:
            continue
        grown, straight = exponential.intersection(reads), linear.intersection(reads)
        if op.name in SUMS and grown and straight:
            return min(straight)
        if op.name in VIEWS or op.name in ("mul", "div", "neg", "add", "sub"):
            exponential.update(makes if grown else ())
            product = op.name in ("mul", "div") and not flow.tracked.isdisjoint(set(reads) - linear)
            linear.update(makes if straight and not product else ())
    return None


def logarithm_of_raw(flow: Flow, log: Operation) -> Verdict | None:
    """x - target * log(x), with an x that a layer puts out as it is, and that is negative somewhere."""
    x = log.reads[0]
    added = flow.maker(x)
    if added is not None and added.name == "add" and len(added.reads) == 1 and abs(added.args[1]) <= SAFE:
        x = added.reads[0]
    if flow.follow(x, RAW) is None or not is_weighed_by_targets(flow, log, x):
        return None
    values = flow.value(x)
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
    products = [op for op in flow.readers(log.makes[0]) if op.name == "mul"]
    weighed = [op for op in products if not flow.tracked.issuperset(flow.reads(op))]
    sums = [op for product in weighed for op in flow.readers(product.makes[0])]
    return any(op.name in SUMS and x in flow.reads(op) for op in sums)


# determinants -----------------------------------------------------------------------------------------------

STRETCHES = 1e-3  # the logarithm of a determinant that is told from nothing


def of_determinants(evidence: Evidence) -> Iterator[Verdict]:
    """A density counts how much each layer stretches space: the more, the likelier the sample, the lower the loss."""
    right: list[float] = []
    for stretch in find_stretches(evidence):
        slope = pull(evidence, stretch.slot)
        way = float(slope.double().sum()) if slope is not None else 0.0
        if not way or float(stretch.measured.abs().median()) < STRETCHES:
            continue
        if stretch.sign and way * stretch.sign > 0:
            why = "the loss rises with it, as if it were that of the inverse"
        elif not stretch.sign and any(math.isclose(abs(way), abs(other), rel_tol=1e-3) for other in right):
            # one that is added up with others that are right, and as they are, means to be one
            why = "it is added up with those of other layers, which are right"
        else:
            right += [way] if stretch.sign else []
            continue
        yield verdict_on_stretch(evidence, stretch, why)
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
