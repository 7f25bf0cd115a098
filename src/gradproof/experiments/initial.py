"""Is the starting point the trouble? Units that begin as copies of each other, and weights of the wrong size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from gradproof.experiments.evidence import Evidence, Verdict, confirmed
from gradproof.experiments.flow import VIEWS
from gradproof.experiments.nonfinite import place_of
from gradproof.experiments.owners import named_parameters
from gradproof.tape.operations import Ref

TIMES = 2  # taped steps in which units are still the same
PRODUCTS = ("mm", "conv", "linear", "matmul", "lstm", "gru", "rnn")  # in the names of matrix products
LARGE_GAIN = 4.0  # PyTorch's own layers begin at 0.6 to 1.4
WIDE = 12.0  # of what a sine is taken of, as a standard deviation: four half waves
LARGE_LOSS = 3.0  # times the loss of guessing


def are_units_all_the_same(evidence: Evidence) -> Iterator[Verdict]:
    """All rows of a weight equal, and all rows of its gradient too: they stay copies of one unit for ever.

    A last layer of zeros is fine: its rows are equal, their gradients are not.
    """
    count = evidence.memory.setdefault("same units", {})
    twins = []
    for name, parameter in named_parameters(evidence).items():
        gradient = parameter.grad
        if parameter.dim() < 2 or parameter.shape[0] < 2 or gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        count[name] = count.get(name, 0) + 1 if same_rows(parameter.detach()) and same_rows(gradient) else 0
        if count[name] >= TIMES:
            twins.append((name, parameter.detach(), gradient))
    if not twins:
        return
    name, weight, gradient = twins[0]
    value = "zero" if not bool(weight.any()) else f"{float(weight.flatten()[0]):.3g}"
    what = "have no gradient" if not bool(gradient.any()) else "get the same gradient"
    yield confirmed(
        "bad-init/symmetric",
        f"the {weight.shape[0]} units of {name} are equal (first entry {value}) and {what}: they can never differ",
        *([f"so are those of {', '.join(n for n, _, _ in twins[1:4])}"] if len(twins) > 1 else []),
        where=place_of_start(evidence, name),
        fix=f"initialise {name} at random, for example nn.init.xavier_uniform_; zeros only in a last layer",
        lasting=True,
    )


def place_of_start(evidence: Evidence, name: str) -> str:
    """The module of a parameter, and the line of the script that gave it its first values, where one did."""
    parameter = named_parameters(evidence).get(name)
    known = evidence.memory.get("facts", {}).get("_initialised", {}).get(id(parameter))
    module = name.rpartition(".")[0] or name
    return f"{module} ({known[1]})" if known is not None and known[0]() is parameter else module


def same_rows(tensor: Tensor) -> bool:
    rows = tensor.reshape(tensor.shape[0], -1)
    size = float(rows.abs().max())
    return bool((rows - rows[:1]).abs().max() <= 1e-6 * size)


def is_it_too_large(evidence: Evidence) -> Iterator[Verdict]:
    """Layers that multiply what they get by far more than one, when the first losses are far above those of a guess."""
    if evidence.step > 1:
        return
    wide = sines_too_wide(evidence)
    if wide is not None:
        yield wide
        return
    guess = loss_of_guessing(evidence)
    first = next((loss for loss in evidence.losses if math.isfinite(loss)), math.nan)
    named, summed = weights_at_start(evidence), summed_over(evidence)
    gains = {name: gain for name, p in named.items() if (gain := gain_of(p, summed.get(name))) is not None}
    large = sorted((name for name, gain in gains.items() if gain >= LARGE_GAIN), key=lambda n: -gains[n])
    if not large or inputs_are_large(evidence):
        return
    far = guess is not None and first > LARGE_LOSS * guess
    lines = [f"{name} multiplies what it gets by {gains[name]:.3g} (usual: 0.5 to 1.4)" for name in large[:3]]
    if far:
        lines.append(f"the first loss is {first:.3g}, that of guessing {guess:.3g}")
    name = large[0]
    weight = named[name]
    std = float(weight.detach().std()) / gains[name]
    yield confirmed(
        "bad-init/too-large",
        *lines,
        where=place_of_start(evidence, name),
        fix=f"initialise {name} with a standard deviation of about {std:.2g}, not {float(weight.detach().std()):.2g}",
        if_troubled=not far,
        confidence="proven" if far else "likely",
        lasting=True,
    )


def sines_too_wide(evidence: Evidence) -> Verdict | None:
    """Behind the first layer, sines of numbers that span many periods: neighbours have nothing in common any more."""
    flow = evidence.flow
    waves = [
        op for op in flow.operations if op.name in ("sin", "cos") and op.reads and op.reads[0] in flow.tracked
    ]
    for op in waves:
        behind = flow.ancestors(op.reads[0])
        if sum(not behind.isdisjoint(layer.makes) for layer in flow.layers) < 2:
            continue
        value = flow.values([op.reads[0]]).get(op.reads[0])
        size = float(value.double().square().mean().sqrt()) if value is not None else 0.0
        if size > WIDE:
            return confirmed(
                "bad-init/sines-too-wide",
                f"what goes into {op.name} has the size {size:.3g} at the start, {size / math.pi:.0f} half waves",
                where=place_of(op.module, op.line),
                fix=f"start the weights of the layer before it {size:.2g} times smaller (a SIREN: sqrt(6 / n) / omega)",
                if_troubled=True,
                lasting=True,
            )
    return None


def weights_at_start(evidence: Evidence) -> dict[str, Tensor]:
    """The weights before the taped step, less those that a single step changes much: they tell of the step."""
    factors, known = multiplied(evidence), set(named_parameters(evidence))
    found = {}
    for slot in evidence.tape.parameters:
        value, change = evidence.tape.leaf_value(slot.index), evidence.updates.get(slot.index)
        steady = change is None or float(change.double().norm()) < 0.2 * float(value.double().norm())
        if slot.name in known and slot.index in factors and steady:
            found[slot.name] = value
    return found


def gain_of(parameter: Tensor, summed: int | None = None) -> float | None:
    """The root of fan-in times mean square: by how much a layer stretches independent inputs."""
    if parameter.dim() < 2 or not parameter.is_floating_point() or parameter.is_sparse:
        return None
    fan_in = summed or parameter[0].numel()
    if fan_in < 2 or parameter.shape[0] < 2:
        return None
    return math.sqrt(fan_in) * float(parameter.detach().square().mean().sqrt())


def summed_over(evidence: Evidence) -> dict[str, int]:
    """How many products a matrix product adds up for one output, by the name of its weight: an ensemble's weight
    (members, in, out) sums over `in`, as x @ weight does."""
    found = {}
    for op in evidence.forward:
        pair = [arg.slot for arg in op.args if isinstance(arg, Ref)][-2:]
        if op.name not in ("mm", "addmm", "bmm", "baddbmm") or len(pair) != 2:
            continue
        inner = evidence.slot(pair[0]).shape[-1]
        found.update({evidence.slot(evidence.flow.behind(slot, VIEWS)).name: inner for slot in pair})
    return found


def multiplied(evidence: Evidence) -> set[int]:
    """Parameters that something is multiplied with; not tables whose rows are picked or added."""
    products = [op for op in evidence.forward if any(word in op.name for word in PRODUCTS)]
    return {evidence.flow.behind(slot, VIEWS) for op in products for slot in op.reads}


def loss_of_guessing(evidence: Evidence) -> float | None:
    """ln of the number of classes, where the loss is a cross-entropy."""
    for operation in evidence.forward:
        if operation.name in ("nll_loss_forward", "nll_loss2d_forward", "_log_softmax"):
            shape = evidence.slot(operation.reads[0]).shape
            classes = shape[1] if len(shape) > 1 else shape[0]
            return math.log(classes) if classes > 1 else None
    return None


def inputs_are_large(evidence: Evidence) -> bool:
    for slot in evidence.roles.inputs:
        if slot.dtype.is_floating_point and slot.shape:
            value = evidence.tape.leaf_value(slot.index)
            if value.numel() and float(value.abs().float().mean()) > 10:
                return True
    return False
