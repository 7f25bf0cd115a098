"""Is the loss right for the output? The last activation and the range of what goes into the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.losses.logarithms import NEARLY_ALL, OUTSIDE, RAW, SUMS_TO_ONE
from gradproof.experiments.verdict import Verdict, confirmed, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import ALIASES, VIEWS, Comparison, Flow, place_of
from gradproof.tape.operations import Operation

FAMILY = "loss-activation-mismatch"
# what an activation can put out, in place or not; a target beyond it can never be met
RANGES = {
    "relu": (0.0, math.inf), "threshold": (0.0, math.inf), "softplus": (0.0, math.inf), "abs": (0.0, math.inf),
    "sigmoid": (0.0, 1.0), "_softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "hardtanh": (-1.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
}  # fmt: skip
ALL_SUM_TO_ONE = 1e-3  # how far off: what float16 leaves; scores do not all come so near to it by chance
LOW_ENOUGH = 0.1  # a loss that can fall to this can give the right class 90 %: that may do


def does_the_output_fit_the_loss(evidence: Evidence) -> Iterator[Verdict]:
    """Softmax or sigmoid applied twice, a log left out, an end of a regression that cannot reach its targets."""
    flow = evidence.flow
    found = False
    for comparison in flow.comparisons:
        judge = {"class": of_classes, "binary": of_yes_or_no, "value": of_values}[comparison.kind]
        for verdict in judge(flow, comparison):
            found = True
            yield verdict
    for verdict in of_picked(flow):
        found = True
        yield verdict
    if flow.comparisons and not found:
        names = sorted({_name(c.operation) for c in flow.comparisons})
        yield excluded(FAMILY, f"what goes into {', '.join(names)} has the range that it wants")


def of_classes(flow: Flow, comparison: Comparison) -> Iterator[Verdict]:
    """nll_loss wants log-probabilities; cross_entropy (a log_softmax in front of it) wants raw scores."""
    log_probs = flow.behind(comparison.prediction, VIEWS)
    maker = flow.maker(log_probs)
    if maker is not None and maker.name == "_log_softmax":
        yield from of_scores(flow, maker, comparison)
        return
    values = flow.values([comparison.prediction]).get(comparison.prediction)
    if values is None or values.shape[1] < 2 or not bool(torch.isfinite(values).any()):
        return
    rows = values.double()
    total = rows.exp().sum(1)
    if bool(((total - 1).abs() < SUMS_TO_ONE).float().mean() > NEARLY_ALL):
        return  # the logarithm of probabilities, however it was made
    where = place_of("", comparison.operation.line)
    name = maker.name if maker is not None else ""
    if _are_probabilities(rows, 1):
        line = "nll_loss is given probabilities (each row sums to 1), it wants their logarithms"
        fix = "use log_softmax in place of softmax, or cross_entropy on the raw scores"
        yield confirmed(
            f"{FAMILY}/missing-log",
            line,
            where=where,
            fix=fix,
            confidence="proven" if name == "_softmax" else "likely",  # what softmax made, or what looks so
        )
        return
    line = (
        f"nll_loss wants log-probabilities, whose exponentials sum to 1 in each row; here they sum to "
        f"{float(total.median()):.3g} (median), with values from {float(rows.min()):.3g} to {float(rows.max()):.3g}: "
        "the loss has no lower bound"
    )
    fix = "use cross_entropy, or put log_softmax before nll_loss"
    yield confirmed(
        f"{FAMILY}/nll-of-raw-scores",
        line,
        where=where,
        fix=fix,
        confidence="proven" if name in RAW else "likely",  # what a layer made, or what looks so
    )


def of_scores(flow: Flow, log_softmax: Operation, comparison: Comparison) -> Iterator[Verdict]:
    scores = log_softmax.reads[0]
    dim = log_softmax.args[1] % max(1, len(flow.tape.slots[scores].shape))
    last = _last_activation(flow, scores, log_softmax)
    values = flow.values([scores]).get(scores)
    if values is None or values.dim() == 0 or values.shape[dim] < 2:
        return
    made = last is not None and last.name == "_softmax"
    whole = _are_probabilities(values, dim)  # a softmax over another axis makes rows of any sum
    if made or whole:
        count = values.shape[dim]
        least = math.log(1 + (count - 1) / math.e)
        span = f"{float(values.min()):.3g} to {float(values.max()):.3g}" + (
            ", each row sums to 1" if whole else ""
        )
        line = (
            f"the scores given to cross_entropy are probabilities already ({span}): softmax is applied twice, and the "
            f"loss cannot fall below {least:.3g} for {count} classes"
        )
        place = _place(last, comparison)
        yield confirmed(
            f"{FAMILY}/softmax-twice",
            line,
            where=place,
            fix="give cross_entropy the raw scores: remove the softmax",
            confidence="proven" if made else "likely",  # what softmax made, or what looks so
        )
    elif last is not None and math.isfinite(_range(last)[1]):
        low, high = _range(last)
        count = values.shape[dim]
        least = math.log(1 + (count - 1) * math.exp(low - high))
        line = (
            f"{_plain(last)} keeps the scores between {low:g} and {high:g}: "
            f"the loss cannot fall below {least:.3g} for {count} classes"
        )
        yield confirmed(
            f"{FAMILY}/bounded-scores",
            line,
            where=_place(last, comparison),
            fix=f"give cross_entropy the raw scores: remove the {_plain(last)}",
            if_troubled=least < LOW_ENOUGH,
            confidence="proven" if least >= LOW_ENOUGH else "likely",
        )
    elif last is not None and _plain(last) in ("relu", "threshold"):
        yield of_cut_scores(flow, last, values.movedim(dim, -1), comparison)


def of_cut_scores(flow: Flow, last: Operation, values: Tensor, comparison: Comparison) -> Verdict:
    """A ReLU before the softmax: a class whose scores are all cut off gets no gradient, though it is a target."""
    zero = float((values == 0).float().mean())
    line = f"a ReLU cuts the scores: {100 * zero:.0f} % of them are exactly 0 and get no gradient"
    targets = flow.values([comparison.target]).get(comparison.target)
    rows = values.reshape(-1, values.shape[-1])
    wanted = torch.zeros(rows.shape[1], dtype=torch.bool)
    if targets is not None and not targets.is_floating_point():
        wanted[targets[(targets >= 0) & (targets < len(wanted))].long().cpu()] = True
    dead = ((rows == 0).all(0).cpu() & wanted).nonzero().flatten().tolist()
    if not dead:
        return confirmed(
            f"{FAMILY}/relu-before-cross-entropy",
            line,
            where=_place(last, comparison),
            if_troubled=True,
            confidence="likely",
            lasting=False,
        )
    theirs = int(torch.isin(targets.cpu(), torch.tensor(dead)).sum())  # type: ignore[union-attr]
    named = ", ".join(map(str, dead[:5])) + (", …" if len(dead) > 5 else "")
    more = (
        f"{len(dead)} of {len(wanted)} classes ({named}) have the score 0 for every one of the {len(rows)} samples, "
        f"the {theirs} that are theirs included: nothing pulls them up"
    )
    return confirmed(
        f"{FAMILY}/relu-before-cross-entropy",
        line,
        more,
        where=_place(last, comparison),
        confidence="proven",  # the gradient of what a ReLU has cut off is 0
        lasting=False,
    )


def of_picked(flow: Flow) -> Iterator[Verdict]:
    """The probability of the right class, averaged as it is: its gradient dies where the network is most wrong."""
    readers: dict[int, Operation] = {slot: op for op in flow.operations for slot in op.reads}
    for pick in flow.picks:
        source = flow.maker(flow.behind(pick.reads[0], VIEWS))
        if source is None or source.name != "_softmax":
            continue
        op = readers.get(pick.makes[0])
        while op is not None and (op.name in VIEWS or op.name in ("neg", "mean", "sum", "rsub")):
            if op.makes[0] in flow.tape.loss_slots:
                yield confirmed(
                    f"{FAMILY}/missing-log",
                    "the loss is the probability of the right class itself, not its logarithm",
                    where=place_of("", pick.line),
                    fix="use log_softmax in place of softmax, or cross_entropy on the raw scores",
                    if_troubled=True,
                    confidence="likely",
                    lasting=False,
                )
                return
            op = readers.get(op.makes[0])


def of_yes_or_no(flow: Flow, comparison: Comparison) -> Iterator[Verdict]:
    last = _last_activation(flow, comparison.prediction, comparison.operation)
    name = _plain(last) if last is not None else ""
    if name == "_softmax" and last is not None:
        size = flow.tape.slots[last.makes[0]].shape[last.args[1]]
        if size == 1:
            line = "softmax over a single output is 1 for every input: nothing can be learned"
            yield confirmed(
                f"{FAMILY}/softmax-of-one", line, where=_place(last, comparison), confidence="proven"
            )
            return
    if comparison.operation.name != "binary_cross_entropy_with_logits":
        return
    if name in ("sigmoid", "hardsigmoid", "_softmax"):
        line = (
            f"binary_cross_entropy_with_logits applies a sigmoid itself; {name.strip('_')} before it leaves "
            "probabilities between 0.5 and 0.73, whatever the scores"
        )
        fix = f"remove the {name.strip('_')}, or use binary_cross_entropy"
        yield confirmed(
            f"{FAMILY}/sigmoid-twice",
            line,
            where=_place(last, comparison),
            fix=fix,
            confidence="proven",  # two operations, one behind the other
        )
    elif last is not None and name in RANGES:
        yield from of_limited_scores(flow, last, comparison)


def of_limited_scores(flow: Flow, last: Operation, comparison: Comparison) -> Iterator[Verdict]:
    """Scores that cannot be low enough for a no, or large enough for either: the best that each target can get."""
    low, high = _range(last)
    targets = flow.values([comparison.target]).get(comparison.target)
    if targets is None or not targets.numel() or bool((targets < 0).any()) or bool((targets > 1).any()):
        return
    yes = float(targets.double().mean())
    least = yes * math.log1p(math.exp(-high)) + (1 - yes) * math.log1p(math.exp(low))
    if least < OUTSIDE:
        return
    name = _plain(last).strip("_")
    bounds = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at {low:g} or above"
    line = (
        f"{name} keeps the scores {bounds}, their probabilities "
        f"{'above' if math.isinf(high) else 'from'} {1 / (1 + math.exp(-low)):.2g}"
        f"{'' if math.isinf(high) else f' to {1 / (1 + math.exp(-high)):.2g}'}: with {100 * yes:.0f} % of the targets "
        f"being 1, the loss cannot fall below {least:.3g}"
    )
    fix = f"give binary_cross_entropy_with_logits the raw scores: remove the {name}"
    yield confirmed(
        f"{FAMILY}/bounded-scores",
        line,
        where=_place(last, comparison),
        fix=fix,
        confidence="proven",  # by the range of the operation
    )


def of_values(flow: Flow, comparison: Comparison) -> Iterator[Verdict]:
    last = _last_activation(flow, comparison.prediction, comparison.operation)
    if last is None:
        return
    low, high = _range(last)
    if last.name == "_softmax" and flow.tape.slots[last.makes[0]].shape[last.args[1]] > 1:
        return  # a distribution against a distribution
    targets = flow.values([comparison.target]).get(comparison.target)
    if targets is None or not targets.is_floating_point() or not targets.numel():
        return
    slack = 1e-3 * float(targets.abs().max())  # what float16 leaves
    outside = float(((targets < low - slack) | (targets > high + slack)).float().mean())
    if not outside > OUTSIDE:
        return
    bounds = f"{low:g} to {high:g}" if math.isfinite(high) else f"no less than {low:g}"
    name = last.name.strip("_")
    line = (
        f"{name} can put out {bounds}, but {100 * outside:.0f} % of the targets lie outside "
        f"({float(targets.min()):.3g} to {float(targets.max()):.3g})"
    )
    fix = f"remove the {name} at the end, or bring the targets into its range"
    yield confirmed(
        f"{FAMILY}/{name}-at-the-end",
        line,
        where=_place(last, comparison),
        fix=fix,
        confidence="proven",  # by the range of the operation
    )


def _last_activation(flow: Flow, slot: int, reader: Operation) -> Operation | None:
    """The operation whose result is read, in place or not, seen through views."""
    last = flow.last_write(slot, reader)
    while last is not None and last.name in VIEWS and last.reads:
        last = flow.last_write(last.reads[0], last if last.name not in ALIASES else reader)
    return last if last is not None and _plain(last) in RANGES else None


def _range(op: Operation) -> tuple[float, float]:
    """What it can put out; a hardtanh is given its own limits, as in ReLU6."""
    given = [float(arg) for arg in op.args[1:3] if isinstance(arg, int | float)]
    return (given[0], given[1]) if _plain(op) == "hardtanh" and len(given) == 2 else RANGES[_plain(op)]


def _plain(op: Operation) -> str:
    """Its name, in place or not."""
    return op.name.rstrip("_")


def _are_probabilities(values: Tensor, dim: int) -> bool:
    rows = values.double()
    sums = rows.sum(dim)
    many = sums.numel() >= 4 and values.shape[dim] >= 2
    return many and bool((rows >= 0).all()) and bool(((sums - 1).abs() < ALL_SUM_TO_ONE).all())


def _place(last: Operation | None, comparison: Comparison) -> str | None:
    op = last if last is not None else comparison.operation
    return place_of(op.module, op.line)


def _name(op: Operation) -> str:
    return {"nll_loss_forward": "the cross-entropy", "nll_loss2d_forward": "the cross-entropy"}.get(
        op.name, op.name
    )
