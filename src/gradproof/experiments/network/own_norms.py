"""Normalisations that a script writes itself: over the batch in place of the features, or by a factor without limit."""

from __future__ import annotations

from torch import nn

from gradproof.experiments.verdict import Verdict, confirmed
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import VIEWS, Flow
from gradproof.instruments.walk import operands
from gradproof.tape.operations import Operation

FAMILY = "normalization-error"
SPREADS = ("var", "std", "var_mean", "std_mean")
# what may stand between a tensor and the factor it is rescaled with
WALK = VIEWS | {
    "add", "sqrt", "div", "mul", "rsqrt", "reciprocal", "pow", "square", "sub", "neg", "exp", "log",
}  # fmt: skip
REDUCES = {"mean", "sum", "linalg_vector_norm", "norm", "var", "std", "amax"}
FARTHEST = 24  # operations behind a factor that are looked at
HUGE_FACTOR = 1e3  # what has shrunk so far is mostly noise, and its gradient grows by as much


def over_the_batch(evidence: Evidence) -> Verdict | None:
    """x less its mean over axis 0, scaled by parameters of the same module, which keeps no running statistics.

    With running statistics it would be a BatchNorm; without, what a sample becomes depends on its company, in
    evaluation, too, and a sample alone becomes zero.
    """
    trained = {slot.index for slot in evidence.tape.parameters}
    for op in evidence.forward:
        mean = evidence.maker(op.reads[1]) if op.module and op.name == "sub" and len(op.reads) == 2 else None
        shape = evidence.slot(op.reads[0]).shape if op.reads else ()
        if mean is None or mean.name != "mean" or mean.module != op.module or mean.reads[0] != op.reads[0]:
            continue
        inside = [other for other in evidence.forward if other.module == op.module]
        scaled = any(other.name in ("mul", "addcmul") and trained & set(other.reads) for other in inside)
        spread = any(other.name in SPREADS and is_over_batch(other) for other in inside)
        if (
            is_over_batch(mean)
            and len(shape) > 1
            and scaled
            and spread
            and not keeps_statistics(evidence, op.module)
        ):
            return confirmed(
                f"{FAMILY}/over-the-batch",
                f"mean and variance of {list(shape)} are taken over axis 0, the {shape[0]} samples: what one sample "
                "becomes depends on the others, and there are no running statistics for evaluation",
                at=mean,
                confidence="likely",
            )
    return None


def is_over_batch(op: Operation) -> bool:
    return len(op.args) > 1 and op.args[1] in ([0], (0,))


def keeps_statistics(evidence: Evidence, path: str) -> bool:
    """Whether a module of that path has a buffer of numbers; unknown modules are given the benefit of the doubt."""
    for model in evidence.models.values():
        module: nn.Module | None = dict(model.named_modules()).get(path)
        if module is not None:
            return any(buffer.is_floating_point() for buffer in module.buffers())
    return True


def without_limit(evidence: Evidence) -> Verdict | None:
    """A tensor multiplied with a factor made of its own size, that nothing limits, and that has become huge."""
    flow = evidence.flow
    for op in flow.operations:
        pair = operands(op) if op.name in ("mul", "div") else []
        if len(pair) != 2 or flow.tracked.isdisjoint(pair):
            continue
        for rescaled, factor in (pair, pair[::-1])[: 2 if op.name == "mul" else 1]:
            value = flow.value(factor) if is_made_of_its_size(flow, rescaled, factor) else None
            if value is None or not value.numel():
                continue
            sizes = value.double().abs()
            largest = float(sizes.max() if op.name == "mul" else 1 / sizes.min().clamp_min(1e-300))
            if largest > HUGE_FACTOR:
                return confirmed(
                    f"{FAMILY}/unbounded-rescale",
                    f"a tensor is rescaled by its own size, by up to {largest:.3g} times: where it is nearly zero, "
                    "noise becomes signal and the gradient grows by the same factor",
                    at=op,
                    if_troubled=True,
                    confidence="likely",
                    lasting=False,
                )
    return None


def is_made_of_its_size(flow: Flow, tensor: int, factor: int) -> bool:
    """Whether a factor comes from a reduction of the tensor it is applied to, with no limit on the way."""
    source, seen = flow.behind(tensor, VIEWS), set[int]()
    waiting: list[tuple[int, bool]] = [(factor, False)]
    while waiting and len(seen) < FARTHEST:
        slot, reduced = waiting.pop()
        if reduced and flow.behind(slot, VIEWS) == source:
            return True
        maker = flow.maker(slot) if slot not in seen else None
        seen.add(slot)
        if maker is not None and maker.name in WALK | REDUCES:
            waiting += [(read, reduced or maker.name in REDUCES) for read in maker.reads]
    return False
