"""The cross-entropy nobody has to suspect: loss and gradient in one pass over the logits, any vocabulary.

The gradient is computed with the loss, so the logits are read once and the gradient is written once; backward
only multiplies it, and not even that when the incoming gradient is 1. The sum of exponentials leaves the
target out, so that a confident target keeps a right loss and gradient (`LossOptions` has the formula).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.kernels import torch_loss
from gradproof.kernels.loss_options import (
    LossOptions,
    check_loss_inputs,
    check_targets_in_range,
    valid_positions,
)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
    in_place: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of logits (..., V) and targets (...) over the positions that are valid.

    Positions with mask False or target ignore_index do not count. The loss is float32 (float64 for float64
    logits). With all positions masked, or none there, it is 0 and so is the gradient. A row with a logit of
    +inf or NaN, or of nothing but -inf, has loss and gradient NaN. A target out of range raises on a CPU; on
    a GPU, where looking would wait, it makes its loss and its row of the gradient NaN, and
    `check_targets_in_range` names it. `in_place` writes the gradient over the logits. The log-sum-exp is
    returned detached: its gradient is what `z_loss` is for.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    check_loss_inputs(logits.shape, logits.dtype, targets, mask, weight)
    wants_gradient = logits.requires_grad and torch.is_grad_enabled()
    numbers = (ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    if in_place and wants_gradient:
        loss, lse = _InPlace.apply(logits, targets, mask, weight, options)
    else:
        loss, lse, _ = _cross_entropy(logits, targets, mask, weight, *numbers, wants_gradient)
    return (loss, lse) if return_lse else loss


def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each position, scale times the gradient into its place, by the best backend."""
    return torch_loss.losses_and_gradient(logits, targets, mask, weight, options, scale, gradient)


def scale_of_loss(
    targets: Tensor, mask: Tensor | None, weight: Tensor | None, options: LossOptions
) -> Tensor:
    """What the reduction multiplies each position's loss by."""
    if options.reduction != "mean":
        return torch.ones((), dtype=torch.float64, device=targets.device)
    return torch_loss.mean_scale(targets, mask, weight, options.ignore_index)


def reduce_losses(losses: Tensor, scale: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return (losses.sum(dtype=torch.float64) * scale).to(losses.dtype)


def check_targets(targets: Tensor, mask: Tensor | None, ignore_index: int, classes: int) -> None:
    """On a CPU, raise for a target out of range; elsewhere looking would wait."""
    if targets.is_cpu:
        check_targets_in_range(targets, valid_positions(targets, mask, ignore_index), classes)


def _loss(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    check_targets(targets, mask, options.ignore_index, logits.shape[-1])
    scale = scale_of_loss(targets, mask, weight, options)
    losses, lse = losses_and_gradient(logits, targets, mask, weight, options, scale, gradient)
    return reduce_losses(losses, scale, options.reduction), lse


# ---- as operators, so that torch.compile sees one node


@torch.library.custom_op("gradproof::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    want_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp and, if wanted, the gradient (else an empty tensor)."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    gradient = torch.empty(logits.shape if want_gradient else (0,), dtype=logits.dtype, device=logits.device)
    place = gradient if want_gradient else None
    return *_loss(logits, targets, mask, weight, options, place), gradient


@_cross_entropy.register_fake
def _(
    logits, targets, mask, weight, ignore_index, label_smoothing, z_loss, softcap, reduction, want_gradient
):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    lse = torch.empty(targets.shape, dtype=dtype, device=logits.device)
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    return loss, lse, logits.new_empty(logits.shape if want_gradient else (0,))


def _keep_gradient(ctx, inputs, output) -> None:
    logits, targets, mask, weight, *ctx.numbers, want_gradient = inputs
    ctx.save_for_backward(logits, targets, mask, weight)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.gradient = output[2] if want_gradient else None


def _backward(ctx, dloss: Tensor, dlse: Tensor, dgradient: Tensor) -> tuple[Tensor | None, ...]:
    gradient, ctx.gradient = ctx.gradient, None  # handed on, so that autograd need not copy it
    if gradient is None:  # a second backward through a retained graph
        gradient = _cross_entropy(*(t for t in ctx.saved_tensors), *ctx.numbers, True)[2]
    scale_rows(gradient, dloss)
    return gradient, *9 * [None]


_cross_entropy.register_autograd(_backward, setup_context=_keep_gradient)


@torch.library.custom_op("gradproof::scale_rows", mutates_args={"gradient"})
def scale_rows(gradient: Tensor, scale: Tensor) -> None:
    """Multiply the rows of gradient (..., V) by one number, or one for each row; a single 1 costs nothing."""
    if scale.dim() == 0 and scale.is_cpu and scale.item() == 1:
        return
    gradient.mul_(scale.to(gradient.dtype) if scale.dim() == 0 else scale[..., None].to(gradient.dtype))


@torch.library.custom_op("gradproof::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp; the logits become their gradient."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    return _loss(logits, targets, mask, weight, options, logits)


@_cross_entropy_.register_fake
def _(logits, targets, mask, weight, ignore_index, label_smoothing, z_loss, softcap, reduction):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    lse = torch.empty(targets.shape, dtype=dtype, device=logits.device)
    return (torch.empty_like(lse) if reduction == "none" else lse.new_empty(())), lse


class _InPlace(torch.autograd.Function):
    """Cross-entropy whose gradient lies where the logits were."""

    @staticmethod
    def forward(ctx, logits, targets, mask, weight, options):
        place = logits.detach()
        numbers = (options.ignore_index, options.label_smoothing, options.z_loss, options.softcap)
        loss, lse = _cross_entropy_(place, targets, mask, weight, *numbers, options.reduction)
        ctx.mark_non_differentiable(lse)
        ctx.gradient = place
        return loss, lse

    @staticmethod
    def backward(ctx, dloss, dlse):
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise UserError("cross_entropy(in_place=True) can go backward once: its logits are gone")
        scale_rows(gradient, dloss)
        return gradient, None, None, None, None
