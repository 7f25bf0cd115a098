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
        loss, lse, *gradients = _linear_cross_entropy(*tensors, *numbers, *wants)
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
                scale_rows(gradient, dloss)
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
    """Loss and log-sum-exp of each row of hidden (N, D); fills dhidden, and dweight, which is float32."""
    n, v = len(hidden), len(weight)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    want_gradient = dhidden is not None or dweight is not None
    rows = slab_rows(v, hidden.dtype, want_gradient)
    logits = torch.empty(min(rows, n), v, dtype=wide, device=hidden.device)
    dlogits = logits if hidden.dtype == wide else logits.new_empty(logits.shape, dtype=hidden.dtype)
    losses = torch.empty(n, dtype=wide, device=hidden.device)
    lses = torch.empty_like(losses)
    for start in range(0, n, rows):
        here = slice(start, min(start + rows, n))
        h = hidden[here]
        x, dx = logits[: len(h)], dlogits[: len(h)]
        multiply(h, weight.mT, out=x)
        losses[here], lses[here] = backend_of(x).losses_and_gradient(
            x,
            targets[here],
            None if mask is None else mask[here],
            class_weight,
            options,
            scale[here] if scale.dim() else scale,
            dx if want_gradient else None,
        )
        # forward was x = h @ weight.T, so:
        if dhidden is not None:
            torch.mm(dx, weight, out=dhidden[here])
        if dweight is not None:
            multiply(dx.mT, h, out=dweight, add=start > 0)
    return losses, lses


def slab_rows(v: int, dtype: torch.dtype, want_gradient: bool) -> int:
    """How many rows of logits, and of their gradient where it needs its own place, fit into SLAB_BYTES."""
    size = torch.finfo(dtype).bits // 8
    bytes_of_row = v * (max(size, 4) + (size if want_gradient and size < 4 else 0))
    rows = max(1, SLAB_BYTES // bytes_of_row)
    return rows // 128 * 128 or rows  # whole tiles of a matrix product


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
    """As `_by_slabs` for hidden (..., D), with the gradients in the dtypes of what they are gradients of."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    dhidden = flat.new_empty(flat.shape if want_dhidden else (0,))
    sum_dweight = weight.new_empty(weight.shape if want_dweight else (0,), dtype=wide)
    if not len(flat):
        sum_dweight.zero_()
    # an fp16 gradient divided by the number of positions would underflow: divide after the products
    late = scale if hidden.dtype == torch.float16 and scale.dim() == 0 else None
    losses, lse = _by_slabs(
        flat,
        weight,
        targets.reshape(-1),
        None if mask is None else mask.reshape(-1),
        class_weight,
        options,
        torch.ones_like(scale) if late is not None else scale.reshape(-1) if scale.dim() else scale,
        dhidden if want_dhidden else None,
        sum_dweight if want_dweight else None,
    )
    if late is not None:
        dhidden.mul_(late)
        sum_dweight.mul_(late)
    dhidden = dhidden.view(hidden.shape) if want_dhidden else dhidden
    shape = targets.shape
    return losses.view(shape), lse.view(shape), dhidden, sum_dweight.to(weight.dtype)


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
