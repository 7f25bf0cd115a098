"""Is the loss the right way up? Its gradient against the way to the targets, to what pays, and to exploring."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded, undecided
from gradproof.instruments.choices import (
    is_drawn,
    is_log_probability,
    is_return,
    is_turned,
    policy_terms,
    weighs_choices,
)
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import KINDS, RESHAPES, VIEWS, Comparison, Flow, place_of
from gradproof.instruments.source import lines_of_names
from gradproof.instruments.update import is_by_hand, named_parameters
from gradproof.instruments.weights import take_apart
from gradproof.tape.operations import Line, Operation, references
from gradproof.tape.replay import differentiate

FAMILY = "loss-scale-or-sign"
OPPOSITE = -0.99  # cosine of the gradient and the direction away from the target
ALL_ALIKE = 0.999  # the least of the gradient of a mean, against its largest: but for rounding they are one
ALONG = 0.9  # cosine of gradient and weights: a term beside it, such as an entropy's, turns it a little
SIZES = VIEWS | {"pow", "abs", "square", "neg", "mul", "sum", "mean"}

Gradients = dict[int, Tensor]  # as a step goes down them: turned round where the optimizer climbs


def is_the_loss_the_right_way_up(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, towards_targets, towards_exploring, terms_that_cancel))


# towards targets --------------------------------------------------------------------------------------------


def towards_targets(evidence: Evidence) -> Iterator[Verdict]:
    """Going down the gradient must bring predictions nearer to their targets, and likely actions after good returns."""
    flow = evidence.flow
    policies = policy_terms(flow)
    if weighs_choices(flow) or any(is_return(flow, c) for c in flow.comparisons):
        evidence.noted["policy_loss"] = True  # how it goes over the steps says nothing of how the policy does
    picks = [op for op in flow.picks if is_log_probability(flow, op.makes[0])]
    slots = [c.prediction for c in flow.comparisons] + [made for made, _, _ in policies]
    slots += [op.makes[0] for op in picks]
    if not slots:
        return
    climbs = climbing(evidence, slots)
    gradients = differentiate(evidence.tape, gradients_at=slots).slot_gradients
    gradients = {slot: -g if slot in climbs else g for slot, g in gradients.items()}
    cosines = of_comparisons(evidence, gradients)
    wrong = (
        away_from_targets(cosines)
        # what a policy did is no right class: it comes one at a time, is drawn, or is weighed by what it brought
        or (None if policies else away_from_classes(flow, picks, gradients))
        or away_from_returns(flow, policies, gradients)
    )
    if wrong is not None:
        slot, found = wrong
        yield found if slot not in climbs else maximized(evidence, found, climbs[slot])
    elif cosines and min(cosines) > 0.5:
        said = f"down the gradient, predictions go to their targets (cosine {min(cosines):.2f})"
        yield excluded(f"{FAMILY}/sign", said)
    elif cosines:
        said = f"predictions go neither to their targets nor away (cosine {min(cosines):.2f})"
        yield undecided(FAMILY, f"down the gradient, {said}")
    elif not picks and not policies:
        said = "no prediction has targets of its own shape that differ from sample to sample"
        yield undecided(FAMILY, said)


def of_comparisons(evidence: Evidence, gradients: Gradients) -> dict[float, Comparison]:
    """By the cosine of the gradient with the way from the target."""
    flow, found = evidence.flow, {}
    averaged = {index for root in evidence.tape.loss_slots for index in plain_differences(flow, root)}
    for comparison in flow.comparisons:
        gradient = gradients.get(comparison.prediction)
        plain = comparison.operation.name in KINDS or comparison.operation.index in averaged
        cosine = towards_target(flow, comparison, gradient) if gradient is not None and plain else None
        if cosine is not None:
            found[cosine] = comparison
    return found


def plain_differences(flow: Flow, root: int) -> Iterator[int]:
    """Differences whose squares or sizes are averaged as they are; a likelihood weighed by returns is none."""
    for term in take_apart(flow, root):
        chain = flow.chain(term.operation.reads[0])
        last = next((op for op in chain if op.name not in SIZES or len(set(op.reads)) > 1), None)
        if last is not None:
            yield last.index


def towards_target(flow: Flow, comparison: Comparison, gradient: Tensor) -> float | None:
    """1 when going down the gradient leads to the target, −1 when it leads away; None when targets are no data."""
    found = flow.values([comparison.prediction, comparison.target])
    prediction, target = found.get(comparison.prediction), found.get(comparison.target)
    if prediction is None or target is None or target.numel() < 2:
        return None
    if bool((target == target.reshape(-1)[0]).all()):
        return None
    if comparison.kind == "class":
        if gradient.dim() != target.dim() + 1:
            return None
        picked = gradient.gather(1, target.clamp(0, gradient.shape[1] - 1).unsqueeze(1))
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


def away_from_targets(cosines: dict[float, Comparison]) -> tuple[int, Verdict] | None:
    least = min(cosines, default=1.0)
    if not least < OPPOSITE:
        return None
    against = max(cosines) > 0.5  # beside a loss that is minimised: an adversary's may be meant so
    worst = cosines[least]
    return worst.prediction, wrong_way(worst.operation, "prediction from its target", least, against)


def away_from_classes(flow: Flow, picks: list[Operation], gradients: Gradients) -> tuple[int, Verdict] | None:
    """Chosen against rejected answers: what one call of a line raises, another is meant to lower."""
    known = {op.makes[0]: op for op in picks if op.makes[0] in gradients and gradients[op.makes[0]].numel()}
    raised = {op.line for slot, op in known.items() if float(gradients[slot].max()) < 0}
    for slot, op in known.items():
        gradient = gradients[slot]
        if op.line in raised or gradient.numel() < 2 or is_drawn(flow, op):
            continue
        if float(gradient.min()) > ALL_ALIKE * float(gradient.abs().max()) > 0:
            what = "log-probability away from the right class"
            return slot, wrong_way(op, what, -1.0, bool(raised))
    return None


def wrong_way(op: Operation, what: str, cosine: float, against_another: bool) -> Verdict:
    return confirmed(
        f"{FAMILY}/sign",
        f"a step down the gradient takes each {what} (cosine {cosine:.3f} with the way to it): "
        "the loss is minimised with a minus sign",
        where=place_of("", op.line),
        level="note" if against_another else "problem",
        confidence="possible" if against_another else "proven",
    )


def away_from_returns(
    flow: Flow, policies: list[tuple[int, int, Operation]], gradients: Gradients
) -> tuple[int, Verdict] | None:
    for made, weight, op in policies:
        weights, gradient = flow.value(weight), gradients.get(made)
        if gradient is None or weights is None:
            continue
        cosine, wanted = (
            _cosine(-gradient if is_turned(flow, weight) else gradient, weights),
            is_it_wanted(op.line),
        )
        if cosine > ALONG and wanted is not False:
            return made, confirmed(
                f"{FAMILY}/policy-sign",
                "the gradient lowers the log-probability of what was done in proportion to the weight it is given "
                f"(cosine {cosine:.3f}): after a good return the action becomes less likely",
                where=place_of("", op.line),
                level="problem" if wanted else "warning",
                confidence="likely" if wanted else "possible",
            )
    return None


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


# climbing ---------------------------------------------------------------------------------------------------


def climbing(evidence: Evidence, slots: list[int]) -> dict[int, str]:
    """Of some slots, those that nothing but optimizers with maximize=True learns, and where those were made."""
    groups = [(o, g) for o in evidence.optimizers for g in o.param_groups]
    if not any(group.get("maximize") for _, group in groups):
        return {}
    owner = {id(p): (o, bool(g.get("maximize"))) for o, g in groups for p in g["params"]}
    named = named_parameters(evidence)
    slots_of = {s.index: id(named[s.name]) for s in evidence.tape.parameters if s.name in named}
    found = {}
    for slot in slots:
        behind = [slots_of[s] for s in evidence.flow.ancestors(slot) if s in slots_of]
        owners = [owner[p] for p in behind if p in owner]
        if owners and all(climbs for _, climbs in owners):
            found[slot] = next((o.line for o, _ in owners if o.line), "")
    return found


def maximized(evidence: Evidence, found: Verdict, made: str) -> Verdict:
    """Where the optimizer climbs a loss that is to be minimised, as its sign says, the slip is the optimizer's."""
    who, fix = "maximize=True", "remove maximize=True, or keep it and remove the minus sign of the loss"
    if is_by_hand(evidence):
        who = "the update by hand adds the gradient and"
        fix = "subtract: p -= lr * p.grad, or turn the loss round"
    seen = found.evidence[0].partition(": the loss is minimised with a minus sign")[0]
    seen = seen.replace("down the gradient", "up the gradient")
    return replace(
        found,
        family="optimizer-config",
        id="optimizer-config/maximize",
        evidence=(
            f"{who} climbs a loss ({found.where}) whose own sign says that it is to be minimised",
            seen.replace("the gradient lowers", "a step up the gradient lowers"),
        ),
        where=made or found.where,
        fix=f"{fix}: one of them, not both",
    )


# exploring --------------------------------------------------------------------------------------------------


def towards_exploring(evidence: Evidence) -> Verdict | None:
    """Beside a policy's gradient, an entropy belongs into the loss with a minus: minimised, it ends exploring."""
    products = entropies(evidence.flow) if policy_terms(evidence.flow) else []
    gradients = differentiate(evidence.tape, gradients_at=[op.makes[0] for op in products]).slot_gradients
    up = -1.0 if any(g.get("maximize") for o in evidence.optimizers for g in o.param_groups) else 1.0
    for op in (op for op in products if op.makes[0] in gradients):
        if float((up * gradients[op.makes[0]]).max()) < 0:  # of Σ p log p, the negative entropy
            return confirmed(
                f"{FAMILY}/entropy-sign",
                "the loss falls as the policy's entropy falls: what is meant to keep it exploring makes it certain",
                where=place_of("", op.line),
                confidence="likely",
            )
    return None


def entropies(flow: Flow) -> list[Operation]:
    """The products p · log p of the loss: one operand is a distribution, the other its logarithm."""
    found = []
    for op in flow.operations:
        pair = [ref.slot for ref in references(op.args) if ref.tracked] if op.name == "mul" else []
        if len(pair) == 2 and op.makes[0] in flow.tail and same_shape(flow, *pair):
            values = flow.values(pair)
            sides = [values.get(slot) for slot in pair]
            if any(is_logarithm(a, b) for a, b in (sides, sides[::-1]) if a is not None and b is not None):
                found.append(op)
    return found


def same_shape(flow: Flow, one: int, other: int) -> bool:
    return flow.tape.slots[one].shape == flow.tape.slots[other].shape


def is_logarithm(logs: Tensor, p: Tensor) -> bool:
    """Whether rows of p are distributions and `logs` their logarithms."""
    if p.dim() < 1 or p.shape[-1] < 2 or not bool((p >= 0).all()):
        return False
    p, logs = p.double(), logs.double()
    some = p > 1e-6  # what is added or clamped before a logarithm changes that of less
    sums = p.sum(-1)
    whole = torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    return whole and torch.allclose(logs[some], p[some].log(), atol=1e-2)


CANCELLED = 1e-12  # of either term: in float64 what is left of equal terms is rounding


def terms_that_cancel(evidence: Evidence) -> Iterator[Verdict]:
    """One comparison that goes into the loss twice, once raised and once lowered: nothing is learned from it.

    Players that pull one number in two directions need a loss and a step each: in one sum they take each other away.
    """
    flow = evidence.flow
    pairs: dict[tuple[str, int, int], list[Operation]] = {}
    for c in flow.comparisons:
        sides = flow.behind(c.prediction, RESHAPES), flow.behind(c.target, RESHAPES)
        pairs.setdefault((c.operation.name, *sides), []).append(c.operation)
    twice = [ops for ops in pairs.values() if len(ops) > 1]
    calls = [call for call in evidence.tape.top_backwards if call.accumulates]
    if not twice or len(calls) != 1 or len(calls[0].roots) != 1:
        return  # of two losses each may be another's to step on
    made = [op.makes[0] for ops in twice for op in ops]
    gradients = differentiate(evidence.tape, gradients_at=made).slot_gradients
    for ops in twice:
        parts = [gradients[op.makes[0]].double() for op in ops if op.makes[0] in gradients]
        if len(parts) != len(ops) or len({part.shape for part in parts}) != 1:
            continue
        total, largest = float(sum(parts, torch.zeros(())).norm()), max(float(part.norm()) for part in parts)
        if largest > 0 and total <= CANCELLED * largest:
            lines = dict.fromkeys(place_of("", op.line) or "the loss" for op in ops)
            yield confirmed(
                f"{FAMILY}/terms-cancel",
                f"one and the same {ops[0].name} goes into the loss {len(ops)} times ({', '.join(lines)}), and the sum "
                f"of its weights is 0: each pulls with a gradient of {largest:.2g}, all together with {total:.1g}",
                where=place_of("", ops[-1].line),
                confidence="proven",  # the step differentiated
            )
            return
