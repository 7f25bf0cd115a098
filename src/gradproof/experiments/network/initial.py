"""Where does a training start? Units that are all the same, weights and scores too large, a loss far from guessing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Comparison, place_of, with_line
from gradproof.instruments.hearing import outcome
from gradproof.instruments.update import named_parameters
from gradproof.tape.operations import Ref
from gradproof.tape.replica import line_that_sets

PRODUCTS = ("mm", "conv", "linear", "matmul", "lstm", "gru", "rnn")  # in the names of matrix products
LARGE_GAIN = 4.0  # PyTorch's own layers begin at 0.6 to 1.4
# the middle of what a squasher gives, and how far it goes
LIMITS = {"tanh": (0.0, 1.0), "sigmoid": (0.5, 0.5)}
FULL = 0.99  # of the way from the middle to the limit: 2 % of its slope are left there
MOSTLY = 0.6  # of their values at the limit: hardly any gradient comes through
LARGE_LOSS = 3.0  # times the loss of guessing
ROUNDED = 1e-6  # of the largest entry: what sums in another order make of equal rows in float32
STEADY = 0.2  # of a weight's length: what a single step changes by more is not as it was started
LARGE_INPUTS = 10.0  # standardised ones have 1
EARLY = 3  # steps: later, a network is what training has made of it
YES_OR_NO = "binary_cross_entropy_with_logits"
GUESS = math.log(2)  # the loss of a score of 0, which says yes and no alike
FAR = 3.0  # the mean score, in logits: sure to 95 %
ONE_SIDED = 0.95  # of the scores that have the same sign
FEWEST = 16  # scores: of fewer, all may have one sign by chance
ALONE = 0.2  # of a loss: the run's differs by less from this term, which is nearly all of it


def where_does_it_start(evidence: Evidence) -> Iterator[Verdict]:
    """Weights, scores and loss of the first steps, against those of a network that knows nothing."""
    yield from causes_of(each(evidence, weights_too_large, loss_above_guessing, scores_on_one_side))


def are_units_all_the_same(evidence: Evidence) -> Iterator[Verdict]:
    """All rows of a weight equal, and all rows of its gradient too: they stay copies of one unit for ever.

    A last layer of zeros is fine: its rows are equal, their gradients are not.
    """
    matrices = {n: p for n, p in named_parameters(evidence).items() if p.dim() >= 2 and len(p) >= 2}
    known = [(name, p.detach(), p.grad.to_dense()) for name, p in matrices.items() if p.grad is not None]
    twins = [each for each in known if same_rows(each[1]) and same_rows(each[2])]
    if known and not twins:
        said = f"in each of {len(known)} matrices, units or their gradients differ"
        yield excluded("bad-init/symmetric", said)
    if not twins:
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
    return with_line(name.rpartition(".")[0] or name, evidence.facts.initialised.get(name, ""))


def same_rows(tensor: Tensor) -> bool:
    rows = tensor.reshape(tensor.shape[0], -1)
    size = float(rows.abs().max())
    return bool((rows - rows[:1]).abs().max() <= ROUNDED * size)


# weights ----------------------------------------------------------------------------------------------------


def weights_too_large(evidence: Evidence) -> Verdict | None:
    """Layers that multiply what they get by far more than one, when the first losses are far above those of a guess."""
    if evidence.step > 1:
        return None
    named, summed = weights_at_start(evidence), summed_over(evidence)
    gains = {name: gain for name, p in named.items() if (gain := gain_of(p, summed.get(name))) is not None}
    large = sorted((name for name, gain in gains.items() if gain >= LARGE_GAIN), key=lambda n: -gains[n])
    if not large or inputs_are_large(evidence):
        return None
    lines = [f"{name} multiplies what it gets by {gains[name]:.3g} (usual: 0.5 to 1.4)" for name in large[:3]]
    hurts = list(what_is_far(evidence))
    name, spread = large[0], float(named[large[0]].detach().std())
    return confirmed(
        "bad-init/too-large",
        *lines,
        *hurts,
        where=place_of_start(evidence, name),
        fix=f"initialise {name} with a standard deviation of about {spread / gains[name]:.2g}, not {spread:.2g}",
        if_troubled=not hurts,
        confidence="likely" if hurts else "possible",
    )


def what_is_far(evidence: Evidence) -> Iterator[str]:
    """That the first loss is far above guessing, and that squashers are full."""
    guess, first = loss_of_guessing(evidence), next(filter(math.isfinite, evidence.losses), math.nan)
    if guess is not None and first > LARGE_LOSS * guess:
        yield f"the first loss is {first:.3g}, that of guessing {guess:.3g}"
    full = saturated_share(evidence)
    if full >= MOSTLY:
        yield f"{100 * full:.0f} % of what the squashers behind them give is at its limit from the first step on"


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
    size = float(parameter.detach().square().mean().sqrt())
    return math.sqrt(fan_in) * size if fan_in >= 2 and len(parameter) >= 2 else None


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
            if value.numel() and float(value.abs().float().mean()) > LARGE_INPUTS:
                return True
    return False


# scores and loss --------------------------------------------------------------------------------------------


def loss_above_guessing(evidence: Evidence) -> Verdict | None:
    """A cross-entropy far above ln(classes) at the first steps: the scores start too large."""
    flow = evidence.flow
    for comparison in (c for c in flow.comparisons if c.kind == "class" and evidence.step <= EARLY):
        maker = flow.maker(flow.behind(comparison.prediction, VIEWS))
        scores = maker.reads[0] if maker is not None and maker.name == "_log_softmax" else None
        found = (
            outcome(flow, [scores, comparison.prediction, comparison.target]) if scores is not None else {}
        )
        if scores is None or len(found) < 3 or found[comparison.prediction].dim() != 2:
            continue
        log_probs, target = found[comparison.prediction].double(), found[comparison.target].reshape(-1)
        rows, classes = log_probs.shape
        valid = (target >= 0) & (target < classes)
        if not bool(valid.any()) or rows == classes:
            continue  # all pairs of a batch: sharp by its temperature
        loss = float(-log_probs[valid].gather(1, target[valid][:, None]).mean())
        guess, size = math.log(classes), float(found[scores].double().std())
        if is_far(evidence, loss, guess) and size > 2:
            last = flow.maker(flow.behind(scores, VIEWS))
            return confirmed(
                "bad-init/loss-at-start",
                f"at step {evidence.step} the loss is {loss:.3g}; guessing among {classes} classes loses {guess:.3g}. "
                f"The scores have a standard deviation of {size:.3g}",
                at=last,
                fix=f"make the last layer's weights {size:.2g} times smaller at the start",
                if_troubled=True,
                confidence="likely",
            )
    return None


def is_far(evidence: Evidence, loss: float, guess: float) -> bool:
    """From guessing, now and at the start: what was well at first is the first steps' doing."""
    began = evidence.losses[0] if evidence.losses else loss
    return min(loss, began) > 2 * guess + 1


def scores_on_one_side(evidence: Evidence) -> Verdict | None:
    """Before the first step nothing is known: no loss should be far above ln 2, with nearly all scores on one side."""
    compared = [c for c in evidence.flow.comparisons if c.operation.name == YES_OR_NO and evidence.step <= 1]
    for comparison in compared if compared and not inputs_are_large(evidence) else ():
        found = evidence.flow.values([comparison.prediction, comparison.target])
        scores, target = (found.get(slot) for slot in (comparison.prediction, comparison.target))
        if scores is not None and target is not None and scores.shape == target.shape:
            verdict = judge_scores(evidence, comparison, scores.double(), target.double())
            if verdict is not None:
                return verdict
    return None


def judge_scores(
    evidence: Evidence, comparison: Comparison, scores: Tensor, target: Tensor
) -> Verdict | None:
    loss = float(F.binary_cross_entropy_with_logits(scores, target))
    mean, spread = float(scores.mean()), float(scores.std())
    same = float((scores.sign() == math.copysign(1, mean)).double().mean())
    far = is_far(evidence, loss, GUESS) and abs(mean) > FAR
    if scores.numel() < FEWEST or not far or same <= ONE_SIDED:
        return None
    lines = [
        f"at step {evidence.step} the scores are {mean:.3g} ± {spread:.2g}, {100 * same:.0f} % of one sign, and lose "
        f"{loss:.3g}; {100 * float(target.mean()):.0f} % of the targets are 1, and guessing loses at most {GUESS:.2g}"
    ]
    last, weight = evidence.flow.maker(comparison.prediction), largest_weight(evidence, comparison)
    where = place_of(last.module, last.line) if last is not None else None
    if weight is not None:
        name, value = weight
        lines.append(f"{name} starts at {float(value.mean()):.3g} ± {float(value.std()):.2g}")
        where = place_of_parameter(evidence, name) or where
    began = evidence.losses[0] if evidence.losses else loss
    return confirmed(
        "bad-init/scores-one-sided",
        *lines,
        where=where,
        fix="start with scores near zero: weights drawn around zero (torch.randn(...) * 0.1), not torch.rand",
        if_troubled=True,
        confidence="likely",
        numbers={"guess": GUESS} if abs(began - loss) < ALONE * loss else {},
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
    """The line of a script's own module that makes a parameter, `self.user = nn.Parameter(...)`, or its layer."""
    path, _, own = name.rpartition(".")
    above, _, layer = path.rpartition(".")
    for owner, attribute in ((path, own), (above, layer)):
        module = evidence.modules.get(owner)
        line = line_that_sets(type(module), attribute) if module is not None and attribute else ""
        if line:
            return with_line(name, line)
    return None
