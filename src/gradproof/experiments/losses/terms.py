"""Is the loss the right way up? Its gradient against the way to the targets, and against exploring."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded, undecided
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import KINDS, RESHAPES, VIEWS, Comparison, Flow, place_of
from gradproof.instruments.rows import sources
from gradproof.instruments.source import lines_of_names
from gradproof.instruments.update import BY_HAND, named_parameters
from gradproof.instruments.weights import take_apart
from gradproof.tape.operations import Line, Operation, Ref
from gradproof.tape.replay import differentiate


def is_the_loss_the_right_way_up(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, towards_targets, towards_exploring, terms_that_cancel))


FAMILY = "loss-scale-or-sign"
OPPOSITE = -0.99  # cosine of the gradient and the direction away from the target
ALL_ALIKE = 0.999  # the least of the gradient of a mean, against its largest: but for rounding they are one
ALONG = 0.9  # cosine of gradient and weights: a term beside it, such as an entropy's, turns it a little


def towards_targets(evidence: Evidence) -> Iterator[Verdict]:
    """Going down the gradient must bring predictions nearer to their targets, and likely actions after good returns."""
    flow = evidence.flow
    policies = policy_terms(flow)
    if weighs_choices(flow) or any(is_return(flow, c) for c in flow.comparisons):
        evidence.noted["policy_loss"] = True  # how it goes over the steps says nothing of how the policy does
    picks = [op for op in flow.picks if _is_log_probability(flow, op.makes[0])]
    slots = [c.prediction for c in flow.comparisons] + [made for made, _, _ in policies]
    slots += [op.makes[0] for op in picks]
    if not slots:
        return
    gradients = differentiate(evidence.tape, gradients_at=slots).slot_gradients
    climbs = climbing(evidence, slots)
    by_hand = any(record.kind == BY_HAND for record in evidence.specimen.optimizer_records)
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
        yield maximized(found, climbs, worst.prediction, by_hand)
        return
    # chosen against rejected answers: what one call of a line raises, another is meant to lower
    raised = {
        op.line for op in picks if op.makes[0] in gradients and is_raised(op.makes[0], gradients, climbs)
    }
    for op in picks:
        if op.line in raised:
            continue
        gradient = gradients.get(op.makes[0])
        # what a policy did is no right class: it comes one at a time, is drawn, or is weighed by what it brought
        if gradient is None or gradient.numel() < 2 or policies or is_drawn(flow, op):
            continue
        up = -1.0 if op.makes[0] in climbs else 1.0
        if float((up * gradient).min()) > ALL_ALIKE * float(gradient.abs().max()) > 0:
            found = wrong_way(op, "log-probability away from the right class", -1.0, bool(raised))
            yield maximized(found, climbs, op.makes[0], by_hand)
            return
    for made, weight, op in policies:
        weights = flow.values([weight]).get(weight)
        gradient = gradients.get(made)
        up = (-1.0 if made in climbs else 1.0) * (-1.0 if is_turned(flow, weight) else 1.0)
        cosine = _cosine(up * gradient, weights) if gradient is not None and weights is not None else None
        wanted = is_it_wanted(op.line)
        if cosine is not None and cosine > ALONG and wanted is not False:
            found = confirmed(
                f"{FAMILY}/policy-sign",
                "the gradient lowers the log-probability of what was done in proportion to the weight it is given "
                f"(cosine {cosine:.3f}): after a good return the action becomes less likely",
                where=place_of("", op.line),
                level="problem" if wanted else "warning",
                confidence="likely" if wanted else "possible",
            )
            yield maximized(found, climbs, made, by_hand)
            return
    if cosines and min(cosines) > 0.5:
        yield excluded(
            f"{FAMILY}/sign",
            f"down the gradient, predictions go to their targets (cosine {min(cosines):.2f})",
        )
    elif cosines:
        said = (
            f"down the gradient, predictions go neither to their targets nor away (cosine {min(cosines):.2f})"
        )
        yield undecided(FAMILY, said)
    elif not picks and not policies:
        yield undecided(
            FAMILY, "no prediction has targets of its own shape that differ from sample to sample"
        )


def is_raised(slot: int, gradients: dict[int, Tensor], climbs: dict[int, str]) -> bool:
    """Whether a step makes all of it larger."""
    gradient = -gradients[slot] if slot in climbs else gradients[slot]
    return gradient.numel() > 0 and float(gradient.max()) < 0


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


def maximized(found: Verdict, climbs: dict[int, str], slot: int, by_hand: bool) -> Verdict:
    """Where the optimizer climbs a loss that is to be minimised, as its sign says, the slip is the optimizer's."""
    if slot not in climbs:
        return found
    who, fix = "maximize=True", "remove maximize=True, or keep it and remove the minus sign of the loss"
    if by_hand:
        who, fix = (
            "the update by hand adds the gradient and",
            "subtract: p -= lr * p.grad, or turn the loss round",
        )
    return replace(
        found,
        family="optimizer-config",
        id="optimizer-config/maximize",
        evidence=(
            f"{who} climbs a loss ({found.where}) whose own sign says that it is to be minimised",
            found.evidence[0]
            .replace("down the gradient", "up the gradient")
            .replace("the gradient lowers", "a step up the gradient lowers")
            .replace(": the loss is minimised with a minus sign", ""),
        ),
        where=climbs[slot] or found.where,
        fix=f"{fix}: one of them, not both",
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
        level="note" if against_another else "problem",
        confidence="possible" if against_another else "proven",
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


def is_turned(flow: Flow, weight: int) -> bool:
    """Whether a weight is the negative of what it was: -advantage * ratio is what -(advantage * ratio) is."""
    maker = flow.maker(flow.behind(weight, VIEWS))
    turned = False
    while maker is not None:
        factor = next((arg for arg in maker.args if isinstance(arg, (int, float))), None)
        if maker.name == "neg" or (maker.name in ("mul", "div") and factor is not None and factor < 0):
            turned = not turned
        elif maker.name not in ("mul", "div") or factor is None:
            break
        maker = flow.maker(flow.behind(maker.reads[0], VIEWS))
    return turned


PASSED = VIEWS | {"neg", "mul", "div", "exp", "log", "sub", "minimum", "clamp", "clamp_min", "stack", "cat"}
PROBABILITIES = ("_softmax", "_log_softmax", "logsumexp")


def weighs_choices(flow: Flow) -> bool:
    """Whether somewhere in the loss what was picked of a softmax, or the density of what was done, is multiplied with
    numbers that are no mask."""
    for op in flow.operations:
        refs = [arg.slot for arg in op.args[:2] if isinstance(arg, Ref)]
        if op.name != "mul" or not flow.tail.intersection(op.makes):
            continue
        for made in refs:
            weight = next((slot for slot in refs if slot != made), None)
            if made not in flow.tracked or weight in flow.tracked:
                continue
            if not (_is_picked(flow, made) or _is_of_choice(flow, made)):
                continue
            if weight is None:  # a number of the script's: the return of one action
                if math.prod(flow.tape.slots[made].shape) == 1:
                    return True
                continue
            value = flow.values([weight]).get(weight)
            if value is not None and not bool(((value == 0) | (value == 1)).all()):
                return True
    return False


def is_return(flow: Flow, comparison: Comparison) -> bool:
    """Whether values are compared with numbers from outside plus what a network makes of them, r + γ V(s'): as values
    grow, so do their errors."""
    op = flow.maker(flow.behind(comparison.target, VIEWS))
    if comparison.kind != "value" or op is None or op.name != "add" or len(op.reads) != 2:
        return False
    weights = {slot.index for slot in flow.tape.parameters}
    return sum(not weights.isdisjoint(flow.ancestors(slot)) for slot in op.reads) == 1


def _is_picked(flow: Flow, slot: int) -> bool:
    waiting, seen = [(slot, False)], 0
    while waiting and seen < 40:
        here, picked = waiting.pop()
        maker, seen = flow.maker(here), seen + 1
        if maker is None:
            continue
        if maker.name in PROBABILITIES and picked:
            return True
        if maker.name in PASSED or maker.name in ("gather", "index"):
            picked = picked or maker.name in ("gather", "index")
            waiting += [(read, picked) for read in maker.reads if read in flow.tracked]
    return False


def _is_of_choice(flow: Flow, slot: int) -> bool:
    """A log-probability, or exp(log-probability - old one)."""
    maker = flow.maker(flow.behind(slot, VIEWS))
    if maker is not None and maker.name == "exp":
        maker = flow.maker(flow.behind(maker.reads[0], VIEWS))
        return maker is not None and maker.name == "sub" and _is_log_probability(flow, maker.reads[0])
    return _is_log_probability(flow, slot)


def _is_log_probability(flow: Flow, slot: int) -> bool:
    return _is_of_classes(flow, slot) or _is_log_density(flow, slot)


def _is_log_density(flow: Flow, slot: int) -> bool:
    """A normal distribution's: less the square of what was done, which is data, less what a network expects."""
    waiting, seen = [(slot, False)], 0
    while waiting and seen < 40:
        here, turned = waiting.pop()
        op, seen = flow.maker(flow.behind(here, VIEWS)), seen + 1
        if op is None:
            continue
        negative = any(isinstance(arg, (int, float)) and arg < 0 for arg in op.args)
        if op.name == "pow" and op.args[1] == 2:
            if turned and _is_difference_from_data(flow, op.reads[0]):
                return True
        elif op.name in ("neg", "mul", "div"):
            waiting.append((op.reads[0], turned != (op.name == "neg" or negative)))
        elif op.name in ("sum", "add", "sub"):
            waiting += [(read, turned != (op.name == "sub" and n > 0)) for n, read in enumerate(op.reads)]
    return False


def _is_difference_from_data(flow: Flow, slot: int) -> bool:
    op = flow.maker(flow.behind(slot, VIEWS | {"div", "mul"}))
    return (
        op is not None and op.name == "sub" and sum(s in flow.tracked for s in op.reads) == 1 < len(op.reads)
    )


def _is_of_classes(flow: Flow, slot: int) -> bool:
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


# exploring --------------------------------------------------------------------------------------------------


def towards_exploring(evidence: Evidence) -> Iterator[Verdict]:
    """Beside a policy's gradient, an entropy belongs into the loss with a minus: minimised, it ends exploring."""
    if not policy_terms(evidence.flow):
        return
    products = entropies(evidence)
    if not products:
        return
    gradients = differentiate(evidence.tape, gradients_at=[op.makes[0] for op in products]).slot_gradients
    up = -1.0 if any(g.get("maximize") for o in evidence.optimizers for g in o.param_groups) else 1.0
    for op in products:
        gradient = gradients.get(op.makes[0])
        # of Σ p log p, the negative entropy
        if gradient is None or not float((up * gradient).max()) < 0:
            continue
        yield confirmed(
            "loss-scale-or-sign/entropy-sign",
            "the loss falls as the policy's entropy falls: what is meant to keep it exploring makes it certain",
            where=place_of("", op.line),
            confidence="likely",
        )
        return


def entropies(evidence: Evidence) -> list[Operation]:
    """The products p · log p of the loss: one operand is a distribution, the other its logarithm."""
    flow = evidence.flow
    found = []
    for op in flow.operations:
        refs = [arg for arg in op.args if isinstance(arg, Ref) and arg.tracked]
        if op.name != "mul" or len(refs) != 2 or op.makes[0] not in flow.tail:
            continue
        if evidence.slot(refs[0].slot).shape != evidence.slot(refs[1].slot).shape:
            continue
        values = flow.values([ref.slot for ref in refs])
        pair = [values.get(ref.slot) for ref in refs]
        if any(is_logarithm(a, b) for a, b in (pair, pair[::-1]) if a is not None and b is not None):
            found.append(op)
    return found


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
