"""Is the loss the right way up, and are its terms weighed alike? Its gradient, its sum taken apart."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed, excluded
from gradproof.experiments.flow import KINDS, VIEWS, Comparison, Flow
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.owners import named_parameters
from gradproof.experiments.provenance import lines_of_names
from gradproof.experiments.targets import sources
from gradproof.tape.operations import Line, Operation, Ref
from gradproof.tape.replay import differentiate

FAMILY = "loss-scale-or-sign"
OPPOSITE = -0.99  # cosine of the gradient and the direction away from the target


def is_the_loss_the_right_way_up(evidence: Evidence) -> Iterator[Verdict]:
    """Going down the gradient must bring predictions nearer to their targets, and likely actions after good returns."""
    flow = evidence.flow
    policies = policy_terms(flow)
    if policies:  # what such a loss does over the steps says nothing about how well the policy does
        evidence.memory.setdefault("facts", {})["policy_loss"] = True
    picks = [op for op in flow.picks if _is_log_probability(flow, op.makes[0])]
    slots = [c.prediction for c in flow.comparisons] + [made for made, _, _ in policies]
    slots += [op.makes[0] for op in picks]
    if not slots:
        return
    gradients = differentiate(evidence.tape, gradients_at=slots).slot_gradients
    climbs = climbing(evidence, slots)
    averaged = {index for root in evidence.tape.loss_slots for index in plain_differences(flow, root)}
    cosines = {}
    for comparison in flow.comparisons:
        gradient = gradients.get(comparison.prediction)
        plain = comparison.operation.name in KINDS or comparison.operation.index in averaged
        up = -1.0 if comparison.prediction in climbs else 1.0
        cosine = towards_target(flow, comparison, up * gradient) if gradient is not None and plain else None
        if cosine is not None:
            cosines[cosine] = comparison
    if cosines and min(cosines) < OPPOSITE:
        against = max(cosines) > 0.5  # beside a loss that is minimised: an adversary's may be meant so
        worst = cosines[min(cosines)]
        found = wrong_way(worst.operation, "prediction from its target", min(cosines), against)
        yield maximized(found, climbs, worst.prediction)
        return
    for op in picks:
        gradient = gradients.get(op.makes[0])
        # what a policy did is no right class: it comes one at a time, is drawn, or is weighed by what it brought
        if gradient is None or gradient.numel() < 2 or policies or is_drawn(flow, op):
            continue
        up = -1.0 if op.makes[0] in climbs else 1.0
        if float((up * gradient).min()) > 0.999 * float(gradient.abs().max()) > 0:
            found = wrong_way(op, "log-probability away from the right class", -1.0, False)
            yield maximized(found, climbs, op.makes[0])
            return
    for made, weight, op in policies:
        weights = flow.values([weight]).get(weight)
        gradient = gradients.get(made)
        up = -1.0 if made in climbs else 1.0
        cosine = _cosine(up * gradient, weights) if gradient is not None and weights is not None else None
        wanted = is_it_wanted(op.line)
        if cosine is not None and cosine > 0.9 and wanted is not False:
            found = confirmed(
                f"{FAMILY}/policy-sign",
                "the gradient lowers the log-probability of what was done in proportion to the weight it is given "
                f"(cosine {cosine:.3f}): after a good return the action becomes less likely",
                where=place_of("", op.line),
                fix="minimise the negative: loss = -(log_prob * advantage).mean()",
                level="problem" if wanted else "warning",
                confidence="likely" if wanted else "possible",
                lasting=True,
            )
            yield maximized(found, climbs, made)
            return
    if cosines and min(cosines) > 0.5:
        yield excluded(
            f"{FAMILY}/sign",
            f"down the gradient, predictions go to their targets (cosine {min(cosines):.2f})",
        )


def climbing(evidence: Evidence, slots: list[int]) -> dict[int, str]:
    """Of some slots, those that nothing but optimizers with maximize=True learns, and where those were made."""
    groups = [(o, g) for o in evidence.optimizers for g in o.param_groups]
    if not any(group.get("maximize") for _, group in groups):
        return {}
    made: dict[int, str] = evidence.memory.get("facts", {}).get("_optimizers_made", {})
    owner = {id(p): (o, bool(g.get("maximize"))) for o, g in groups for p in g["params"]}
    named = named_parameters(evidence)
    slots_of = {s.index: id(named[s.name]) for s in evidence.tape.parameters if s.name in named}
    found = {}
    for slot in slots:
        behind = [slots_of[s] for s in evidence.flow.ancestors(slot) if s in slots_of]
        owners = [owner[p] for p in behind if p in owner]
        if owners and all(climbs for _, climbs in owners):
            found[slot] = next((line for o, _ in owners if (line := made.get(id(o), ""))), "")
    return found


def maximized(found: Verdict, climbs: dict[int, str], slot: int) -> Verdict:
    """Where the optimizer climbs a loss that is to be minimised, as its sign says, the slip is the optimizer's."""
    if slot not in climbs:
        return found
    return replace(
        found,
        family="optimizer-config",
        id="optimizer-config/maximize",
        evidence=(
            f"maximize=True climbs a loss ({found.where}) whose own sign says that it is to be minimised",
            found.evidence[0]
            .replace("down the gradient", "up the gradient")
            .replace("the gradient lowers", "a step up the gradient lowers")
            .replace(": the loss is minimised with a minus sign", ""),
        ),
        where=climbs[slot] or found.where,
        fix="remove maximize=True, or keep it and remove the minus sign of the loss: one of them, not both",
    )


GOOD = re.compile(r"rew|return|(\b|_)rets?\b|score|gain|payoff|utility", re.I)
BAD = re.compile(r"cost|penalt|regret|tour|length|distance|energy|delay", re.I)


def is_it_wanted(line: Line | None) -> bool | None:
    """Whether the numbers that weigh a policy's choices are something to gain or to avoid, by what the script calls
    them: costs may well be minimised. The nearest line with a word for it counts; None where there is none."""
    seen = ""
    for number in lines_of_names(line) if line is not None else ():
        text = re.sub(r"\w*loss\w*|^\s*return\b", "", linecache.getline(line.file, number) if line else "")
        seen += text
        for part in (text, text.partition("=")[0]):  # `reward = -distance` is a reward
            good, bad = GOOD.search(part) is not None, BAD.search(part) is not None
            if good != bad:
                return good
    return True if re.search(r"\badv", seen) else None  # an advantage is better than expected


def is_drawn(flow: Flow, pick: Operation) -> bool:
    """Whether what is picked was drawn in this step from probabilities; labels may be drawn from nothing."""
    drawn = (index for slot in pick.reads[1:] for index in sources(flow, slot)[1])
    return any(flow.tape.operations[index].name == "multinomial" for index in drawn)


def plain_differences(flow: Flow, root: int) -> Iterator[int]:
    """Differences whose squares or sizes are averaged as they are; a likelihood weighed by returns is none."""
    for term in take_apart(flow, root):
        maker = flow.maker(flow.behind(term.operation.reads[0], VIEWS))
        while maker is not None and maker.name in ("pow", "abs", "square", "neg", "mul", "sum", "mean"):
            if len(set(maker.reads)) > 1:
                break
            maker = flow.maker(flow.behind(maker.reads[0], VIEWS))
        if maker is not None:
            yield maker.index


def wrong_way(op: Operation, what: str, cosine: float, against_another: bool) -> Verdict:
    return confirmed(
        f"{FAMILY}/sign",
        f"a step down the gradient takes each {what} (cosine {cosine:.3f} with the way to it): "
        "the loss is minimised with a minus sign",
        where=place_of("", op.line),
        fix="remove the minus sign in front of the loss, or pass maximize=True",
        level="warning" if against_another else "problem",
        confidence="likely" if against_another else "proven",
        lasting=True,
    )


def towards_target(flow: Flow, comparison: Comparison, gradient: Tensor) -> float | None:
    """1 when going down the gradient leads to the target, −1 when it leads away; None when targets are no data."""
    found = flow.values([comparison.prediction, comparison.target])
    prediction, target = found.get(comparison.prediction), found.get(comparison.target)
    if (
        prediction is None
        or target is None
        or target.numel() < 2
        or bool((target == target.reshape(-1)[0]).all())
    ):
        return None
    if comparison.kind == "class":
        if gradient.dim() != 2 or target.dim() != 1:
            return None
        picked = gradient.gather(1, target.clamp(0, gradient.shape[1] - 1)[:, None])
        return -float(picked.sum() / picked.abs().sum().clamp(min=1e-30))
    if prediction.shape != target.shape or gradient.shape != target.shape:
        return None
    probability = prediction.sigmoid() if comparison.operation.name.endswith("with_logits") else prediction
    away = probability - target
    return max((_cosine(gradient, away), _cosine(gradient, away.sign())), key=abs)


def _cosine(a: Tensor, b: Tensor) -> float:
    if a.numel() != b.numel():
        return 0.0
    a, b = a.reshape(-1).double(), b.reshape(-1).double()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size > 0 else 0.0


def policy_terms(flow: Flow) -> list[tuple[int, int, Operation]]:
    """Products of the log-probability of something chosen, or of its ratio to an old one, with a weight: (it, weight,
    operation)."""
    found = []
    for op in flow.operations:
        refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
        if op.name != "mul" or len(refs) != 2:
            continue
        for made, weight in (refs, refs[::-1]):
            same = flow.tape.slots[made].shape == flow.tape.slots[weight].shape
            if same and made in flow.tail and weight not in flow.tracked and _is_of_choice(flow, made):
                found.append((made, weight, op))
    return found


def _is_of_choice(flow: Flow, slot: int) -> bool:
    """A log-probability, or exp(log-probability - old one)."""
    maker = flow.maker(flow.behind(slot, VIEWS))
    if maker is not None and maker.name == "exp":
        maker = flow.maker(flow.behind(maker.reads[0], VIEWS))
        return maker is not None and maker.name == "sub" and _is_log_probability(flow, maker.reads[0])
    return _is_log_probability(flow, slot)


def _is_log_probability(flow: Flow, slot: int) -> bool:
    """Picked by gather out of a log_softmax, of the log of a softmax, or of scores less their logsumexp."""
    maker = flow.maker(flow.behind(slot, VIEWS | {"stack", "cat"}))
    while maker is not None and maker.name in ("stack", "cat"):
        maker = flow.maker(flow.behind(maker.reads[0], VIEWS))
    if maker is None or maker.name not in ("gather", "index"):
        return False
    source = flow.maker(flow.behind(maker.reads[0], VIEWS))
    if source is None:
        return False
    if source.name == "sub" and len(source.reads) == 2:
        other = flow.maker(flow.behind(source.reads[1], VIEWS))
        return other is not None and other.name == "logsumexp"
    return source.name == "_log_softmax" or _is_log_of_softmax(flow, source)


def _is_log_of_softmax(flow: Flow, operation: Operation) -> bool:
    """The log of probabilities that were clamped and made to sum to 1, as torch.distributions does."""
    if operation.name != "log":
        return False
    maker: Operation | None = operation
    while maker is not None and maker.name in ("log", "clamp", "div"):
        maker = flow.maker(flow.behind(maker.reads[0], VIEWS))
    return maker is not None and maker.name == "_softmax"


@dataclass
class Term:
    """One summand of the loss: a reduction, and the constants it was multiplied with afterwards."""

    operation: Operation
    operand: tuple[int, ...]  # shape that was reduced
    mean: bool
    factors: list[float] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """What one entry of the operand counts."""
        return abs(math.prod(self.factors)) / (math.prod(self.operand) if self.mean else 1)

    def is_averaged_over(self, batch: int) -> bool:
        divided = any(f != 0 and abs(1 / f) >= batch and abs(1 / f) % batch < 1e-3 for f in self.factors)
        return self.mean or divided


def are_terms_weighed_alike(evidence: Evidence) -> Iterator[Verdict]:
    """One term averaged over the batch, another summed over it: the second grows with the batch."""
    flow = evidence.flow
    if not flow.inputs:
        return
    batch = evidence.slot(flow.inputs[0]).shape[0]
    compared = {c.operation.index for c in flow.comparisons}
    for root in evidence.tape.loss_slots:
        terms = [t for t in take_apart(flow, root) if t.operand and t.operand[0] == batch]
        averaged = [t for t in terms if t.is_averaged_over(batch)]
        summed = [t for t in terms if not t.is_averaged_over(batch) and t.weight > 0.1]
        if batch >= 4 and summed and any(t.operation.index in compared for t in averaged):
            term = summed[0]
            yield confirmed(
                f"{FAMILY}/one-term-not-averaged",
                f"the loss adds a term averaged over the batch of {batch} and one summed over it "
                f"({term.operation.name} of {list(term.operand)}): the second weighs {batch} times too much",
                where=place_of("", term.operation.line),
                fix=f"divide it by the batch size {batch} as well",
                confidence="likely",
                lasting=True,
            )
            return


def take_apart(flow: Flow, root: int) -> list[Term]:
    """The summands of a scalar, each down to the operation that made it a scalar."""
    found: list[Term] = []
    waiting = [(root, [1.0])]
    while waiting and len(found) < 16:
        slot, factors = waiting.pop()
        op = flow.maker(slot)
        if op is None or flow.tape.slots[slot].shape not in ((), (1,)):
            continue
        refs = [arg.slot for arg in op.args if isinstance(arg, Ref)]
        numbers = [arg for arg in op.args if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        if op.name in ("add", "sub") and len(refs) == 2:
            sign = -1.0 if op.name == "sub" else 1.0
            waiting += [(refs[0], factors), (refs[1], [*factors, sign * float(op.kwargs.get("alpha", 1))])]
        elif op.name in ("add", "neg", "view", "squeeze", "clone", "_to_copy", "alias") and refs:
            waiting.append((refs[0], factors))
        elif op.name in ("mul", "div") and len(refs) == 1 and numbers:
            number = float(numbers[0])
            waiting.append(
                (refs[0], [*factors, number if op.name == "mul" else 1 / number if number else 0.0])
            )
        elif op.name in ("sum", "mean") or op.name in KINDS:
            found.append(Term(op, flow.tape.slots[refs[0]].shape, _is_mean(op), factors))
    return found


def _is_mean(op: Operation) -> bool:
    if op.name in ("sum", "mean"):
        return op.name == "mean"
    place = {"nll_loss_forward": 3, "nll_loss2d_forward": 3, "binary_cross_entropy": 3}.get(op.name, 2)
    place = 4 if op.name == "binary_cross_entropy_with_logits" else place
    return place >= len(op.args) or op.args[place] == 1
