"""Are terms and classes weighed as they ought to be? The loss's sum taken apart, its weights against frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, confirmed, first_of
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import Comparison, Flow, place_of
from gradproof.instruments.hearing import Statistics, alike_along, exchange, outcome
from gradproof.instruments.weights import Term, take_apart
from gradproof.tape.operations import Operation, Ref

FAMILY = "loss-scale-or-sign"
SMALLEST = 4  # samples: of fewer, a sum weighs little more than a mean
LITTLE = 0.1  # that an entry of a sum counts: less is a weight that somebody chose
SETTLED = 300  # steps: before, a network has learned the mean of its targets and little else
MANY = 16  # entries that a comparison is averaged over: by less, nobody is drowned
DEAF = 0.05  # of the way to another sample's target
APART = 1.5  # between the largest weight and the smallest: less changes little
UNEVEN = 3.0  # between the most frequent class and the rarest: less may be chance
LIKE = 0.95  # correlation of their logarithms: a power of the frequency, not a wish for one class
RARER = 0.6  # correlation of their logarithms, of a few batches: the rarer, the less
ENOUGH = 50  # targets a class, to know how often they come


def are_terms_weighed_alike(evidence: Evidence) -> Iterator[Verdict]:
    looks = (one_term_is_summed, one_term_drowns, frequent_classes_weigh_more, rare_answers_weigh_less)
    yield from first_of(look(evidence) for look in looks)


def one_term_is_summed(evidence: Evidence) -> Verdict | None:
    """One term averaged over the batch, another summed over it: the second grows with the batch."""
    compared = {c.operation.index for c in evidence.flow.comparisons}
    for batch, every in terms_of_losses(evidence):
        terms = [t for t in every if t.operand and t.operand[0] == batch]
        averaged = [t for t in terms if t.is_averaged_over(batch) and t.operation.index in compared]
        summed = [t for t in terms if not t.is_averaged_over(batch) and t.weight > LITTLE]
        if summed and averaged:
            term = summed[0]
            return confirmed(
                f"{FAMILY}/one-term-not-averaged",
                f"the loss adds a term averaged over the batch of {batch} and one summed over it "
                f"({term.operation.name} of {list(term.operand)}): the second weighs {batch} times too much",
                where=place_of("", term.operation.line),
                fix=f"divide it by the batch size {batch} as well",
                confidence="likely",
            )
    return None


def one_term_drowns(evidence: Evidence) -> Verdict | None:
    """A comparison averaged over all entries, beside a term summed over what each sample has (a divergence, say): the
    comparison weighs as little as it has entries, and the network may give up to hear its input at all."""
    flow = evidence.flow
    for batch, terms in terms_of_losses(evidence) if evidence.step >= SETTLED else ():
        averaged = [(t, c) for t in terms for c in flow.comparisons if t.mean and t.operation is c.operation]
        summed = [t for t in terms if t.weight * batch > LITTLE and sums_entries(flow, t, batch)]
        for term, comparison in averaged if summed else ():
            entries, heard = math.prod(term.operand) // batch, how_much_is_heard(evidence, comparison)
            if entries < MANY or heard is None or not heard < DEAF:
                continue
            return confirmed(
                f"{FAMILY}/one-term-drowns",
                f"{term.operation.name} is averaged over the {entries} entries of each sample, the other term "
                f"({summed[0].operation.line}) is summed over what each has: the first weighs {entries} times less",
                f"and predictions no longer depend on their inputs: with another sample's input they move "
                f"{100 * heard:.2g} % of the way between the two targets",
                where=place_of("", term.operation.line),
                confidence="likely",  # by how much each weighs is certain, that it was not meant is not
            )
    return None


def terms_of_losses(evidence: Evidence) -> Iterator[tuple[int, list[Term]]]:
    """(size of the batch, summands) of each loss, unless the batch is small."""
    flow = evidence.flow
    batch = evidence.slot(flow.inputs[0]).shape[0] if flow.inputs else 0
    yield from ((batch, take_apart(flow, root)) for root in evidence.tape.loss_slots if batch >= SMALLEST)


def sums_entries(flow: Flow, term: Term, batch: int) -> bool:
    """Whether a term is averaged over the samples, and is a sum over the entries of each."""
    inner = flow.follow(term.operation.reads[0], {"sum"})
    if inner is None or not term.is_averaged_over(batch):
        return False
    whole = flow.tape.slots[inner.reads[0]].shape
    return term.operand == (batch,) and whole[0] == batch and math.prod(whole) > batch


def how_much_is_heard(evidence: Evidence, comparison: Comparison) -> float | None:
    """How far a prediction moves when it is given another sample's input, by the way between their targets."""
    flow = evidence.flow
    slots = alike_along(flow, 0)
    count = flow.tape.slots[slots[0]].shape[0] if slots else 0
    statistics = Statistics(flow)
    before = outcome(flow, [comparison.prediction, comparison.target], look=statistics.keep)
    target = before.get(comparison.target)
    if target is None or count < 2 or len(target) != count:
        return None
    there, here = count // 2, 0
    leaves = exchange(flow, slots, 0, here, there)
    after = outcome(flow, [comparison.prediction], leaves, statistics.put_back) if leaves else {}
    if comparison.prediction not in after:
        return None
    is_score = comparison.operation.name.endswith("with_logits")
    scale = torch.sigmoid if is_score else lambda value: value
    old, new = (scale(v[comparison.prediction][here].double()) for v in (before, after))
    way = float((target[there].double() - target[here].double()).norm())
    return float((new - old).norm()) / way if way > 0 else None


def frequent_classes_weigh_more(evidence: Evidence) -> Verdict | None:
    """Weights that grow with the frequency of their class take from the rare ones what little they have."""
    for op, target, weight in weighed(evidence, "class", 2):
        counts: Tensor = evidence.memory.setdefault("class counts", torch.zeros(len(weight)))
        if len(counts) != len(weight):
            return None
        target = target.flatten().long()
        counts += torch.bincount(target[(target >= 0) & (target < len(weight))], minlength=len(weight))
        seen = (counts > 0) & (weight > 0)
        if not grows_with(weight[seen], counts[seen]):
            return None
        shares = counts / counts.sum()
        often, rare = int(counts.argmax()), int(counts.where(seen, torch.inf).argmin())
        return weighs_wrongly(
            op,
            f"the loss weighs the most frequent class ({100 * float(shares[often]):.3g} % of the targets) with "
            f"{float(weight[often]):.3g} and the rarest ({100 * float(shares[rare]):.3g} %) with "
            f"{float(weight[rare]):.3g}: the weights grow with the frequency",
            "weigh classes by one over their frequency (or its root), not by the frequency",
            int((counts > 0).sum()) > 2,  # of two classes, the frequent one may be the one that matters
        )
    return None


def rare_answers_weigh_less(evidence: Evidence) -> Verdict | None:
    """A pos_weight that gets smaller the rarer a yes is: the fraction is the wrong way up."""
    for op, target, weight in weighed(evidence, "binary", 3):
        target = target.reshape(-1, len(weight))
        kept: Tensor = evidence.memory.setdefault("yes and all", torch.zeros(2, len(weight)))
        if kept.shape[1] != len(weight):
            return None
        kept += torch.stack([target.sum(0), torch.full((len(weight),), float(len(target)))])
        share = (kept[0] / kept[1]).double()
        seen = (share > 0) & (share < 1)
        if not bool(seen.any()) or float(kept[0][seen].min()) < 1 or float(kept[0].sum()) < ENOUGH:
            return None
        # what balances is no / yes: above 1 for a rare yes
        balanced, given = ((1 - share) / share)[seen].log(), weight[seen].clamp(min=1e-9).log()
        if not bool((balanced > 0).all()) or not bool((given < -math.log(APART)).all()):
            return None
        if len(balanced) > 2 and not falls_with(given, balanced):
            return None
        rare = int(share.where(seen, torch.inf).argmin())
        return weighs_wrongly(
            op,
            f"pos_weight makes a rare yes count less: of the {len(weight)} answers the rarest is yes in "
            f"{100 * float(share[rare]):.2g} % of the targets and weighs {float(weight[rare]):.3g}, where "
            f"{float((1 - share[rare]) / share[rare]):.3g} would balance it",
            "turn the fraction over: pos_weight = (number of no) / (number of yes)",
            len(balanced) > 2,  # of one or two, somebody may want few false alarms
        )
    return None


def weighed(evidence: Evidence, kind: str, place: int) -> Iterator[tuple[Operation, Tensor, Tensor]]:
    """(loss, targets, weights) of comparisons whose loss is given a weight for each class, or answer, at a place."""
    for comparison in evidence.flow.comparisons:
        op = comparison.operation
        given = op.args[place] if len(op.args) > place and op.name != "binary_cross_entropy" else None
        if comparison.kind == kind and isinstance(given, Ref):
            found = evidence.values([comparison.target, given.slot])
            yield op, found[comparison.target].double().cpu(), found[given.slot].double().flatten().cpu()


def weighs_wrongly(op: Operation, said: str, fix: str, sure: bool) -> Verdict:
    return confirmed(
        f"{FAMILY}/class-weights",
        said,
        where=place_of(op.module, op.line),
        level="problem" if sure else "warning",
        fix=fix,
        confidence="likely",
        lasting=False,
    )


def grows_with(weight: Tensor, counts: Tensor) -> bool:
    if len(counts) < 2 or counts.sum() < ENOUGH * len(counts) or counts.max() < UNEVEN * counts.min():
        return False
    if weight.max() < APART * weight.min():
        return False
    return float(torch.corrcoef(torch.stack([counts.double(), weight]).log())[0, 1]) >= LIKE


def falls_with(weight: Tensor, rarity: Tensor) -> bool:
    """Both logarithms; weights that are all the same were chosen, not computed."""
    return float(weight.std()) > 0 and float(torch.corrcoef(torch.stack([rarity, weight]))[0, 1]) <= -RARER
