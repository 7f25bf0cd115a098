"""Cross-entropy of a linear layer's output without the output: a bounded slab of logits at a time.

Each slab of rows goes through three matrix products: its logits in float32, its rows of the gradient of
hidden, and its share of the gradient of weight, which is accumulated in float32. N is the number of positions, D the
width of hidden, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradproof.errors import UserError
from gradproof.kernels.cross_entropy import (
    backend_of,
    check_targets,
    direct,
    reduce_losses,
    scale_of_loss,
    scale_rows,
)
from gradproof.kernels.linear_by_columns import by_columns
from gradproof.kernels.loss_options import LossOptions, check_loss_inputs
from gradproof.kernels.product import multiply

SLAB_BYTES = 1 << 29  # logits and their gradient together


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    least_memory: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`cross_entropy(hidden @ weight.T, targets)` of hidden (..., D) and weight (V, D), in bounded memory.

    `class_weight` is what `cross_entropy` calls weight. Gradients are computed with the loss, except for
    reduction="none", whose backward computes the logits again.

    Memory: 0.5 GiB beside the gradients, and for 16-bit weights the float32 sum of the weight's gradient, or all
    logits' gradients where they take less. `least_memory` does without these two: bfloat16 weights for which they
    would not fit into the 0.5 GiB have their logits made twice, which takes a fourth product.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    if least_memory and (label_smoothing or softcap):
        raise UserError(
            "linear_cross_entropy(least_memory=True) goes with neither label_smoothing nor softcap; leave it out, "
            "which costs the memory of a float32 copy of the weight"
        )
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        raise UserError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; "
            "they must be (..., D) and (V, D)"
        )
    if hidden.dtype != weight.dtype:
        raise UserError(f"hidden is {hidden.dtype} and weight {weight.dtype}; they must have one dtype")
    shape = torch.Size((*hidden.shape[:-1], len(weight)))
    check_loss_inputs(shape, hidden.dtype, targets, mask, class_weight)
    numbers = (ignore_index, label_smoothing, z_loss, options.softcap, reduction, least_memory)
    wants = tuple(t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight))
    if not any(wants) or torch.compiler.is_compiling():
        loss, lse, _, _ = _linear_cross_entropy(hidden, weight, targets, mask, class_weight, *numbers, *wants)
    else:
        loss, lse = _WithGradients.apply(hidden, weight, targets, mask, class_weight, numbers, wants)
    return (loss, lse) if return_lse else loss


class _WithGradients(torch.autograd.Function):
    """The loss whose gradients are made with it, except for reduction="none"."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, mask, class_weight, numbers, wants):
        ctx.numbers, ctx.wants = numbers, wants
        tensors = (hidden, weight, targets, mask, class_weight)
        loss, lse, *gradients = direct(_linear_cross_entropy)(*tensors, *numbers, *wants)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(lse)
        ctx.gradients = None if numbers[4] == "none" else gradients
        return loss, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, dlse):
        gradients, ctx.gradients = ctx.gradients, None  # handed on, so that autograd need not copy them
        if gradients is None:  # reduction="none", or a second backward through a retained graph
            gradients = _linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.numbers, *ctx.wants)
        else:
            for gradient in gradients:
                direct(scale_rows)(gradient, dloss)
        return *_wanted(gradients, ctx.wants), *5 * [None]


def _wanted(gradients, wants):
    return [gradient if wanted else None for gradient, wanted in zip(gradients, wants, strict=True)]


def _by_slabs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each row of hidden (N, D); fills dhidden and dweight."""
    n = len(hidden)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    losses = torch.empty(n, dtype=wide, device=hidden.device)
    lses = torch.empty_like(losses)
    # an fp16 gradient divided by the number of positions would underflow: divide after the products
    late = scale if hidden.dtype == torch.float16 and scale.dim() == 0 else None
    scale = torch.ones_like(scale) if late is not None else scale
    v, rows = len(weight), _padded(weight)
    slabs = _choose_slabs(n, v, rows, dhidden, dweight)
    logits, dlogits = _allocate(slabs, rows, dweight)
    total = dweight
    in_parts = n > len(dlogits) or late is not None
    if dweight is not None and (slabs.where == "dweight" or in_parts or len(rows) > v):
        total = torch.empty_like(rows, dtype=wide if in_parts else rows.dtype)
    for start in range(0, n, len(dlogits)):
        stop = min(start + len(dlogits), n)
        first = start
        while first < stop:
            x = _lend(logits, dlogits[first - start : stop - start]) if slabs.where == "apart" else logits
            here = slice(first, first := min(first + len(x), stop))
            x = x[: here.stop - here.start]
            multiply(hidden[here], rows.mT, out=x)
            losses[here], lses[here] = backend_of(x).losses_and_gradient(
                x[:, :v],
                targets[here],
                None if mask is None else mask[here],
                class_weight,
                options,
                scale[here] if scale.dim() else scale,
                None if dhidden is dweight is None else dlogits[here.start - start : here.stop - start, :v],
            )
        dx = dlogits[: stop - start]
        _clear_behind_rows(dx, v)
        # forward was x = hidden @ weight.T, so:
        if dhidden is not None:
            torch.mm(dx, rows, out=dhidden[start:stop])
        if total is not None:
            multiply(dx.mT, hidden[start:stop], out=total, add=start > 0)
    if late is not None:
        for gradient in (dhidden, total):
            None if gradient is None else gradient.mul_(late)
    if dweight is not None and total is not None and total is not dweight and n:
        dweight.copy_(total[:v])
    return losses, lses


def _padded(weight: Tensor) -> Tensor:
    """The weight with rows of zeros up to a multiple of 64 on a GPU: products of an odd size are slow there.

    The logits of such rows are 0 and their gradients are kept at 0, so they add nothing to any product.
    """
    missing = -len(weight) % 64 if weight.is_cuda else 0
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


@dataclass(frozen=True)
class Slabs:
    """How many rows of logits and of their gradients are held at a time, and where the gradients lie."""

    rows: int
    gradient_rows: int
    where: str  # "logits": over them; "dweight": in its memory, which is filled later; "apart"


def _choose_slabs(n: int, v: int, weight: Tensor, dhidden: Tensor | None, dweight: Tensor | None) -> Slabs:
    """For n positions, a vocabulary of v and its weight, padded."""
    stride, width = weight.shape
    wide = max(4, weight.element_size())
    size = SLAB_BYTES - (weight.nbytes if stride > v else 0)
    if weight.element_size() == wide or dhidden is dweight is None:
        rows = _whole_tiles(size // (wide * stride))
        found = Slabs(rows, rows, "logits")
    else:
        keep = 2 * width if dweight is not None and weight.dtype == torch.bfloat16 else 0
        room, total = (0, 0) if dweight is None else (v * width // stride, 4 * weight.numel())
        found = slabs_of_16_bits(n, 4 * stride, size, room, keep, total)
    return replace(found, rows=max(1, min(found.rows, n)), gradient_rows=max(1, min(found.gradient_rows, n)))


def slabs_of_16_bits(n: int, row: int, size: int, room: int, keep: int, total: int) -> Slabs:
    """For n rows of float32 logits, of `row` bytes each, and their 16-bit gradients, of half that.

    If all gradients fit into `size` bytes beside a few logits, dweight is one product. If not, it needs a float32 sum,
    of `total` bytes. Where that is small, the gradients go over the logits, in what it leaves of `size`. Where it is
    large, up to `keep` gradients take no more memory than the sum, and all are kept instead; beyond, the more rows the
    gradient has, the less often the sum is read and written, and dweight, not filled yet, has room for `room`.
    """
    most = _whole_tiles(size // row)
    few = min(512, _whole_tiles(most // 2))
    own = _whole_tiles((size - few * row) // (row // 2))
    if n <= own:
        return Slabs(few, own, "apart")
    if total <= size // 2:
        most = _whole_tiles((size - total) // row)
        return Slabs(most, most, "logits")
    if n <= keep:
        return Slabs(most, n, "apart")
    return Slabs(most, _whole_tiles(room), "dweight") if room > most else Slabs(most, most, "logits")


def _allocate(slabs: Slabs, weight: Tensor, dweight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory for rows of logits and rows of their gradient, each with a column for each row of weight."""
    stride = len(weight)
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    logits = torch.empty(slabs.rows, stride, dtype=wide, device=weight.device)
    if slabs.where == "logits":
        return logits, logits.view(weight.dtype)[:, :stride]
    if slabs.where == "dweight" and dweight is not None:
        place = dweight.view(-1)[: slabs.gradient_rows * stride]
        return logits, place.view(slabs.gradient_rows, stride)
    return logits, torch.empty(slabs.gradient_rows, stride, dtype=weight.dtype, device=weight.device)


READ_FURTHER = 31  # columns: AMX multiplies tiles of 32 numbers of 16 bits


def _clear_behind_rows(dlogits: Tensor, v: int) -> None:
    """Zeros behind the first v columns: where the weight has rows of zeros, and what CPUs read of the logits behind.

    oneDNN's products for AMX read rows of 16 bits that have a gap behind them up to a whole tile, times zero: what lies
    there must not be NaN.
    """
    rows, columns = dlogits.shape
    gap = dlogits.stride(0) - columns if dlogits.is_cpu else 0
    if columns + gap > v:
        wide = dlogits.as_strided((rows, columns + min(gap, READ_FURTHER)), dlogits.stride())
        wide[:, v:] = 0


def _lend(logits: Tensor, dlogits: Tensor) -> Tensor:
    """Memory for more logits where the last of the gradients to come have it: for a third of their rows."""
    rows, stride = len(dlogits) // 3 // 128 * 128, dlogits.shape[1]
    if rows <= len(logits) or stride % 2:
        return logits
    return dlogits[-2 * rows :].view(-1).view(logits.dtype).view(rows, stride)


def _is_small(n: int, weight: Tensor, dhidden: Tensor | None, dweight: Tensor | None) -> bool:
    """Whether slabs, with the float32 sum they need where they have not all rows, take no more than SLAB_BYTES."""
    slabs = _choose_slabs(n, len(weight), weight, dhidden, dweight)
    apart = slabs.gradient_rows * weight.element_size() if slabs.where == "apart" else 0
    total = 4 * weight.shape[1] if slabs.gradient_rows < n else 0
    return len(weight) * (4 * slabs.rows + apart + total) <= SLAB_BYTES


def _whole_tiles(rows: int) -> int:
    """At least one row, and a multiple of what a matrix product takes at a time."""
    return max(1, rows // 128 * 128 or rows)


@torch.library.custom_op("gradproof::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    least_memory: bool,
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp, and the gradients that are wanted (else empty tensors)."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_targets(targets, mask, ignore_index, len(weight))
    scale = scale_of_loss(targets, mask, class_weight, options)
    wants = (want_dhidden and reduction != "none", want_dweight and reduction != "none")
    losses, lse, dhidden, dweight = _losses_and_gradients(
        hidden, weight, targets, mask, class_weight, options, scale, least_memory, *wants
    )
    return reduce_losses(losses, scale, reduction), lse, dhidden, dweight


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    class_weight: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    least_memory: bool,
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_by_slabs` for hidden (..., D), with new memory for the gradients that are wanted."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    dhidden = torch.empty_like(flat, memory_format=torch.contiguous_format) if want_dhidden else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if want_dweight else None
    if dweight is not None and not len(flat):
        dweight.zero_()
    targets, mask = targets.reshape(-1), None if mask is None else mask.reshape(-1)
    scale = scale.reshape(-1) if scale.dim() else scale
    small = (
        not least_memory or weight.dtype != torch.bfloat16 or _is_small(len(flat), weight, dhidden, dweight)
    )
    if dweight is not None and not small:
        w_y = None if class_weight is None else class_weight[targets.clamp(0, len(weight) - 1)]
        losses, lse = by_columns(
            flat, weight, targets, mask, options, scale if w_y is None else scale * w_y,
            dhidden, dweight, SLAB_BYTES,
        )  # fmt: skip
        losses = losses if w_y is None else losses * w_y
    else:
        losses, lse = _by_slabs(flat, weight, targets, mask, class_weight, options, scale, dhidden, dweight)
    nothing = hidden.new_empty(0)
    return (
        losses.view(hidden.shape[:-1]),
        lse.view(hidden.shape[:-1]),
        nothing if dhidden is None else dhidden.view(hidden.shape),
        nothing.clone() if dweight is None else dweight,
    )


@_linear_cross_entropy.register_fake
def _(
    hidden,
    weight,
    targets,
    mask,
    class_weight,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    reduction,
    least_memory,
    want_dhidden,
    want_dweight,
):
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    lse = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
    early = reduction != "none"
    loss = lse.new_empty(()) if early else torch.empty_like(lse)
    dhidden = hidden.new_empty(hidden.shape if want_dhidden and early else (0,))
    return loss, lse, dhidden, weight.new_empty(weight.shape if want_dweight and early else (0,))


@torch.library.custom_op("gradproof::linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    dlosses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    least_memory: bool,
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients from the gradient of the loss, with the logits computed again."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    scale = scale_of_loss(targets, mask, class_weight, options) * dlosses
    _, _, dhidden, dweight = _losses_and_gradients(
        hidden, weight, targets, mask, class_weight, options, scale, least_memory, want_dhidden, want_dweight
    )
    return dhidden, dweight


@_linear_cross_entropy_backward.register_fake
def _(dlosses, hidden, weight, *others):
    want_dhidden, want_dweight = others[-2:]
    return (
        hidden.new_empty(hidden.shape if want_dhidden else (0,)),
        weight.new_empty(weight.shape if want_dweight else (0,)),
    )


def _keep_gradients(ctx, inputs, output) -> None:
    tensors, ctx.numbers, ctx.wants = inputs[:5], inputs[5:-2], inputs[-2:]
    ctx.late = inputs[9] == "none"  # the reduction
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*(tensors if ctx.late else output[2:]))


def _backward(ctx, dloss: Tensor, *_) -> tuple[Tensor | None, ...]:
    if ctx.late:
        gradients = _linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.numbers, *ctx.wants)
    else:
        gradients = tuple(gradient * dloss.to(gradient.dtype) for gradient in ctx.saved_tensors)
    return *_wanted(gradients, ctx.wants), *11 * [None]


_linear_cross_entropy.register_autograd(_backward, setup_context=_keep_gradients)
