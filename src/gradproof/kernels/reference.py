"""The cross-entropy as its formula says, in float64: slow, obvious, what every backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from gradproof.kernels.loss_options import LossOptions, valid_positions


def reference_loss_and_gradient(
    logits: Tensor, targets: Tensor, mask: Tensor | None, weight: Tensor | None, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp and gradient in float64 of logits (N, V) and targets (N,)."""
    v = logits.shape[1]
    valid = valid_positions(targets, mask, options.ignore_index)
    y = torch.where(valid, targets, 0).long()[:, None]
    w = torch.ones(v, dtype=torch.float64, device=logits.device) if weight is None else weight.double()
    x = logits.double()
    slope = torch.ones_like(x)
    if options.softcap:
        bent = torch.tanh(x / options.softcap)
        x, slope = options.softcap * bent, 1 - bent * bent

    largest = x.amax(1, keepdim=True)
    e = torch.exp(x - largest)
    d = e.sum(1)
    lse = largest[:, 0] + d.log()
    p = e / d[:, None]
    p_others = p.scatter(1, y, 0.0).sum(1)  # 1 - p[y], without the cancellation
    p_target = p.gather(1, y)[:, 0]
    # lse - x[y] = log(1 + others / e[y]): the difference itself cancels for a confident target
    nll = torch.where(
        p_target > 0.5, torch.log1p(p_others / p_target), d.log() - (x - largest).gather(1, y)[:, 0]
    )
    w_y = w[y[:, 0]]
    hard, soft = (1 - options.label_smoothing), options.label_smoothing / v
    losses = hard * w_y * nll + options.z_loss * lse * lse
    if soft:
        losses = losses + soft * (w * (lse[:, None] - x)).sum(1)

    pull = soft * w.sum() + 2 * options.z_loss * lse  # what else multiplies the softmax
    dx = p * (hard * w_y + pull)[:, None] - soft * w
    dx.scatter_(1, y, (p_target * pull - hard * w_y * p_others - soft * w_y)[:, None])
    dx = dx * slope

    losses = torch.where(valid, losses, 0.0)
    dx = torch.where(valid[:, None], dx, 0.0)
    if options.reduction == "none":
        return losses, lse, dx
    divisor = torch.where(valid, w_y, 0.0).sum() if options.reduction == "mean" else torch.ones(())
    if not valid.any():
        divisor = torch.ones(())  # all masked: the loss is 0 and so is the gradient
    return losses.sum() / divisor, lse, dx / divisor
