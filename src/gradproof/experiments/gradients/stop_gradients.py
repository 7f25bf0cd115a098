"""Does gradient reach what it must not? Targets, baselines and teachers that are pulled; ratios that cancel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import RESHAPES, VIEWS, place_of
from gradproof.instruments.update import has_gradient, named_parameters
from gradproof.tape.operations import Line, Operation, Ref, references


def does_gradient_reach_what_it_must_not(evidence: Evidence) -> Iterator[Verdict]:
    """The first of a trained teacher, a target that depends on what is trained, a baseline that is; and ratios."""
    yield from causes_of(each(evidence, first_slip, ratios_that_cancel))


def first_slip(evidence: Evidence) -> Verdict | None:
    looks = (trained_teacher, pulled_distribution, compared_with_itself, pulled_baseline)
    return next((found for look in looks if (found := look(evidence)) is not None), None)


COMPARES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
PASSES = RESHAPES | {"expand"}
HINGES = ("relu", "maximum", "softplus")


@dataclass(frozen=True)
class Side:
    """One operand of a comparison: the trained layers behind it, and what happens to it after the last of them."""

    layers: frozenset[str]  # by their weights
    passes: frozenset[int]  # the operations in which those layers were used
    after: tuple[Operation, ...]  # operations of the loss, up to the first of a layer

    @property
    def is_return(self) -> bool:
        """A number from outside plus something learned: r + γ V(s')."""
        return any(op.name in ("add", "sub", "rsub") and mixes(op) for op in self.after)


def trained_teacher(evidence: Evidence) -> Verdict | None:
    """Weights that an average of others overwrites, and that an optimizer steps along a gradient as well."""
    held = {id(p) for o in evidence.optimizers for g in o.param_groups for p in g["params"]}
    named = {n: p for n, p in named_parameters(evidence).items() if id(p) in held and has_gradient(p)}
    parameters = {slot.index for slot in evidence.tape.parameters}
    for operation in evidence.tape.operations:
        if operation.phase == "optimizer" or operation.in_backward is not None:
            continue
        for slot in operation.writes:
            name = evidence.slot(slot).name
            sources = [
                s
                for s in operation.reads
                if s != slot and reaches_parameter(evidence, s, parameters - {slot})
            ]
            if name in named and sources:
                return confirmed(
                    "missing-stop-gradient/teacher",
                    f"{name} follows other weights ({operation.name}) and is also trained: it gets a gradient",
                    where=place_of(name.rpartition(".")[0], operation.line),
                    confidence="proven",  # written by one and stepped by another
                )
    return None


def reaches_parameter(evidence: Evidence, slot: int, parameters: set[int]) -> bool:
    """A parameter, or a few elementwise operations away from one."""
    for _ in range(4):
        if slot in parameters:
            return True
        maker = evidence.maker(slot)
        if maker is None or not maker.reads:
            return False
        slot = maker.reads[0]
    return False


def pulled_distribution(evidence: Evidence) -> Verdict | None:
    """Σ p log q, of two networks that have no layer in common, with gradient into the one that makes p."""
    pairs: list[tuple[Operation, Side, Side]] = []
    for operation in evidence.forward:
        refs = [arg for arg in operation.args if isinstance(arg, Ref)]
        if operation.name != "mul" or len(refs) != 2 or not all(r.tracked for r in refs):
            continue
        if not in_the_loss(evidence, operation):
            continue
        makers = [through_views(evidence, ref.slot) for ref in refs]
        names = [maker.name if maker else "" for maker in makers]
        if sorted(names) == ["_log_softmax", "_softmax"]:
            p, log_q = (side_of(evidence, refs[names.index(n)].slot) for n in ("_softmax", "_log_softmax"))
            pairs.append((operation, p, log_q))
    predicting = {layer for _, _, prediction in pairs for layer in prediction.layers}
    for operation, target, prediction in pairs:
        if target.layers and prediction.layers and not target.layers & predicting:
            return verdict_of(operation, target, "a distribution that another network puts out")
    return None


def compared_with_itself(evidence: Evidence) -> Verdict | None:
    """Prediction and target both carry gradient into the same layers, and one of them is clearly the target."""
    loss = [op for op in evidence.forward if in_the_loss(evidence, op)]
    tail = evidence.flow.tail  # a ReLU between layers is no margin, though `model.forward(x)` shows no module
    if any(is_hinge(op) and not tail.isdisjoint(op.makes) for op in loss):
        return None  # a margin between pairs wants both sides
    for operation in loss:
        refs = [arg for arg in operation.args if isinstance(arg, Ref)]
        if (
            operation.name not in (*COMPARES, "sub", "mul")
            or len(refs) != 2
            or not all(r.tracked for r in refs)
        ):
            continue
        if evidence.slot(refs[0].slot).shape != evidence.slot(refs[1].slot).shape:
            continue
        first, second = (side_of(evidence, ref.slot) for ref in refs)
        if not first.layers & second.layers or first.passes & second.passes:
            continue  # other layers, or two outputs of one pass: nothing is compared with itself
        if operation.name == "sub" and not is_squared(evidence, operation):
            continue
        if operation.name == "mul" and (
            not is_similarity(evidence, operation) or is_a_score(evidence, operation)
        ):
            continue
        for target, prediction in ((second, first), (first, second)):
            predicted = target.layers < prediction.layers
            returned = target.is_return and not prediction.is_return and operation.name != "mul"
            if predicted or returned:
                return verdict_of(
                    operation, target, "a return" if returned else "the branch without a predictor"
                )
        if operation.name == "mul" and first.layers == second.layers:
            return verdict_of(operation, second, "the other view", level="warning")
    return None


def in_the_loss(evidence: Evidence, operation: Operation) -> bool:
    """Outside of all modules, or behind the last layer: some models compute their loss themselves."""
    return not operation.module or not evidence.flow.tail.isdisjoint(operation.makes)


def is_hinge(operation: Operation) -> bool:
    limited = operation.name in ("clamp", "clamp_min") and len(operation.args) > 1 and operation.args[1] == 0
    return limited or operation.name in HINGES


def is_similarity(evidence: Evidence, product: Operation) -> bool:
    """A product of two embeddings that is summed over its last dimension: the cosine of two views."""
    made = product.makes[0]
    ndim = len(evidence.slot(made).shape)
    return ndim >= 2 and any(
        op.name == "sum" and made in op.reads and len(op.args) > 1 and op.args[1] in ([-1], [ndim - 1])
        for op in evidence.forward
    )


def is_a_score(evidence: Evidence, product: Operation) -> bool:
    """A product that is compared with targets of its own, as clicks or pairs are: it wants both sides."""
    flow = evidence.flow
    return any(product.makes[0] in flow.ancestors(c.prediction) for c in flow.comparisons)


def verdict_of(operation: Operation, target: Side, what: str, level: str = "problem") -> Verdict:
    layers = ", ".join(sorted({name.rpartition(".")[0] or name for name in target.layers})[:3])
    # the target is to be cut off where it is made; a comparison made in the same line stands for both
    made = next((op.line for op in target.after if op.line and op.line != operation.line), operation.line)
    return confirmed(
        "missing-stop-gradient/target",
        f"the loss compares two things that are both trained: the target, {what}, passes gradient to {layers}",
        *([f"compared at {operation.line}"] if made != operation.line else []),
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
        todo += [(ref.slot, outside) for ref in references((maker.args, maker.kwargs)) if ref.tracked]
    return Side(frozenset(layers), frozenset(passes), tuple(after))


def mixes(operation: Operation) -> bool:
    """One operand carries gradient, the other is a tensor that does not."""
    refs = [arg for arg in operation.args if isinstance(arg, Ref)]
    return len(refs) == 2 and refs[0].tracked != refs[1].tracked


def pulled_baseline(evidence: Evidence) -> Verdict | None:
    """log p · (return − value) with a value that carries gradient: the policy's loss pulls on the critic."""
    for operation in evidence.forward:
        refs = [arg for arg in operation.args if isinstance(arg, Ref)]
        if operation.name != "mul" or len(refs) != 2 or not all(r.tracked for r in refs):
            continue
        if not in_the_loss(evidence, operation):
            continue
        for advantage, other in ((refs[1].slot, refs[0].slot), (refs[0].slot, refs[1].slot)):
            maker = through_views(evidence, advantage)
            if maker is None or maker.name not in ("sub", "rsub") or not mixes(maker):
                continue
            values = [r.slot for r in references(maker.args) if r.tracked]
            if other != advantage and any(is_regressed(evidence, value, maker) for value in values):
                return confirmed(
                    "missing-stop-gradient/baseline",
                    "the advantage carries gradient: the policy's loss changes the values it is measured against",
                    f"{maker.name} at {maker.line}",
                    where=place_of("", maker.line),
                    confidence="likely",
                )
    return None


def through_views(evidence: Evidence, slot: int) -> Operation | None:
    maker = evidence.maker(slot)
    while maker is not None and maker.name in PASSES:
        maker = evidence.maker(maker.reads[0])
    return maker


def is_regressed(evidence: Evidence, value: int, advantage: Operation) -> bool:
    """Whether the same value is also compared with a target of its own, squared."""
    for operation in evidence.forward:
        if value not in operation.reads or operation is advantage:
            continue
        if operation.name in COMPARES:
            return True
        if operation.name in ("sub", "rsub") and is_squared(evidence, operation):
            return True
    return False


def is_squared(evidence: Evidence, difference: Operation) -> bool:
    """Whether what an operation makes goes into a distance."""
    made = set(difference.makes)
    distances = ("pow", "square", "abs", "linalg_vector_norm", "norm")
    return any(
        made & set(op.reads) and (op.name in distances or (op.name == "mul" and len(set(op.reads)) == 1))
        for op in evidence.forward
    )


# ratios -----------------------------------------------------------------------------------------------------

TO_THE_EXPONENTIAL = VIEWS | {"sum", "mean", "clamp", "clamp_min", "clamp_max", "mul", "neg"}
MOST = 8  # pairs that are looked at
MOVED = 0.1  # of each weight's own size


def ratios_that_cancel(evidence: Evidence) -> Iterator[Verdict]:
    """exp(new - old) or new / old, both with gradient and equal: ∂new − ∂old is 0, so nothing is learned from it.

    That they are equal now could be chance (the first epoch of PPO, a copy of a network); that they are equal
    with all weights moved at random means that they are one function.
    """
    pairs = list(ratios(evidence))[:MOST]
    slots = sorted({slot for _, one, two in pairs for slot in (one, two)})
    if not slots:
        return
    now = evidence.flow.values(slots)
    pairs = [pair for pair in pairs if are_one(now, pair[1], pair[2])]
    if not pairs:
        return
    moved = evidence.flow.values(slots, moved_at_random(evidence))
    for op, one, two in pairs:
        if not are_one(moved, one, two) or torch.equal(now[one], moved[one]):
            continue
        made = line_of(evidence, two) if one != two else None
        count = now[one].numel()
        yield confirmed(
            "missing-stop-gradient/ratio",
            f"both operands of {op.name} carry gradient and are equal in all of {count} entries, also with every "
            f"weight moved by {100 * MOVED:g} %: the ratio is 1 and its gradient 0, whatever is learned",
            f"the ratio is taken at {op.line}",
            where=place_of("", made or op.line),
            confidence="proven",  # with every weight moved
        )
        return


def ratios(evidence: Evidence) -> Iterator[tuple[Operation, int, int]]:
    """Quotients, and differences that go into an exponential: (operation, operand, operand), both with gradient."""
    flow = evidence.flow
    for op in flow.operations:
        refs = [arg for arg in op.args[:2] if isinstance(arg, Ref)]
        if op.name not in ("sub", "div") or len(refs) != 2 or not all(ref.tracked for ref in refs):
            continue
        one, two = refs[0].slot, refs[1].slot
        same_shape = evidence.slot(one).shape == evidence.slot(two).shape
        if not same_shape or torch.Size(evidence.slot(one).shape).numel() < 2:
            continue
        if op.name == "sub" and not goes_into_exponential(evidence, op):
            continue
        origins = flow.behind(one, VIEWS), flow.behind(two, VIEWS)
        # x - x.max() of one entry, x / x.clamp(...): of the one by the other, not twice computed
        if origins[0] != origins[1] and any(a in flow.ancestors(b) for a, b in (origins, origins[::-1])):
            continue
        yield op, one, two


def goes_into_exponential(evidence: Evidence, difference: Operation) -> bool:
    reach = set(difference.makes)
    for op in evidence.flow.operations:
        if op.index <= difference.index or reach.isdisjoint(op.reads):
            continue
        if op.name == "exp":
            return True
        if op.name in TO_THE_EXPONENTIAL and len(list(references(op.args))) == 1:
            reach.update(op.makes)
    return False


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


def line_of(evidence: Evidence, slot: int) -> Line | None:
    """Where an operand was made, looking through views."""
    maker = evidence.maker(evidence.flow.behind(slot, VIEWS))
    return maker.line if maker is not None else None
