"""Where does a training start? Units that are all the same, weights and scores too large, a loss far from guessing."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, place_of
from gradproof.instruments.hearing import outcome
from gradproof.instruments.update import named_parameters
from gradproof.tape.operations import Ref


def where_does_it_start(evidence: Evidence) -> Iterator[Verdict]:
    """Weights, waves, scores and loss of the first steps, against those of a network that knows nothing."""
    yield from causes_of(each(evidence, weights_too_large, loss_above_guessing, scores_on_one_side))


PRODUCTS = ("mm", "conv", "linear", "matmul", "lstm", "gru", "rnn")  # in the names of matrix products
LARGE_GAIN = 4.0  # PyTorch's own layers begin at 0.6 to 1.4
WIDE = 12.0  # of what a sine is taken of, as a standard deviation: four half waves
# the middle of what a squasher gives, and how far it goes
LIMITS = {"tanh": (0.0, 1.0), "sigmoid": (0.5, 0.5)}
FULL = 0.99  # of the way from the middle to the limit: 2 % of its slope are left there
MOSTLY = 0.6  # of their values at the limit: hardly any gradient comes through
LARGE_LOSS = 3.0  # times the loss of guessing
ROUNDED = 1e-6  # of the largest entry: what sums in another order make of equal rows in float32
STEADY = 0.2  # of a weight's length: what a single step changes by more is not as it was started


def are_units_all_the_same(evidence: Evidence) -> Iterator[Verdict]:
    """All rows of a weight equal, and all rows of its gradient too: they stay copies of one unit for ever.

    A last layer of zeros is fine: its rows are equal, their gradients are not.
    """
    twins, looked = [], 0
    for name, parameter in named_parameters(evidence).items():
        gradient = parameter.grad
        if parameter.dim() < 2 or parameter.shape[0] < 2 or gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        looked += 1
        if same_rows(parameter.detach()) and same_rows(gradient):
            twins.append((name, parameter.detach(), gradient))
    if not twins:
        if looked:
            said = f"in each of {looked} matrices, units or their gradients differ"
            yield excluded("bad-init/symmetric", said)
        return
    name, weight, gradient = twins[0]
    value = "zero" if not bool(weight.any()) else f"{float(weight.flatten()[0]):.3g}"
    what = "have no gradient" if not bool(gradient.any()) else "get the same gradient"
    yield confirmed(
        "bad-init/symmetric",
        f"the {weight.shape[0]} units of {name} are equal (first entry {value}) and {what}: they can never differ",
        *([f"so are those of {', '.join(n for n, _, _ in twins[1:4])}"] if len(twins) > 1 else []),
        where=place_of_start(evidence, name),
        fix=f"initialise {name} at random, for example nn.init.xavier_uniform_; zeros only in a last layer",
        confidence="proven",  # equal rows with equal gradients stay equal
    )


def place_of_start(evidence: Evidence, name: str) -> str:
    """The module of a parameter, and the line of the script that gave it its first values, where one did."""
    line = evidence.facts.initialised.get(name)
    module = name.rpartition(".")[0] or name
    return f"{module} ({line})" if line else module


def same_rows(tensor: Tensor) -> bool:
    rows = tensor.reshape(tensor.shape[0], -1)
    size = float(rows.abs().max())
    return bool((rows - rows[:1]).abs().max() <= ROUNDED * size)


def weights_too_large(evidence: Evidence) -> Iterator[Verdict]:
    """Layers that multiply what they get by far more than one, when the first losses are far above those of a guess."""
    if evidence.step > 1:
        return
    wide = sines_too_wide(evidence)
    if wide is not None:
        yield wide
        return
    guess = loss_of_guessing(evidence)
    first = next((loss for loss in evidence.losses if math.isfinite(loss)), math.nan)
    named, summed = weights_at_start(evidence), summed_over(evidence)
    gains = {name: gain for name, p in named.items() if (gain := gain_of(p, summed.get(name))) is not None}
    large = sorted((name for name, gain in gains.items() if gain >= LARGE_GAIN), key=lambda n: -gains[n])
    if not large or inputs_are_large(evidence):
        return
    far = guess is not None and first > LARGE_LOSS * guess
    lines = [f"{name} multiplies what it gets by {gains[name]:.3g} (usual: 0.5 to 1.4)" for name in large[:3]]
    if far:
        lines.append(f"the first loss is {first:.3g}, that of guessing {guess:.3g}")
    full = saturated_share(evidence)
    if full >= MOSTLY:
        lines.append(
            f"{100 * full:.0f} % of what the squashers behind them give is at its limit from the first step on"
        )
    far = far or full >= MOSTLY
    name = large[0]
    weight = named[name]
    std = float(weight.detach().std()) / gains[name]
    yield confirmed(
        "bad-init/too-large",
        *lines,
        where=place_of_start(evidence, name),
        fix=f"initialise {name} with a standard deviation of about {std:.2g}, not {float(weight.detach().std()):.2g}",
        if_troubled=not far,
        confidence="likely" if far else "possible",
    )


def saturated_share(evidence: Evidence) -> float:
    """Of all that hidden tanhs and sigmoids give, how much lies at their limits: 0 at a usual start."""
    flow = evidence.flow
    inner = flow.body & flow.tracked
    squashers = [op for op in flow.operations if op.name in LIMITS and op.makes and op.makes[0] in inner]
    ends = [(LIMITS[op.name], op.makes[0]) for op in squashers]
    values = flow.values([slot for _, slot in ends])
    full = [((values[s].double() - middle).abs() > FULL * half) for (middle, half), s in ends if s in values]
    count = sum(part.numel() for part in full)
    return sum(float(part.sum()) for part in full) / count if count else 0.0


def sines_too_wide(evidence: Evidence) -> Verdict | None:
    """Behind the first layer, sines of numbers that span many periods: neighbours have nothing in common any more."""
    flow = evidence.flow
    waves = [
        op for op in flow.operations if op.name in ("sin", "cos") and op.reads and op.reads[0] in flow.tracked
    ]
    for op in waves:
        behind = flow.ancestors(op.reads[0])
        if sum(not behind.isdisjoint(layer.makes) for layer in flow.layers) < 2:
            continue
        value = flow.values([op.reads[0]]).get(op.reads[0])
        size = float(value.double().square().mean().sqrt()) if value is not None else 0.0
        if size > WIDE:
            return confirmed(
                "bad-init/sines-too-wide",
                f"what goes into {op.name} has the size {size:.3g} at the start, {size / math.pi:.0f} half waves",
                where=place_of(op.module, op.line),
                fix=f"start the weights of the layer before it {size:.2g} times smaller (a SIREN: sqrt(6 / n) / omega)",
                if_troubled=True,
                confidence="likely",
            )
    return None


def weights_at_start(evidence: Evidence) -> dict[str, Tensor]:
    """The weights before the taped step, less those that a single step changes much: they tell of the step."""
    factors, known = multiplied(evidence), set(named_parameters(evidence))
    found = {}
    for slot in evidence.tape.parameters:
        value, change = evidence.tape.leaf_value(slot.index), evidence.updates.get(slot.index)
        steady = change is None or float(change.double().norm()) < STEADY * float(value.double().norm())
        if slot.name in known and slot.index in factors and steady:
            found[slot.name] = value
    return found


def gain_of(parameter: Tensor, summed: int | None = None) -> float | None:
    """The root of fan-in times mean square: by how much a layer stretches independent inputs."""
    if parameter.dim() < 2 or not parameter.is_floating_point() or parameter.is_sparse:
        return None
    fan_in = summed or parameter[0].numel()
    if fan_in < 2 or parameter.shape[0] < 2:
        return None
    return math.sqrt(fan_in) * float(parameter.detach().square().mean().sqrt())


def summed_over(evidence: Evidence) -> dict[str, int]:
    """How many products a matrix product adds up for one output, by the name of its weight: an ensemble's weight
    (members, in, out) sums over `in`, as x @ weight does."""
    found = {}
    for op in evidence.forward:
        pair = [arg.slot for arg in op.args if isinstance(arg, Ref)][-2:]
        if op.name not in ("mm", "addmm", "bmm", "baddbmm") or len(pair) != 2:
            continue
        inner = evidence.slot(pair[0]).shape[-1]
        found.update({evidence.slot(evidence.flow.behind(slot, VIEWS)).name: inner for slot in pair})
    return found


def multiplied(evidence: Evidence) -> set[int]:
    """Parameters that something is multiplied with; not tables whose rows are picked or added."""
    products = [op for op in evidence.forward if any(word in op.name for word in PRODUCTS)]
    return {evidence.flow.behind(slot, VIEWS) for op in products for slot in op.reads}


def loss_of_guessing(evidence: Evidence) -> float | None:
    """ln of the number of classes, where the loss is a cross-entropy."""
    for operation in evidence.forward:
        if operation.name in ("nll_loss_forward", "nll_loss2d_forward", "_log_softmax"):
            shape = evidence.slot(operation.reads[0]).shape
            classes = shape[1] if len(shape) > 1 else shape[0]
            return math.log(classes) if classes > 1 else None
    return None


def inputs_are_large(evidence: Evidence) -> bool:
    kept = evidence.tape.memory_of  # of a large data set, only the batch is on the tape
    for slot in evidence.roles.inputs:
        known = slot.index in kept and not slot.is_sparse
        if slot.dtype.is_floating_point and slot.shape and known:
            value = evidence.tape.leaf_value(slot.index)
            if value.numel() and float(value.abs().float().mean()) > 10:  # standardised ones have 1
                return True
    return False


# the loss ---------------------------------------------------------------------------------------------------

EARLY = 3  # steps: later, a network is what training has made of it


def loss_above_guessing(evidence: Evidence) -> Iterator[Verdict]:
    """A cross-entropy far above ln(classes) at the first steps: the scores start too large."""
    if evidence.step > EARLY:
        return
    flow = evidence.flow
    for comparison in flow.comparisons:
        maker = flow.maker(flow.behind(comparison.prediction, VIEWS))
        if comparison.kind != "class" or maker is None or maker.name != "_log_softmax":
            continue
        scores = maker.reads[0]
        found = outcome(flow, [scores, comparison.prediction, comparison.target])
        if len(found) < 3 or found[comparison.prediction].dim() != 2:
            continue
        log_probs, target = found[comparison.prediction].double(), found[comparison.target].reshape(-1)
        valid = (target >= 0) & (target < log_probs.shape[1])
        if not bool(valid.any()) or log_probs.shape[0] == log_probs.shape[1]:
            continue  # all pairs of a batch: sharp by its temperature
        loss = float(-log_probs[valid].gather(1, target[valid][:, None]).mean())
        guess, size = math.log(log_probs.shape[1]), float(found[scores].double().std())
        began = evidence.losses[0] if evidence.step > 0 and evidence.losses else loss
        if began <= 2 * guess + 1:
            return  # it was well at the start: what came after is the first steps' doing
        if loss > 2 * guess + 1 and size > 2:
            last = flow.maker(flow.behind(scores, VIEWS))
            yield confirmed(
                "bad-init/loss-at-start",
                f"at step {evidence.step} the loss is {loss:.3g}; guessing among {log_probs.shape[1]} classes loses "
                f"{guess:.3g}. The scores have a standard deviation of {size:.3g}",
                where=place_of(last.module, last.line) if last is not None else None,
                fix=f"make the last layer's weights {size:.2g} times smaller at the start",
                if_troubled=True,
                confidence="likely",
            )
            return


# yes-or-no scores -------------------------------------------------------------------------------------------

GUESS = math.log(2)  # the loss of a score of 0, which says yes and no alike
FAR = 3.0  # the mean score, in logits: sure to 95 %
ONE_SIDED = 0.95  # of the scores that have the same sign
FEWEST = 16  # scores: of fewer, all may have one sign by chance


def scores_on_one_side(evidence: Evidence) -> Iterator[Verdict]:
    """Before the first step nothing is known: no loss should be far above ln 2, with nearly all scores on one side."""
    name = "binary_cross_entropy_with_logits"
    compared = [c for c in evidence.flow.comparisons if c.operation.name == name]
    if evidence.step > 1 or not compared or inputs_are_large(evidence):
        return
    for comparison in compared:
        found = evidence.flow.values([comparison.prediction, comparison.target])
        if len(found) < 2:
            continue
        scores, target = found[comparison.prediction].double(), found[comparison.target].double()
        verdict = judge_scores(evidence, comparison, scores, target) if scores.shape == target.shape else None
        if verdict is not None:
            yield verdict
            return


def judge_scores(
    evidence: Evidence, comparison: Comparison, scores: Tensor, target: Tensor
) -> Verdict | None:
    if scores.numel() < FEWEST:
        return None
    loss = float(F.binary_cross_entropy_with_logits(scores, target))
    mean, spread = float(scores.mean()), float(scores.std())
    same = float((scores.sign() == math.copysign(1, mean)).double().mean())
    began = evidence.losses[0] if evidence.losses else loss
    if not (loss > 2 * GUESS + 1 and abs(mean) > FAR and same > ONE_SIDED and began > 2 * GUESS + 1):
        return None
    weight = largest_weight(evidence, comparison)
    last = evidence.flow.maker(comparison.prediction)
    lines = [
        f"at step {evidence.step} the scores are {mean:.3g} ± {spread:.2g}, {100 * same:.0f} % of one sign, and lose "
        f"{loss:.3g}; {100 * float(target.mean()):.0f} % of the targets are 1, and guessing loses at most {GUESS:.2g}"
    ]
    fix = "start with scores near zero: weights drawn around zero (torch.randn(...) * 0.1), not torch.rand"
    where = place_of(last.module, last.line) if last is not None else None
    if weight is not None:
        name, value = weight
        lines.append(f"{name} starts at {float(value.mean()):.3g} ± {float(value.std()):.2g}")
        where = place_of_parameter(evidence, name) or where
    alone = abs(began - loss) < 0.2 * loss  # the loss is little more than this term
    return confirmed(
        "bad-init/scores-one-sided",
        *lines,
        where=where,
        fix=fix,
        if_troubled=True,
        confidence="likely",
        numbers={"guess": GUESS} if alone else {},
    )


def largest_weight(evidence: Evidence, comparison: Comparison) -> tuple[str, Tensor] | None:
    """The weights behind the scores that are furthest from having a mean of zero."""
    behind = evidence.flow.ancestors(comparison.prediction)
    found = []
    for slot in evidence.tape.parameters:
        if slot.index in behind and slot.dtype.is_floating_point and slot.name:
            value = evidence.tape.leaf_value(slot.index).double()
            width = math.sqrt(slot.shape[-1]) if len(slot.shape) > 1 else 1.0
            found.append((abs(float(value.mean())) * width, slot.name, value))
    best = max(found, key=lambda entry: entry[0], default=None)
    return (best[1], best[2]) if best is not None and best[2].numel() > 1 and best[0] > 0.5 else None


def place_of_parameter(evidence: Evidence, name: str) -> str | None:
    """The line of a script's own module that makes a parameter: `self.user = nn.Parameter(...)`."""
    files = dict.fromkeys(op.line.file for op in evidence.forward if op.line is not None)
    module, _, own = name.rpartition(".")
    for attribute in filter(None, (own, module.rpartition(".")[2])):
        made = re.compile(rf"\bself\.{re.escape(attribute)}\s*(?::[^=]+)?=(?!=)")
        for file in files:
            for number, text in enumerate(linecache.getlines(file), 1):
                if made.search(text):
                    return f"{name} ({file.rsplit('/', 1)[-1]}:{number})"
    return None
