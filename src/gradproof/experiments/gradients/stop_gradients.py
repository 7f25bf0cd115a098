"""Does gradient reach what it must not? Targets, baselines and teachers that are pulled; ratios that cancel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, VIEWS, place_of
from gradproof.instruments.hearing import outcome
from gradproof.instruments.update import has_gradient, held, named_parameters
from gradproof.instruments.walk import ahead, anything, back, operands, tracked
from gradproof.tape.operations import Operation, Ref, references

COMPARES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
DISTANCES = ("pow", "square", "abs", "linalg_vector_norm", "norm")
ADDS = ("add", "sub", "rsub")
PASSES = RESHAPES | {"expand"}
APART = 1e-6  # of a loss, in float64: rounding is far below, what the other samples do far above
HINGES = ("relu", "maximum", "softplus")
NEAR = 4  # operations between a weight and the average that is made of it
TO_THE_EXPONENTIAL = VIEWS | {"sum", "mean", "clamp", "clamp_min", "clamp_max", "mul", "neg"}
MOST = 8  # pairs of a ratio that are looked at
MOVED = 0.1  # of each weight's own size


def does_gradient_reach_what_it_must_not(evidence: Evidence) -> Iterator[Verdict]:
    """The first of a trained teacher, a target that depends on what is trained, a baseline that is; and ratios."""
    yield from causes_of(each(evidence, first_slip, ratios_that_cancel))


def first_slip(evidence: Evidence) -> Verdict | None:
    looks = (trained_teacher, pulled_distribution, compared_with_itself, pulled_baseline)
    return next((found for look in looks if (found := look(evidence)) is not None), None)


def trained_teacher(evidence: Evidence) -> Verdict | None:
    """Weights that an average of others overwrites, and that an optimizer steps along a gradient as well."""
    ids, flow = set(map(id, held(evidence))), evidence.flow
    named = {n for n, p in named_parameters(evidence).items() if id(p) in ids and has_gradient(p)}
    parameters = {slot.index for slot in evidence.tape.parameters}

    def reaches_another(slot: int, own: int) -> bool:
        """A parameter, or a few elementwise operations away from one."""
        way = [slot, *(op.reads[0] for op in islice(back(flow, slot, anything), NEAR - 1) if op.reads)]
        return any(each in parameters and each != own for each in way)

    for op in evidence.tape.operations:
        if op.phase == "optimizer" or op.in_backward is not None:
            continue
        for slot in (slot for slot in op.writes if evidence.slot(slot).name in named):
            if any(reaches_another(source, slot) for source in op.reads if source != slot):
                name = evidence.slot(slot).name
                return confirmed(
                    "missing-stop-gradient/teacher",
                    f"{name} follows other weights ({op.name}) and is also trained: it gets a gradient",
                    where=place_of(name.rpartition(".")[0], op.line),
                    confidence="proven",  # written by one and stepped by another
                )
    return None


# two sides of a loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One operand of a comparison: the trained layers behind it, and what happens to it after the last of them."""

    layers: frozenset[str]  # by their weights
    passes: frozenset[int]  # the operations in which those layers were used
    after: tuple[Operation, ...]  # operations of the loss, up to the first of a layer

    @property
    def is_return(self) -> bool:
        """A number from outside plus something learned: r + γ V(s')."""
        return any(op.name in ADDS and mixes(op) for op in self.after)


def pairs(evidence: Evidence, *names: str) -> Iterator[tuple[Operation, int, int]]:
    """Operations of the loss between two tensors that both carry gradient."""
    for op in evidence.forward:
        refs = [arg for arg in op.args if isinstance(arg, Ref)]
        both = op.name in names and len(refs) == 2 and all(ref.tracked for ref in refs)
        if both and in_the_loss(evidence, op):
            yield op, refs[0].slot, refs[1].slot


def pulled_distribution(evidence: Evidence) -> Verdict | None:
    """Σ p log q, of two networks that have no layer in common, with gradient into the one that makes p."""
    found: list[tuple[Operation, Side, Side]] = []
    for op, *both in pairs(evidence, "mul"):
        made = {maker.name: slot for slot in both if (maker := through_views(evidence, slot)) is not None}
        if made.keys() == {"_softmax", "_log_softmax"}:
            p, log_q = (side_of(evidence, made[name]) for name in ("_softmax", "_log_softmax"))
            found.append((op, p, log_q))
    predicting = {layer for _, _, prediction in found for layer in prediction.layers}
    for op, target, prediction in found:
        if target.layers and prediction.layers and not target.layers & predicting:
            return verdict_of(op, target, "a distribution that another network puts out")
    return None


def compared_with_itself(evidence: Evidence) -> Verdict | None:
    """Prediction and target both carry gradient into the same layers, and one of them is clearly the target."""
    loss = (op for op in evidence.forward if in_the_loss(evidence, op))
    tail = evidence.flow.tail  # a ReLU between layers is no margin, though `model.forward(x)` shows no module
    if any(is_hinge(op) and not tail.isdisjoint(op.makes) for op in loss):
        return None  # a margin between pairs wants both sides
    for op, one, two in pairs(evidence, *COMPARES, "sub", "mul"):
        if evidence.slot(one).shape != evidence.slot(two).shape:
            continue
        first, second = side_of(evidence, one), side_of(evidence, two)
        if not first.layers & second.layers or first.passes & second.passes:
            continue  # other layers, or two outputs of one pass: nothing is compared with itself
        product = op.name == "mul"
        if product and (not is_similarity(evidence, op) or is_a_score(evidence, op)):
            continue
        if op.name == "sub" and not is_squared(evidence, op):
            continue
        for target, prediction in ((second, first), (first, second)):
            returned = target.is_return and not prediction.is_return and not product
            if returned or target.layers < prediction.layers:
                return verdict_of(op, target, "a return" if returned else "the branch without a predictor")
        if product and first.layers == second.layers and not wants_them_apart(evidence, one, two):
            return verdict_of(op, second, "the other view", level="warning")
    return None


def wants_them_apart(evidence: Evidence, one: int, two: int) -> bool:
    """Whether the loss is lower with a vector of its own for each sample, the same in both views, than with one for
    all: a contrastive loss holds the views of the other samples in its denominators, and they keep it from collapse."""
    flow, ends = evidence.flow, list(evidence.tape.loss_slots)
    now = flow.values([one, two])
    if len(now) < 2 or len(ends) != 1:
        return False
    some = now[one].double()
    own = torch.randn(some.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        some.device
    )
    own *= some.norm(dim=-1, keepdim=True) / own.norm(dim=-1, keepdim=True)
    found = [
        outcome(flow, ends, {slot: rows.to(now[slot].dtype) for slot in (one, two)}).get(ends[0])
        for rows in (own, own[:1].expand_as(own).contiguous())
    ]
    apart, as_one = (float(loss.double().sum()) if loss is not None else math.nan for loss in found)
    return apart < as_one - APART * abs(as_one)


def pulled_baseline(evidence: Evidence) -> Verdict | None:
    """log p · (return − value) with a value that carries gradient: the policy's loss pulls on the critic."""
    for _, one, two in pairs(evidence, "mul"):
        for advantage, other in ((two, one), (one, two)):
            maker = through_views(evidence, advantage)
            if maker is None or maker.name not in ("sub", "rsub") or not mixes(maker) or other == advantage:
                continue
            if any(is_regressed(evidence, value, maker) for value in tracked(maker)):
                return confirmed(
                    "missing-stop-gradient/baseline",
                    "the advantage carries gradient: the policy's loss changes the values it is measured against",
                    f"{maker.name} at {maker.line}",
                    where=place_of("", maker.line),
                    confidence="likely",
                )
    return None


def verdict_of(op: Operation, target: Side, what: str, level: str = "problem") -> Verdict:
    layers = ", ".join(sorted({name.rpartition(".")[0] or name for name in target.layers})[:3])
    # the target is to be cut off where it is made; a comparison made in the same line stands for both
    made = next((each.line for each in target.after if each.line and each.line != op.line), op.line)
    return confirmed(
        "missing-stop-gradient/target",
        f"the loss compares two things that are both trained: the target, {what}, passes gradient to {layers}",
        *([f"compared at {op.line}"] if made != op.line else []),
        where=place_of("", made),
        level=level,
        confidence="likely",
    )


def side_of(evidence: Evidence, slot: int) -> Side:
    """What lies behind an operand, along the ways that carry gradient."""
    trained = set(evidence.tape.stepped)
    layers: set[str] = set()
    passes: set[int] = set()
    after: list[Operation] = []
    todo, seen = [(slot, True)], set()
    while todo:
        current, outside = todo.pop()
        maker = evidence.maker(current)
        if maker is None or current in seen:
            continue
        seen.add(current)
        outside = outside and in_the_loss(evidence, maker)
        if outside:
            after.append(maker)
        weights = trained & set(maker.reads)
        if weights and maker.module:
            layers.update(evidence.slot(weight).name or maker.module for weight in weights)
            passes.add(maker.index)
        todo += [(operand, outside) for operand in tracked(maker)]
    return Side(frozenset(layers), frozenset(passes), tuple(after))


def in_the_loss(evidence: Evidence, op: Operation) -> bool:
    """Outside of all modules, or behind the last layer: some models compute their loss themselves."""
    return not op.module or not evidence.flow.tail.isdisjoint(op.makes)


def mixes(op: Operation) -> bool:
    """One operand carries gradient, the other is a tensor that does not."""
    refs = [arg for arg in op.args if isinstance(arg, Ref)]
    return len(refs) == 2 and refs[0].tracked != refs[1].tracked


def is_hinge(op: Operation) -> bool:
    limited = op.name in ("clamp", "clamp_min") and len(op.args) > 1 and op.args[1] == 0
    return limited or op.name in HINGES


def is_similarity(evidence: Evidence, product: Operation) -> bool:
    """A product of two embeddings that is summed over its last dimension: the cosine of two views."""
    rank = len(evidence.slot(product.makes[0]).shape)
    sums = (op for op in readers(evidence, product) if op.name == "sum" and len(op.args) > 1)
    return rank >= 2 and any(op.args[1] in ([-1], [rank - 1]) for op in sums)


def is_a_score(evidence: Evidence, product: Operation) -> bool:
    """A product that is compared with targets of its own, as clicks or pairs are: it wants both sides."""
    flow = evidence.flow
    return any(product.makes[0] in flow.ancestors(c.prediction) for c in flow.comparisons)


def is_regressed(evidence: Evidence, value: int, advantage: Operation) -> bool:
    """Whether the same value is also compared with a target of its own, squared."""
    others = (op for op in ahead(evidence.flow, [value], ()) if op is not advantage)
    return any(
        op.name in COMPARES or (op.name in ("sub", "rsub") and is_squared(evidence, op)) for op in others
    )


def is_squared(evidence: Evidence, difference: Operation) -> bool:
    """Whether what an operation makes goes into a distance."""
    return any(
        op.name in DISTANCES or (op.name == "mul" and len(set(op.reads)) == 1)
        for op in readers(evidence, difference)
    )


def readers(evidence: Evidence, op: Operation) -> Iterator[Operation]:
    return ahead(evidence.flow, op.makes, ())


def through_views(evidence: Evidence, slot: int) -> Operation | None:
    return evidence.maker(evidence.flow.behind(slot, PASSES))


# ratios -----------------------------------------------------------------------------------------------------


def ratios_that_cancel(evidence: Evidence) -> Verdict | None:
    """exp(new - old) or new / old, both with gradient and equal: ∂new − ∂old is 0, so nothing is learned from it.

    That they are equal now could be chance (the first epoch of PPO, a copy of a network); that they are equal
    with all weights moved at random means that they are one function.
    """
    found = list(islice(ratios(evidence), MOST))
    slots = sorted({slot for _, one, two in found for slot in (one, two)})
    now = evidence.flow.values(slots) if slots else {}
    equal = [pair for pair in found if are_one(now, pair[1], pair[2])]
    moved = evidence.flow.values(slots, moved_at_random(evidence)) if equal else {}
    for op, one, two in equal:
        if are_one(moved, one, two) and not torch.equal(now[one], moved[one]):
            made = evidence.maker(evidence.flow.behind(two, VIEWS)) if one != two else None
            return confirmed(
                "missing-stop-gradient/ratio",
                f"both operands of {op.name} carry gradient and are equal in all of {now[one].numel()} entries, also "
                f"with every weight moved by {100 * MOVED:g} %: the ratio is 1 and its gradient 0, whatever is learned",
                f"the ratio is taken at {op.line}",
                where=place_of("", made.line if made is not None and made.line else op.line),
                confidence="proven",  # with every weight moved
            )
    return None


def ratios(evidence: Evidence) -> Iterator[tuple[Operation, int, int]]:
    """Quotients, and differences that go into an exponential: (operation, operand, operand), both with gradient."""
    flow = evidence.flow
    for op in flow.operations:
        pair = operands(op)
        if op.name not in ("sub", "div") or len(pair) != 2 or not set(pair) <= set(tracked(op)):
            continue
        shape, other = (evidence.slot(slot).shape for slot in pair)
        if shape != other or torch.Size(shape).numel() < 2:
            continue
        if op.name == "sub" and not goes_into_exponential(evidence, op):
            continue
        origins = [flow.behind(slot, VIEWS) for slot in pair]
        # x - x.max() of one entry, x / x.clamp(...): of the one by the other, not twice computed
        if origins[0] == origins[1] or not any(a in flow.ancestors(b) for a, b in (origins, origins[::-1])):
            yield op, pair[0], pair[1]


def goes_into_exponential(evidence: Evidence, difference: Operation) -> bool:
    def through(op: Operation) -> bool:
        return op.name in TO_THE_EXPONENTIAL and len(list(references(op.args))) == 1

    flow = evidence.flow
    return any(op.name == "exp" for op in ahead(flow, difference.makes, through, flow.operations))


def are_one(values: dict[int, Tensor], one: int, two: int) -> bool:
    """Equal in every entry, finite, and not one constant."""
    if one not in values or two not in values:
        return False
    first, second = values[one], values[two]
    differ = bool((first != first.reshape(-1)[0]).any())
    return differ and bool(torch.isfinite(first).all()) and torch.equal(first, second)


def moved_at_random(evidence: Evidence) -> dict[int, Tensor]:
    """Every trained weight, a tenth of its size away from where it was."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for slot in dict.fromkeys(evidence.tape.stepped):
        value = evidence.tape.leaf_value(slot)
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator).to(value)
            size = value.square().mean().sqrt()
            moved[slot] = value + MOVED * torch.where(size > 0, size, torch.ones_like(size)) * noise
    return moved
