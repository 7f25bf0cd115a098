"""Does dropout drop, and does BatchNorm look at the batch, while the model trains? And how much is dropped?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.update import held
from gradproof.tape.operations import Operation

DROPOUTS = (nn.modules.dropout._DropoutNd,)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
MUCH, NEARLY_ALL = 0.8, 0.9  # dropped: who keeps a fifth may mean it, who keeps a tenth has mixed up p


def is_it_in_train_mode(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, left_in_eval, dropped_too_much))


def left_in_eval(evidence: Evidence) -> Iterator[Verdict]:
    """A part that is trained, and whose dropout or BatchNorm is in eval mode; BatchNorm frozen by itself is no slip."""
    trained = {
        id(p) for p in held(evidence) if p.requires_grad and p.grad is not None
    }  # not those frozen since
    in_eval = 0
    for prefix, root in evidence.models.items():
        for path, part in evaluated_parts(root, prefix):
            affected = [
                (join(path, n), module) for n, module in part.named_modules() if depends_on_mode(module)
            ]
            in_eval += len(affected)
            if affected and any(id(p) in trained for p in weights_beside_norms(part)):
                yield verdict_of(evidence, path, affected)
    known = sum(depends_on_mode(module) for root in evidence.models.values() for module in root.modules())
    if known and not in_eval:
        said = f"all {known} modules whose work depends on it are in train mode"
        yield excluded("train-eval-mode-error/eval-left-on", said)


def evaluated_parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules in eval mode."""
    if not module.training:
        yield path, module
        return
    for name, child in module.named_children():
        yield from evaluated_parts(child, join(path, name))


def depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, DROPOUTS):
        return module.p > 0
    return isinstance(module, BATCH_NORMS) and module.track_running_stats


def weights_beside_norms(part: nn.Module) -> Iterator[nn.Parameter]:
    for module in part.modules():
        if not isinstance(module, NORMS):
            yield from module._parameters.values()  # type: ignore[misc]


def verdict_of(evidence: Evidence, path: str, affected: list[tuple[str, nn.Module]]) -> Verdict:
    lines = []
    dropouts = [name for name, module in affected if isinstance(module, DROPOUTS)]
    norms = [(name, module) for name, module in affected if isinstance(module, BATCH_NORMS)]
    if dropouts:
        lines.append(f"{', '.join(dropouts[:3])} drop nothing while training (step {evidence.step})")
    if norms:
        still = all(not module.num_batches_tracked for _, module in norms)
        what = "their first running statistics" if still else "running statistics that stand still"
        lines.append(f"{', '.join(name for name, _ in norms[:3])} normalise with {what} while training")
    called = evidence.facts.eval_line
    if called:
        lines.append(f"eval() was last called at {called}, and no train() followed")
    where = path or affected[0][0]
    return confirmed(
        "train-eval-mode-error/eval-left-on",
        *lines,
        where=f"{where} ({called}: eval())" if called else where,
        confidence="proven",  # the mode that the modules were in
    )


def dropped_too_much(evidence: Evidence) -> Verdict | None:
    """A dropout that keeps a tenth: what was meant as the probability to keep."""
    operations = evidence.tape.operations
    for op, following in zip(operations, [*operations[1:], None], strict=True):
        share = dropped_by(op, following) if op.in_backward is None else 0.0
        if share >= MUCH:
            return confirmed(
                "train-eval-mode-error/keep-probability",
                f"{100 * share:g} % of the values are dropped: each step trains {100 * (1 - share):g} % of the network",
                at=op,
                fix=f"p is the share that is dropped: {1 - share:.2g} instead of {share:.2g}?",
                level="problem" if share >= NEARLY_ALL else "warning",
                confidence="likely",
            )
    return None


def dropped_by(op: Operation, following: Operation | None) -> float:
    """By a dropout of PyTorch's, or by a mask that is drawn, and divided by the share that it keeps."""
    number = op.args[1] if len(op.args) > 1 else None
    if op.name == "native_dropout" and isinstance(number, float):
        return number
    drawn = op.name == "bernoulli_" and following is not None and following.name == "div_"
    divided = drawn and following is not None and following.args[1] == number
    return 1 - number if divided and isinstance(number, float) else 0.0


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
