"""The cross-entropy nobody has to suspect: loss and gradient in one pass over the logits, any vocabulary.

The gradient is computed with the loss, so the logits are read once and the gradient is written once; backward
only multiplies it, and not even that when the incoming gradient is 1. The sum of exponentials leaves the
target out, so that a confident target keeps a right loss and gradient (`LossOptions` has the formula).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._library.custom_ops import CustomOpDef
from torch.autograd.function import once_differentiable

from gradproof.errors import UserError
from gradproof.kernels import cuda_loss, torch_loss
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
    `check_targets_in_range` names it. `in_place` writes the gradient over the logits; under torch.compile,
    whose backward is a kernel of its own, it changes nothing. The log-sum-exp comes back detached, as its
    gradient is what `z_loss` is for, and is 0 where masked.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap or 0.0, reduction)
    check_loss_inputs(logits.shape, logits.dtype, targets, mask, weight)
    numbers = (ignore_index, label_smoothing, z_loss, options.softcap, reduction)
    if not logits.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        loss, lse, _ = _cross_entropy(logits, targets, mask, weight, *numbers, False)
    else:
        loss, lse = _WithGradient.apply(logits, targets, mask, weight, numbers, in_place)
    return (loss, lse) if return_lse else loss


def backend_of(x: Tensor) -> ModuleType:
    """Triton for a tensor on a GPU where it is installed, torch operators elsewhere."""
    return (_triton_loss() or torch_loss) if x.is_cuda else torch_loss


@cache
def _triton_loss() -> ModuleType | None:
    return import_module("gradproof.kernels.triton_loss") if find_spec("triton") else None


def scale_of_loss(
    targets: Tensor, mask: Tensor | None, weight: Tensor | None, options: LossOptions
) -> Tensor:
    """What the reduction multiplies each position's loss by, as a number on the device."""
    if options.reduction != "mean":
        return torch.ones((), dtype=torch.float64, device=targets.device)
    return backend_of(targets).mean_scale(targets, mask, weight, options.ignore_index)


def reduce_losses(losses: Tensor, scale: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else backend_of(losses).add_losses(losses, scale)


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
    if logits.is_cuda and options.reduction != "none":
        done = cuda_loss.reduced_loss(logits, targets, mask, weight, options, gradient)
        if done:
            return done
    scale = scale_of_loss(targets, mask, weight, options)
    losses, lse = backend_of(logits).losses_and_gradient(
        logits, targets, mask, weight, options, scale, gradient
    )
    return reduce_losses(losses, scale, options.reduction), lse


def direct(operator: CustomOpDef) -> Callable:
    """The function behind an operator, unless somebody records operators: dispatch is not free."""
    return operator if _len_torch_dispatch_stack() else operator._init_fn


class _WithGradient(torch.autograd.Function):
    """Cross-entropy whose gradient is made with the loss, in place of the logits if asked for."""

    @staticmethod
    def forward(ctx, logits, targets, mask, weight, numbers, in_place):
        ctx.numbers, ctx.in_place = numbers, in_place
        if in_place:
            ctx.gradient = logits.detach()
            loss, lse = direct(_cross_entropy_)(ctx.gradient, targets, mask, weight, *numbers)
            torch.autograd.graph.increment_version(logits)  # whoever saved the logits is told
        else:
            loss, lse, ctx.gradient = direct(_cross_entropy)(logits, targets, mask, weight, *numbers, True)
            ctx.save_for_backward(logits, targets, mask, weight)
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, dlse):
        gradient, ctx.gradient = ctx.gradient, None  # handed on, so that autograd need not copy it
        if gradient is not None:
            direct(scale_rows)(gradient, dloss)
        elif ctx.in_place:
            raise UserError(
                "cross_entropy(in_place=True) goes backward once: its logits are gone; leave in_place away"
            )
        else:
            gradient = _cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.numbers)
        return gradient, None, None, None, None, None


# ---- as operators: one node for torch.compile, and for whoever records operations


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
    return *_loss(logits, targets, mask, weight, options, gradient if want_gradient else None), gradient


@_cross_entropy.register_fake
def _(logits, targets, mask, weight, ignore_index, smoothing, z_loss, softcap, reduction, want_gradient):
    gradient = logits.new_empty(logits.shape if want_gradient else (0,))
    return *_fake_loss(logits, targets, reduction), gradient


@torch.library.custom_op("gradproof::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
) -> Tensor:
    """The gradient of the logits from the gradient of the loss, by a second look at the logits."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction)
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    scale = scale_of_loss(targets, mask, weight, options) * dloss
    backend_of(logits).losses_and_gradient(logits, targets, mask, weight, options, scale, gradient)
    return gradient


@_cross_entropy_backward.register_fake
def _(dloss, logits, *others):
    return logits.new_empty(logits.shape)


def _keep_inputs(ctx, inputs, output) -> None:
    logits, targets, mask, weight, *ctx.numbers, _ = inputs
    ctx.save_for_backward(logits, targets, mask, weight)
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx, dloss: Tensor, dlse: Tensor, dgradient: Tensor) -> tuple[Tensor | None, ...]:
    return _cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.numbers), *9 * [None]


_cross_entropy.register_autograd(_backward, setup_context=_keep_inputs)


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
def _(logits, targets, mask, weight, ignore_index, smoothing, z_loss, softcap, reduction):
    return _fake_loss(logits, targets, reduction)


def _fake_loss(logits: Tensor, targets: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    lse = torch.empty(targets.shape, dtype=dtype, device=logits.device)
    return torch.empty_like(lse) if reduction == "none" else lse.new_empty(()), lse


@torch.library.custom_op("gradproof::scale_rows", mutates_args={"gradient"})
def scale_rows(gradient: Tensor, scale: Tensor) -> None:
    """Multiply the rows of gradient (..., V) by one number, or one for each row; a single 1 costs nothing."""
    backend_of(gradient).scale_rows(gradient, scale)
