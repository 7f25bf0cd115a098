"""Does gradient reach what it must not? Targets, baselines and teachers that the loss pulls towards the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import RESHAPES
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.owners import has_gradient, named_parameters
from gradproof.tape.operations import Operation, Ref, references

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


def does_gradient_reach_what_it_must_not(evidence: Evidence) -> Iterator[Verdict]:
    """The first slip found: a trained teacher, a target that depends on what is trained, a baseline that is."""
    for look in (trained_teacher, pulled_distribution, compared_with_itself, pulled_baseline):
        found = look(evidence)
        if found is not None:
            yield found
            return


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
                    fix="compute the teacher under torch.no_grad(), and leave its parameters out of the optimizer",
                    lasting=True,
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
    if any(is_hinge(op) for op in loss):
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
        fix="compute the target under torch.no_grad(), or detach() it",
        level=level,
        confidence="likely",
        lasting=True,
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
                    fix="detach the values where the advantage is computed: returns - values.detach()",
                    confidence="likely",
                    lasting=True,
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
