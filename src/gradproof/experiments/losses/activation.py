"""Does the loss get what it wants: scores, probabilities, their logarithms, or numbers that can reach the targets?

Of each loss the last operation of the network is looked at, through views, and the values that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, RESHAPES, VIEWS, Comparison, Flow, place_of
from gradproof.instruments.walk import ahead
from gradproof.tape.operations import Operation, Ref

FAMILY = "loss-activation-mismatch"
# what an activation can put out, in place or not; a target beyond it can never be met
RANGES = {
    "relu": (0.0, math.inf), "threshold": (0.0, math.inf), "softplus": (0.0, math.inf), "abs": (0.0, math.inf),
    "sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
}  # fmt: skip
RAW = ("addmm", "mm", "bmm", "matmul", "linear", "convolution", "baddbmm")
AVERAGED = VIEWS | {"neg", "mean", "sum", "rsub"}
SIGMOIDS = ("sigmoid", "log_sigmoid_forward")
SUMS_TO_ONE = 0.02  # how far off a row may be: half precision leaves less of a sum of probabilities
NEARLY_ALL = 0.9  # of the rows: what is padded or masked may hold anything
ALL_SUM_TO_ONE = 1e-3  # how far off: what float16 leaves; scores do not all come so near to it by chance
OUTSIDE = 0.05  # share of targets beyond the range that is more than a few outliers
LOW_ENOUGH = 0.1  # a loss that can fall to this can give the right class 90 %: that may do


def does_the_output_fit_the_loss(evidence: Evidence) -> Iterator[Verdict]:
    """Softmax or sigmoid applied twice, a log left out, an end of a regression that cannot reach its targets."""
    found = each(evidence, of_comparisons, of_picked, of_divergence, of_paths, twice)
    yield from causes_of(found)
    if evidence.flow.comparisons and not found:
        names = {c.operation.name for c in evidence.flow.comparisons}
        said = ", ".join(
            sorted("the cross-entropy" if name.startswith("nll_loss") else name for name in names)
        )
        yield excluded(FAMILY, f"what goes into {said} has the range that it wants")


def mismatch(
    what: str, said: str, where: str | None, fix: str = "", sure: bool = True, **also: Any
) -> Verdict:
    """Sure is what operations show, one behind the other, or the range of one; what numbers look like is likely."""
    return confirmed(
        f"{FAMILY}/{what}", said, where=where, fix=fix, confidence="proven" if sure else "likely", **also
    )


def at(op: Operation) -> str | None:
    return place_of(op.module, op.line)


def of_comparisons(evidence: Evidence) -> Iterator[Verdict]:
    looks = {"class": of_classes, "binary": of_yes_or_no, "value": of_values}
    for comparison in evidence.flow.comparisons:
        yield from looks[comparison.kind](evidence.flow, comparison)


def last_activation(flow: Flow, slot: int, reader: Operation) -> tuple[Operation | None, str]:
    """The operation whose result a reader finds, in place or not, seen through views, if it is an activation."""
    last = flow.last_write(slot, reader)
    while last is not None and last.name in VIEWS and last.reads:
        last = flow.last_write(last.reads[0], last if last.name not in ALIASES else reader)
    name = last.name.strip("_") if last is not None else ""
    return (last, name) if name in RANGES else (None, "")


def range_of(op: Operation, name: str) -> tuple[float, float]:
    """What it can put out; a hardtanh is given its own limits, as in ReLU6."""
    given = [float(arg) for arg in op.args[1:3] if isinstance(arg, (int, float))]
    return (given[0], given[1]) if name == "hardtanh" and len(given) == 2 else RANGES[name]


# scores -----------------------------------------------------------------------------------------------------


def of_classes(flow: Flow, comparison: Comparison) -> Iterator[Verdict]:
    """nll_loss wants log-probabilities; cross_entropy (a log_softmax in front of it) wants raw scores."""
    log_softmax = flow.follow(comparison.prediction, {"_log_softmax"})
    if log_softmax is not None:
        yield from of_scores(flow, log_softmax, comparison)
        return
    value = flow.value(comparison.prediction)
    if value is not None:
        found = of_log_probabilities(flow, comparison.prediction, value, 1, "nll_loss", comparison.operation)
        yield from (found,) if found is not None else ()


def of_scores(flow: Flow, log_softmax: Operation, comparison: Comparison) -> Iterator[Verdict]:
    values = flow.value(log_softmax.reads[0])
    axis = log_softmax.args[1]
    if values is None or values.dim() == 0 or values.shape[axis] < 2:
        return
    last, name = last_activation(flow, log_softmax.reads[0], log_softmax)
    where = at(last or comparison.operation)
    count = values.shape[axis]
    whole = are_probabilities(values, axis)  # a softmax over another axis makes rows of any sum
    if name == "softmax" or whole:
        span = (
            f"{float(values.min()):.3g} to {float(values.max()):.3g}{', each row sums to 1' if whole else ''}"
        )
        said = f"the scores given to cross_entropy are probabilities already ({span}): softmax is applied twice, and "
        said += f"the loss cannot fall below {least_of(count):.3g} for {count} classes"
        fix = "give cross_entropy the raw scores: remove the softmax"
        yield mismatch("softmax-twice", said, where, fix, sure=name == "softmax")
    elif last is not None and math.isfinite(range_of(last, name)[1]):
        low, high = range_of(last, name)
        least = least_of(count, high - low)
        said = f"{name} keeps the scores between {low:g} and {high:g}: "
        said += f"the loss cannot fall below {least:.3g} for {count} classes"
        fix, may_do = f"give cross_entropy the raw scores: remove the {name}", least < LOW_ENOUGH
        yield mismatch("bounded-scores", said, where, fix, sure=not may_do, if_troubled=may_do)
    elif name in ("relu", "threshold"):
        yield of_cut_scores(flow, values.movedim(axis, -1), comparison, where)


def of_cut_scores(flow: Flow, values: Tensor, comparison: Comparison, where: str | None) -> Verdict:
    """A ReLU before the softmax: a class whose scores are all cut off gets no gradient, though it is a target."""
    what, rows = "relu-before-cross-entropy", values.reshape(-1, values.shape[-1])
    zero = 100 * float((values == 0).float().mean())
    said = f"a ReLU cuts the scores: {zero:.0f} % of them are exactly 0 and get no gradient"
    targets = flow.value(comparison.target)
    classes = range(rows.shape[1])
    wanted = [] if targets is None or targets.is_floating_point() else targets.flatten().tolist()
    dead = [c for c in sorted({*wanted} & {*classes}) if not bool(rows[:, c].any())]
    if not dead:
        return mismatch(what, said, where, sure=False, if_troubled=True, lasting=False)
    named = ", ".join(map(str, dead[:5])) + (", …" if len(dead) > 5 else "")
    said += f"; {len(dead)} of {len(classes)} classes ({named}) have the score 0 for every one of the {len(rows)} "
    said += (
        f"samples, the {sum(wanted.count(c) for c in dead)} that are theirs included: nothing pulls them up"
    )
    return mismatch(what, said, where, lasting=False)  # the gradient of what a ReLU has cut off is 0


def least_of(count: int, apart: float = 1.0) -> float:
    """The least cross-entropy of scores that are at most so far apart."""
    return math.log(1 + (count - 1) * math.exp(-apart))


def of_yes_or_no(flow: Flow, comparison: Comparison) -> Iterator[Verdict]:
    last, name = last_activation(flow, comparison.prediction, comparison.operation)
    if last is None:
        return
    if name == "softmax" and flow.tape.slots[last.makes[0]].shape[last.args[1]] == 1:
        said = "softmax over a single output is 1 for every input: nothing can be learned"
        yield mismatch("softmax-of-one", said, at(last))
    elif comparison.operation.name != "binary_cross_entropy_with_logits":
        return
    elif name in ("sigmoid", "hardsigmoid", "softmax"):
        said = f"binary_cross_entropy_with_logits applies a sigmoid itself; {name} before it leaves probabilities "
        said += "between 0.5 and 0.73, whatever the scores"
        yield mismatch("sigmoid-twice", said, at(last), f"remove the {name}, or use binary_cross_entropy")
    else:
        yield from of_limited_scores(flow, last, name, comparison)


def of_limited_scores(flow: Flow, last: Operation, name: str, comparison: Comparison) -> Iterator[Verdict]:
    """Scores that cannot be low enough for a no, or large enough for either: the best that each target can get."""
    targets = flow.value(comparison.target)
    if targets is None or not targets.numel() or bool((targets < 0).any()) or bool((targets > 1).any()):
        return
    low, high = range_of(last, name)
    yes = float(targets.double().mean())
    least = yes * math.log1p(math.exp(-high)) + (1 - yes) * math.log1p(math.exp(low))
    if least < OUTSIDE:
        return
    above = 1 / (1 + math.exp(-low))
    kept = f"at {low:g} or above, their probabilities above {above:.2g}"
    if math.isfinite(high):
        kept = f"between {low:g} and {high:g}, their probabilities from {above:.2g} to {1 / (1 + math.exp(-high)):.2g}"
    said = f"{name} keeps the scores {kept}: with {100 * yes:.0f} % of the targets being 1, the loss cannot fall below "
    fix = f"give binary_cross_entropy_with_logits the raw scores: remove the {name}"
    yield mismatch("bounded-scores", f"{said}{least:.3g}", at(last), fix)


def of_values(flow: Flow, comparison: Comparison) -> Iterator[Verdict]:
    last, name = last_activation(flow, comparison.prediction, comparison.operation)
    if last is None or (name == "softmax" and flow.tape.slots[last.makes[0]].shape[last.args[1]] > 1):
        return  # a distribution against a distribution
    targets = flow.value(comparison.target)
    if targets is None or not targets.is_floating_point() or not targets.numel():
        return
    low, high = range_of(last, name)
    slack = 1e-3 * float(targets.abs().max())  # what float16 leaves
    outside = float(((targets < low - slack) | (targets > high + slack)).float().mean())
    if outside > OUTSIDE:
        bounds = f"{low:g} to {high:g}" if math.isfinite(high) else f"no less than {low:g}"
        said = f"{name} can put out {bounds}, but {100 * outside:.0f} % of the targets lie outside "
        said += f"({float(targets.min()):.3g} to {float(targets.max()):.3g})"
        fix = f"remove the {name} at the end, or bring the targets into its range"
        yield mismatch(f"{name}-at-the-end", said, at(last), fix)


def twice(evidence: Evidence) -> Iterator[Verdict]:
    """A softmax or a sigmoid of probabilities, whatever kind of target they meet, in a loss by hand, too."""
    flow = evidence.flow
    for op in flow.operations:
        if op.name not in (*SIGMOIDS, "_log_softmax") or flow.tail.isdisjoint(op.makes[:1]):
            continue
        first = flow.follow(
            op.reads[0], {"_softmax"} if op.name == "_log_softmax" else {"sigmoid", "_softmax"}
        )
        if first is None:
            continue
        word, shape = first.name.strip("_"), evidence.slot(op.reads[0]).shape
        if op.name in SIGMOIDS:
            said = f"a sigmoid is taken of probabilities, which {word} has made: what comes of it lies between 0.5 and "
            fix = f"take the sigmoid once: remove the {word} in the network, or that in the loss"
            yield mismatch("sigmoid-twice", f"{said}0.731, whatever the network says", at(first), fix)
        elif shape and (count := shape[op.args[1]]) >= 2:
            said = "log_softmax is given probabilities, not scores: softmax is applied twice, and no probability can "
            said += f"be above {math.exp(-least_of(count)):.3g} of {count} classes"
            fix = "give the loss the raw scores: remove the softmax"
            yield mismatch("softmax-twice", said, at(first), fix)


# log-probabilities ------------------------------------------------------------------------------------------


def of_divergence(evidence: Evidence) -> Iterator[Verdict]:
    """kl_div is target * log(target) - target * x: where the target sums to one, exp(x) must."""
    flow = evidence.flow
    for op in flow.operations:
        pair = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)] if op.name == "sub" else []
        own, product = (flow.maker(slot) for slot in pair) if len(pair) == 2 else (None, None)
        if own is None or product is None or own.name != "xlogy" or product.name != "mul":
            continue
        target, x = own.reads[0], next((slot for slot in product.reads if slot in flow.tail), None)
        found = flow.values([x, target]) if x is not None and target in product.reads else {}
        if x is None or len(found) < 2 or found[x].shape != found[target].shape:
            continue
        axes = [axis for axis in range(found[x].dim()) if sums_to_one(found[target], axis)]
        if axes and not any(near_one(found[x].double().exp().sum(axis)) for axis in axes):
            said = of_log_probabilities(flow, x, found[x], axes[-1], "kl_div", op)
            yield from (said,) if said is not None else ()


def of_paths(evidence: Evidence) -> Iterator[Verdict]:
    """ctc_loss wants log-probabilities over the last axis."""
    flow = evidence.flow
    for op in flow.operations:
        value = flow.value(op.reads[0]) if op.name == "_ctc_loss" else None
        if value is not None:
            said = of_log_probabilities(flow, op.reads[0], value, value.dim() - 1, "ctc_loss", op)
            yield from (said,) if said is not None else ()


def of_log_probabilities(
    flow: Flow, slot: int, x: Tensor, axis: int, name: str, op: Operation
) -> Verdict | None:
    """What goes into a loss that wants logarithms of what sums to one, however they were made."""
    rows = x.double()
    sums = rows.exp().sum(axis)
    if x.shape[axis] < 2 or not bool(rows.isfinite().any()) or near_one(sums):
        return None
    maker = flow.maker(flow.behind(slot, VIEWS))
    made_by, where = maker.name if maker is not None else "", place_of("", op.line)
    of_classes = name == "nll_loss"
    fix = f"give {name} log_softmax(scores, dim) of the raw scores{', or use cross_entropy' if of_classes else ''}"
    if sums_to_one(rows, axis):
        said = f"{name} is given probabilities (each row sums to 1), it wants their logarithms"
        return mismatch("missing-log", said, where, fix, sure=made_by == "_softmax")
    total = float(sums.median())
    softmax = flow.follow(slot, {"_log_softmax"}, through=RESHAPES)
    if softmax is not None:
        shape = list(flow.tape.slots[softmax.makes[0]].shape)
        return confirmed(
            "axis-or-shape-error/softmax-axis",
            f"the log_softmax runs over axis {softmax.args[1]} of {shape}, and {name} takes {x.shape[axis]} classes "
            f"along another: their probabilities sum to {total:.3g} (median), not to 1",
            where=at(softmax),
            fix="take the log_softmax along the axis of the classes, as a rule dim=-1",
            confidence="proven",  # they were summed
        )
    said = f"{name} wants log-probabilities, whose exponentials sum to 1 in each row; here they sum to {total:.3g} "
    said += f"(median), with values from {float(rows.min()):.3g} to {float(rows.max()):.3g}"
    said += ": the loss has no lower bound" if of_classes else ""
    what = "nll-of-raw-scores" if of_classes else "raw-scores"
    return mismatch(what, said, where, fix, sure=made_by in RAW)


def of_picked(evidence: Evidence) -> Iterator[Verdict]:
    """The probability of the right class, averaged as it is: its gradient dies where the network is most wrong."""
    flow = evidence.flow
    for pick in flow.picks:
        if flow.follow(pick.reads[0], {"_softmax"}) is None:
            continue
        ends = [
            pick,
            *(op for op in ahead(flow, pick.makes, AVERAGED, flow.operations) if op.name in AVERAGED),
        ]
        if any(not set(flow.makes(op)).isdisjoint(flow.tape.loss_slots) for op in ends):
            said = "the loss is the probability of the right class itself, not its logarithm"
            fix = "use log_softmax in place of softmax, or cross_entropy on the raw scores"
            where = place_of("", pick.line)
            yield mismatch("missing-log", said, where, fix, sure=False, if_troubled=True, lasting=False)


def are_probabilities(values: Tensor, axis: int) -> bool:
    """All rows, to the last digit of float16: of scores, which may come near it."""
    sums = values.double().sum(axis)
    many = sums.numel() >= 4 and values.shape[axis] >= 2
    return many and bool((values >= 0).all()) and bool(((sums - 1).abs() < ALL_SUM_TO_ONE).all())


def sums_to_one(values: Tensor, axis: int) -> bool:
    """Whether (nearly) all rows along an axis are distributions."""
    sums = values.double().sum(axis)
    return values.shape[axis] >= 2 and sums.numel() >= 2 and bool((values >= 0).all()) and near_one(sums)


def near_one(sums: Tensor) -> bool:
    return bool(((sums - 1).abs() < SUMS_TO_ONE).double().mean() > NEARLY_ALL)
