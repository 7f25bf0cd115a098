"""Cross-entropy of a linear layer's output without the output: a bounded slab of logits at a time.

Each slab of rows goes through three matrix products: its logits in float32, its rows of the gradient of
hidden, and its share of the gradient of weight, which is accumulated in float32.
"""

from __future__ import annotations

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
from gradproof.kernels.loss_options import LossOptions, check_loss_inputs

# N positions, D width of hidden, V vocabulary
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
) -> Tensor | tuple[Tensor, Tensor]:
    """`cross_entropy(hidden @ weight.T, targets)` of hidden (..., D) and weight (V, D), in bounded memory.

    `class_weight` is what `cross_entropy` calls weight. Gradients are computed with the loss, except for
    reduction="none", whose backward computes the logits again.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        raise UserError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; "
            "they must be (..., D) and (V, D)"
        )
    if hidden.dtype != weight.dtype:
        raise UserError(f"hidden is {hidden.dtype} and weight {weight.dtype}; they must have one dtype")
    shape = torch.Size((*hidden.shape[:-1], len(weight)))
    check_loss_inputs(shape, hidden.dtype, targets, mask, class_weight)
    numbers = (ignore_index, label_smoothing, z_loss, options.softcap, reduction)
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
        ctx.gradients = None if numbers[-1] == "none" else gradients
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
    logits, dlogits, borrowed = _slabs(n, v, rows, dhidden, dweight)
    total = dweight
    in_parts = n > len(dlogits) or late is not None
    if dweight is not None and (borrowed or in_parts or len(rows) > v):
        total = torch.empty_like(rows, dtype=wide if in_parts else rows.dtype)
    for start in range(0, n, len(dlogits)):
        stop = min(start + len(dlogits), n)
        for first in range(start, stop, len(logits)):
            here = slice(first, min(first + len(logits), stop))
            x = logits[: here.stop - first]
            multiply(hidden[here], rows.mT, out=x)
            losses[here], lses[here] = backend_of(x).losses_and_gradient(
                x[:, :v],
                targets[here],
                None if mask is None else mask[here],
                class_weight,
                options,
                scale[here] if scale.dim() else scale,
                None if dhidden is dweight is None else dlogits[first - start : here.stop - start, :v],
            )
        dx = dlogits[: stop - start]
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


def _slabs(
    n: int, v: int, weight: Tensor, dhidden: Tensor | None, dweight: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Memory for rows of logits and for rows of their gradient, and whether that is borrowed from dweight.

    The more rows the gradient has, the less often dweight is read and written; before it is filled, its
    memory is free for that. Of a padded weight the first v columns are real, the others hold zeros.
    """
    stride, width = weight.shape
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    in_place = (
        weight.dtype == wide or dhidden is dweight is None
    )  # the gradient goes over the logits, if at all
    size = SLAB_BYTES - (weight.nbytes if stride > v else 0)
    room = 0 if dweight is None else v * width // stride
    keep = 2 * width if dweight is not None and weight.dtype == torch.bfloat16 else 0
    rows, gradient_rows, borrowed = slab_rows(n, wide.itemsize * stride, size, in_place, room, keep)
    logits = torch.empty(max(1, min(rows, n)), stride, dtype=wide, device=weight.device)
    gradient_rows = max(1, min(gradient_rows, n))
    if in_place:
        return logits, logits, False
    if borrowed and dweight is not None:
        place = dweight.view(-1)[: gradient_rows * stride].view(gradient_rows, stride)
    else:
        place = torch.empty(gradient_rows, stride, dtype=weight.dtype, device=weight.device)
    place[:, v:].zero_()
    return logits, place, borrowed


def slab_rows(n: int, row: int, size: int, in_place: bool, room: int, keep: int) -> tuple[int, int, bool]:
    """How many of n rows of logits, of `row` bytes, and of gradients, of half that, to hold at a time.

    Both fit into `size` bytes. dweight has `room` for gradients, which it lends (the third answer) if that is more.
    But up to `keep` rows of gradients take no more memory than the float32 sum of dweight that a second slab
    would need: then all are kept, and dweight is one product.
    """
    most = _whole_tiles(size // row)
    if in_place:
        return most, most, False
    few = min(512, _whole_tiles(most // 2))
    own = _whole_tiles((size - few * row) // (row // 2))
    if n <= own:
        return few, own, False
    if n <= keep:
        return most, n, False
    return (most, _whole_tiles(room), True) if room > own else (few, own, False)


def _whole_tiles(rows: int) -> int:
    """At least one row, and a multiple of what a matrix product takes at a time."""
    return max(1, rows // 128 * 128 or rows)


def multiply(a: Tensor, b: Tensor, *, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out += a @ b, summed in the precision of out, which may be wider than a and b."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out) if add else torch.mm(
            a, b, out_dtype=out.dtype, out=out
        )
    elif add:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


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
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp, and the gradients that are wanted (else empty tensors)."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_targets(targets, mask, ignore_index, len(weight))
    scale = scale_of_loss(targets, mask, class_weight, options)
    wants = (want_dhidden and reduction != "none", want_dweight and reduction != "none")
    losses, lse, dhidden, dweight = _losses_and_gradients(
        hidden, weight, targets, mask, class_weight, options, scale, *wants
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
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_by_slabs` for hidden (..., D), with new memory for the gradients that are wanted."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    dhidden = torch.empty_like(flat, memory_format=torch.contiguous_format) if want_dhidden else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if want_dweight else None
    if dweight is not None and not len(flat):
        dweight.zero_()
    losses, lse = _by_slabs(
        flat,
        weight,
        targets.reshape(-1),
        None if mask is None else mask.reshape(-1),
        class_weight,
        options,
        scale.reshape(-1) if scale.dim() else scale,
        dhidden,
        dweight,
    )
    nothing = hidden.new_empty(0)
    return (
        losses.view(targets.shape),
        lse.view(targets.shape),
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
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients from the gradient of the loss, with the logits computed again."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    scale = scale_of_loss(targets, mask, class_weight, options) * dlosses
    _, _, dhidden, dweight = _losses_and_gradients(
        hidden, weight, targets, mask, class_weight, options, scale, want_dhidden, want_dweight
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
    *tensors, ctx.ignore_index, ctx.smoothing, ctx.z_loss, ctx.softcap, ctx.reduction, _, _ = inputs
    ctx.wants = inputs[-2:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*(tensors if ctx.reduction == "none" else output[2:]))


def _backward(ctx, dloss: Tensor, *_) -> tuple[Tensor | None, ...]:
    if ctx.reduction == "none":
        numbers = (ctx.ignore_index, ctx.smoothing, ctx.z_loss, ctx.softcap, ctx.reduction)
        gradients = _linear_cross_entropy_backward(dloss, *ctx.saved_tensors, *numbers, *ctx.wants)
    else:
        gradients = tuple(gradient * dloss.to(gradient.dtype) for gradient in ctx.saved_tensors)
    return *_wanted(gradients, ctx.wants), *10 * [None]


_linear_cross_entropy.register_autograd(_backward, setup_context=_keep_gradients)
