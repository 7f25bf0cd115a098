"""How far rounding alone may take what the backward of one operation returns: a room around each entry.

    room = 8 · (unit · (|derivative| + spread) + fine · terms) + what underflow takes

unit    the distance from 1 to the next number of the coarsest format among operands, results and gradients; TF32's for
        float32 products on a GPU, which convolutions use unasked
fine    the same for the format that sums are kept in: float32, also where terms are bfloat16 or float16; the own one
        for the operators that add straight into their result (`index`, `gather`, interpolation)
spread  the size of what is rounded on the way and then cancels, by family below
terms   the sum of the terms' magnitudes

The 8: a backward rounds an intermediate up to four times, by half a unit each, and the worst of ten million entries
lies at five standard deviations. What cancels in the result does not cancel in its room: nothing here is relative to
the result alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradproof.numerics.formats import format_of
from gradproof.tape.attention import attention_weights
from gradproof.tape.operations import Operation, Ref, Tape, replace_references
from gradproof.tape.operators import BATCH_NORMS, FUSED_ATTENTION, argument

TIMES = 8.0
TF32 = 2.0**-10
PRODUCTS = {
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "mul", "div", "mul_", "div_",
    "addcmul", "addcdiv", "linear",
}  # fmt: skip
# linear in what they are given, with weights that are not negative
LINEAR = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "permute", "t", "expand", "slice", "select",
    "unsqueeze", "squeeze", "add", "add_", "sub", "sub_", "rsub", "sum", "mean", "cat", "stack", "split",
    "split_with_sizes", "unbind", "_to_copy", "clone", "alias", "neg", "native_dropout", "constant_pad_nd", "repeat",
    "unfold", "diagonal", "flip", "roll", "index", "gather", "embedding", "index_select", "masked_fill", "where",
    "index_add", "scatter", "scatter_add", "index_put", "avg_pool1d", "avg_pool2d", "avg_pool3d", "tril", "triu",
    "_adaptive_avg_pool2d", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d",
    "nll_loss_forward", "nll_loss2d_forward", "max_pool2d_with_indices", "cumsum", "contiguous", "copy_", "im2col",
}  # fmt: skip
# of these, the ones that send one number to one place: nothing is summed
ONE_TERM = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "permute", "t", "unsqueeze", "squeeze", "slice",
    "select", "split", "split_with_sizes", "unbind", "cat", "stack", "_to_copy", "clone", "neg", "native_dropout",
    "masked_fill", "flip", "roll", "sum", "mean",
}  # fmt: skip
# and the ones whose derivative does not look at what they were given
BLIND = LINEAR - {"nll_loss_forward", "nll_loss2d_forward", "max_pool2d_with_indices"}
ADDS_IN_PLACE = {
    "index", "gather", "embedding", "index_select", "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d",
    "upsample_bilinear2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "avg_pool2d", "unfold", "repeat",
    "cumsum", "im2col",
}  # fmt: skip
BATCH = BATCH_NORMS | {
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "_native_batch_norm_legit_no_stats",
}

Values = dict[int, Tensor]  # by slot; real numbers in float64
Derive = Callable[[Values, Values], Values]  # (operands, gradients in) -> gradients by slot


def room_for_rounding(
    tape: Tape,
    operation: Operation,
    operands: Values,
    gradients: Values,
    expected: Values,
    derive: Derive,
    unit: float,
) -> tuple[Values, Values]:
    """(rooms, sizes): how far from `expected` rounding may take each entry, and the size of what was summed there."""
    terms, fine = _terms(tape, operation, operands, gradients, expected, derive, unit)
    smallest = _smallest(tape, operation, unit)
    count = max((g.numel() for g in gradients.values()), default=1)
    rooms, sizes = {}, {}
    for slot, derived in expected.items():
        spread, total = terms[slot]
        added = math.sqrt(max(1.0, count / max(derived.numel(), 1)))
        rooms[slot] = TIMES * (unit * (derived.abs() + spread) + fine * total + smallest * added)
        sizes[slot] = derived.abs() + spread + (total if operation.name in LINEAR else 0.0)
    return rooms, sizes


def unit_of(tape: Tape, operation: Operation, gradients: dict[int, Tensor]) -> float:
    """The coarsest rounding among what an operation reads and makes and the gradients that came to it."""
    slots = [tape.slots[slot] for slot in (*operation.reads, *operation.makes)]
    dtypes = {slot.dtype for slot in slots} | {gradient.dtype for gradient in gradients.values()}
    found = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point and d.itemsize >= 2), default=0.0)
    on_gpu = any(slot.device.type == "cuda" for slot in slots)
    multiplies = operation.name in PRODUCTS - {"mul", "div", "mul_", "div_"} or "rnn" in operation.name
    return max(found, TF32) if on_gpu and multiplies and torch.float64 not in dtypes else found


def _smallest(tape: Tape, operation: Operation, unit: float) -> float:
    """What underflow takes: half of the smallest number above zero, or all of a subnormal where a GPU drops them."""
    slots = [tape.slots[slot] for slot in (*operation.reads, *operation.makes)]
    halves = {slot.dtype for slot in slots if slot.dtype in (torch.float16, torch.bfloat16)}
    if torch.float16 in halves:
        return format_of(torch.float16).smallest
    return 1e-300 if unit < 1e-10 else torch.finfo(torch.float32).tiny  # bfloat16 reaches as far as float32


def _terms(
    tape: Tape,
    operation: Operation,
    operands: Values,
    gradients: Values,
    expected: Values,
    derive: Derive,
    unit: float,
) -> tuple[dict[int, tuple[Tensor, Tensor]], float]:
    """({slot: (spread, terms)}, fine) of an operation's family."""
    name = operation.name
    fine = min(unit, torch.finfo(torch.float32).eps)
    if name in ADDS_IN_PLACE:
        fine = unit
    special = _special(tape, operation, operands, gradients, unit)
    if special is not None:
        zero = {slot: torch.zeros_like(derived) for slot, derived in expected.items()}
        return {s: (special.get(s, zero[s]), special.get(s, zero[s])) for s in expected}, fine
    if name in PRODUCTS and len(_floats(operation, operands)) > 1:
        # each term is a product of entries: the derivative at the squares is the sum of squared terms, and a random
        # walk through them is its root; partial sums of n terms round √n times
        floats = {slot: operands[slot] for slot in _floats(operation, operands)}
        squares = derive(_map(floats, torch.square), _map(gradients, torch.square))
        walked = math.sqrt(max((g.numel() for g in gradients.values()), default=1))
        roots = {s: squares[s].abs().sqrt() if s in squares else expected[s].abs() for s in expected}
        return {s: (root, walked * root) for s, root in roots.items()}, fine
    if name in ONE_TERM:
        return {s: (torch.zeros_like(derived), derived.abs()) for s, derived in expected.items()}, fine
    if name in LINEAR or name in PRODUCTS:
        total = derive(operands, _map(gradients, torch.abs))
        found = {s: total[s].abs() if s in total else expected[s].abs() for s in expected}
        return {s: (torch.zeros_like(part), part) for s, part in found.items()}, fine
    if _is_pointwise(operation, gradients, expected):
        # a slope is made of numbers around 1 that may cancel (1 − y², Φ + xφ), where y was rounded itself
        gradient = next(iter(gradients.values())).abs()
        return {s: (gradient.expand_as(d), torch.zeros_like(d)) for s, d in expected.items()}, fine
    return _unknown(operands, gradients, expected, derive), fine


def _unknown(
    operands: Values, gradients: Values, expected: Values, derive: Derive
) -> dict[int, tuple[Tensor, Tensor]]:
    """Gradients with their signs drawn anew show how large the terms are; the tensor's own size stands beside it."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(2):
        signs = {
            s: (torch.randint(0, 2, g.shape, generator=generator, dtype=torch.float64) * 2 - 1).to(g.device)
            for s, g in gradients.items()
        }
        drawn.append(derive(operands, {s: g * signs[s] for s, g in gradients.items()}))
    found = {}
    for slot, derived in expected.items():
        others = [part[slot].abs() for part in drawn if slot in part]
        size = sum(others, derived.abs()) / (1 + len(others))
        spread = size + size.square().mean().sqrt()
        found[slot] = (spread, spread * math.sqrt(max(1, size.numel())))
    return found


def _is_pointwise(operation: Operation, gradients: Values, expected: Values) -> bool:
    same = {g.shape for g in gradients.values()} == {d.shape for d in expected.values()}
    return torch.Tag.pointwise in getattr(operation.func, "tags", ()) and same


def _floats(operation: Operation, operands: Values) -> list[int]:
    return [slot for slot in dict.fromkeys(operation.reads) if operands[slot].is_floating_point()]


def _map(values: Values, function: Callable[[Tensor], Tensor]) -> Values:
    return {slot: function(value) for slot, value in values.items()}


# -- families whose terms are made inside the kernel


def _special(
    tape: Tape, operation: Operation, operands: Values, gradients: Values, unit: float
) -> Values | None:
    name = operation.name
    gradient = gradients.get(operation.makes[0]) if operation.makes else None
    if gradient is None:
        return None
    named = _named(operation)
    if name in ("_softmax", "_safe_softmax"):
        return {named("self").slot: _softmax_terms(operands[named("self").slot], gradient, named("dim"))}
    if name == "_log_softmax":
        return {named("self").slot: _log_softmax_terms(operands[named("self").slot], gradient, named("dim"))}
    if name in FUSED_ATTENTION:
        return _attention_terms(operation, operands, gradient, unit)
    if (
        name == "native_layer_norm"
        or name == "_fused_rms_norm"
        or name == "native_group_norm"
        or name in BATCH
    ):
        return _norm_terms(tape, operation, operands, gradient, unit)
    return None


def _named(operation: Operation) -> Callable[[str], Any]:
    return lambda name: argument(operation.func, operation.args, operation.kwargs, name)


def _softmax_terms(x: Tensor, g: Tensor, dim: int) -> Tensor:
    """y (g − Σ y g): both parts, since they cancel where one y is nearly 1."""
    y = x.softmax(dim)
    return y * (g.abs() + (y * g.abs()).sum(dim, keepdim=True))


def _log_softmax_terms(x: Tensor, g: Tensor, dim: int) -> Tensor:
    """g − exp(y) Σ g: y is rounded relative to itself and to the largest score, and exp(y) by as much."""
    y = x.log_softmax(dim)
    off = 1 + y.abs().clamp_max(1e4) + x.amax(dim, keepdim=True).abs()
    return g.abs() + y.exp() * off * g.abs().sum(dim, keepdim=True)


def _norm_terms(tape: Tape, operation: Operation, operands: Values, g: Tensor, unit: float) -> Values:
    """rstd (g − mean g − x̂ mean g x̂): three parts that cancel for few features; mean and rstd are rounded, too."""
    named = _named(operation)
    x_ref, weight, bias = named("input"), named("weight"), named("bias")
    by_channel = operation.name in BATCH or operation.name == "native_group_norm"
    x, axes = _over_what(operation, operands[x_ref.slot])
    mean = x.mean(axes, keepdim=True)
    if operation.name == "_fused_rms_norm":
        mean = torch.zeros_like(mean)
    eps = named("eps") if named("eps") is not None else named("epsilon")
    rstd = ((x - mean).square().mean(axes, keepdim=True) + (eps or 1e-6)).rsqrt()
    xhat = ((x - mean) * rstd).abs()
    # the statistics round relative to the mean: an offset of a thousand deviations costs a thousand of their units
    kept = [tape.slots[slot].dtype for slot in operation.makes[1:2]]
    coarse = max((torch.finfo(dtype).eps for dtype in kept if dtype.is_floating_point), default=0.0) / unit
    off = 1 + coarse * mean.abs() * rstd
    scaled = g.abs()
    if isinstance(weight, Ref):
        scale = operands[weight.slot].abs()
        scaled = scaled * (scale.reshape([1, -1] + [1] * (g.dim() - 2)) if by_channel else scale)
    scaled = scaled.reshape(x.shape)
    parts = scaled.mean(axes, keepdim=True) + xhat * (scaled * xhat).mean(axes, keepdim=True)
    found = {x_ref.slot: (rstd * (scaled + parts) * off).reshape(g.shape)}
    over = [i for i in range(g.dim()) if (i != 1 if by_channel else i not in axes)]
    for ref, each in ((weight, g * (xhat + off).reshape(g.shape)), (bias, g)):
        if isinstance(ref, Ref):
            found[ref.slot] = (each.square().sum(over).sqrt() if over else each.abs()).reshape(
                operands[ref.slot].shape
            )
    return found


def _over_what(operation: Operation, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What is normalised, and over which dimensions."""
    named = _named(operation)
    if operation.name == "native_group_norm":
        return x.reshape(named("N"), named("group"), -1), (2,)
    if operation.name in BATCH:
        return x, tuple(i for i in range(x.dim()) if i != 1)
    return x, tuple(range(x.dim() - len(named("normalized_shape")), x.dim()))


def _attention_terms(operation: Operation, operands: Values, g: Tensor, unit: float) -> Values:
    """dS = P (dP − D), D = Σ g o: P, o and dS are rounded to the operands' format before they are multiplied on."""
    args = replace_references((operation.args, operation.kwargs), lambda ref: operands.get(ref.slot, ref))
    weights, key, value, factor = attention_weights(operation.func, *args)
    query = args[0][0]
    out, slopes = weights @ value, g @ value.mT
    along = (weights * slopes).sum(-1, keepdim=True)
    rounded = (g * out).square().sum(-1, keepdim=True).sqrt()
    # scores are summed in float32: what they round by is what the weights are off by
    scores = 1 + torch.finfo(torch.float32).eps / unit * factor * (query.abs() @ key.abs().mT)
    inside = weights * scores * (slopes.abs() + along.abs() + rounded)
    found = (
        factor * ((inside.square() @ key.square()).sqrt() + rounded * (weights @ key.abs())),
        factor * (inside.square().mT @ query.square()).sqrt(),
        ((weights * scores).square().mT @ g.square()).sqrt(),
    )
    refs = operation.args[:3]
    sizes = [operands[ref.slot] for ref in refs]
    return {ref.slot: _per_head(part, size) for ref, part, size in zip(refs, found, sizes, strict=True)}


def _per_head(part: Tensor, like: Tensor) -> Tensor:
    """Grouped queries: several heads read one key."""
    if part.shape[1] == like.shape[1]:
        return part
    return part.unflatten(1, (like.shape[1], -1)).square().sum(2).sqrt()
