"""Does dropout drop, and does BatchNorm look at the batch, while the model trains? And how much is dropped?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from gradproof.experiments.verdict import Verdict, causes_of, confirmed, each, excluded
from gradproof.instruments.evidence import Evidence
from gradproof.instruments.flow import place_of

DROPOUTS = (nn.modules.dropout._DropoutNd,)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
MUCH, NEARLY_ALL = 0.8, 0.9  # dropped: who keeps a fifth may mean it, who keeps a tenth has mixed up p


def is_it_in_train_mode(evidence: Evidence) -> Iterator[Verdict]:
    yield from causes_of(each(evidence, left_in_eval, dropped_too_much))


def left_in_eval(evidence: Evidence) -> Iterator[Verdict]:
    """A part that is trained, and whose dropout or BatchNorm is in eval mode; BatchNorm frozen by itself is no slip."""
    held = (p for o in evidence.optimizers for g in o.param_groups for p in g["params"])
    trained = {id(p) for p in held if p.requires_grad and p.grad is not None}  # not those frozen since
    in_eval = 0
    for prefix, root in evidence.models.items():
        for path, part in evaluated_parts(root, prefix):
            affected = [
                (join(path, name), module) for name, module in part.named_modules() if depends_on_mode(module)
            ]
            in_eval += len(affected)
            if not affected or not any(id(p) in trained for p in weights_beside_norms(part)):
                continue
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


def dropped_too_much(evidence: Evidence) -> Iterator[Verdict]:
    """A dropout that keeps a tenth: what was meant as the probability to keep."""
    operations = evidence.tape.operations
    for operation, following in zip(operations, [*operations[1:], None], strict=True):
        share = None
        if operation.name == "native_dropout" and isinstance(operation.args[1], float):
            share = operation.args[1]
        elif operation.name == "bernoulli_" and following is not None and following.name == "div_":
            keep = operation.args[1] if len(operation.args) > 1 else 0.5
            share = 1 - keep if isinstance(keep, float) and following.args[1] == keep else None
        if share is None or operation.in_backward is not None:
            continue
        if share >= MUCH:
            yield confirmed(
                "train-eval-mode-error/keep-probability",
                f"{100 * share:g} % of the values are dropped: each step trains {100 * (1 - share):g} % of the network",
                where=place_of(operation.module, operation.line),
                fix=f"p is the share that is dropped: {1 - share:.2g} instead of {share:.2g}?",
                level="problem" if share >= NEARLY_ALL else "warning",
                confidence="likely",
            )
            return


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
