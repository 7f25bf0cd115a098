"""Is a normalisation that somebody wrote himself taken over the samples of the batch?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.nonfinite import place_of
from gradproof.tape.operations import Operation

SPREADS = ("var", "std", "var_mean", "std_mean")


def is_ones_own_norm_over_the_batch(evidence: Evidence) -> Iterator[Verdict]:
    """x less its mean over axis 0, scaled by parameters of the same module, which keeps no running statistics.

    With running statistics it would be a BatchNorm; without, what a sample becomes depends on its company,
    in evaluation, too, and a sample alone becomes zero.
    """
    trained = {slot.index for slot in evidence.tape.parameters}
    for operation in evidence.forward:
        maker = evidence.maker(operation.reads[1]) if is_difference(operation) else None
        if maker is None or maker.name != "mean" or maker.module != operation.module:
            continue
        shape = evidence.slot(operation.reads[0]).shape
        if maker.reads[0] != operation.reads[0] or not is_over_batch(maker) or len(shape) < 2:
            continue
        inside = [op for op in evidence.forward if op.module == operation.module]
        scaled = any(op.name in ("mul", "addcmul") and trained & set(op.reads) for op in inside)
        spread = any(op.name in SPREADS and is_over_batch(op) for op in inside)
        if scaled and spread and not keeps_statistics(evidence, operation.module):
            yield confirmed(
                "normalization-error/over-the-batch",
                f"mean and variance of {list(shape)} are taken over axis 0, the {shape[0]} samples: what one sample "
                "becomes depends on the others, and there are no running statistics for evaluation",
                where=place_of(operation.module, maker.line),
                fix="take them over the features: x.mean(-1, keepdim=True), as nn.LayerNorm does",
                confidence="likely",
                lasting=True,
            )
            return


def is_difference(operation: Operation) -> bool:
    return bool(operation.module) and operation.name == "sub" and len(operation.reads) == 2


def is_over_batch(operation: Operation) -> bool:
    return len(operation.args) > 1 and operation.args[1] in ([0], (0,))


def keeps_statistics(evidence: Evidence, path: str) -> bool:
    """Whether a module of that path has a buffer of numbers; unknown modules are given the benefit of the doubt."""
    for model in evidence.models.values():
        module: nn.Module | None = dict(model.named_modules()).get(path)
        if module is not None:
            return any(buffer.is_floating_point() for buffer in module.buffers())
    return True
