"""Cross-entropy by torch operators: cache-sized chunks of rows, each turned into its gradient in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradproof.kernels.loss_options import LossOptions, valid_positions

# N positions, V vocabulary, R rows of a chunk
CHUNK = 1 << 21  # elements: 8 MiB of float32, a share of the last cache
FAR = 48.0  # exp(FAR) * 1e6 classes * 1e5 positions is still far from the end of float32


def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of each position, and scale times the gradient into its place if there is one.

    logits are (..., V); `gradient` may be the logits themselves; `scale` is one number or one a position.
    """
    working = torch.float64 if logits.dtype == torch.float64 else torch.float32
    v = logits.shape[-1]
    valid = valid_positions(targets, mask, options.ignore_index).reshape(-1)
    y = torch.where(valid, targets.reshape(-1).long(), 0)[:, None]  # (N, 1)
    w = None if weight is None else weight.double()
    w_y = torch.ones(len(y), dtype=torch.float64, device=y.device) if w is None else w[y[:, 0]]
    scale = scale.double().reshape(-1).expand(len(y))
    all_valid = bool(valid.all()) if valid.is_cpu else False  # elsewhere a look would wait
    shift, x_y, e_y, others, spread = torch.empty(5, len(y), dtype=torch.float64, device=y.device)

    step = max(1, CHUNK // v)
    start = 0
    for x, out in _row_blocks(logits, logits if gradient is None else gradient, step):
        here = slice(start, start := start + len(x))
        in_place = gradient is not None and out.dtype == working and out.stride(-1) == 1
        e = (x if gradient is logits else out.copy_(x)) if in_place else x.to(working, copy=True)
        if options.softcap:
            bent = e.div_(options.softcap).tanh_()
            slope = 1 - bent * bent
            bent.mul_(options.softcap)
        if options.label_smoothing:
            spread[here] = e.sum(1, dtype=torch.float64) if w is None else e.double() @ w
        shift[here], x_y[here], e_y[here], others[here] = _exponentiate(e, y[here])
        if gradient is None:
            continue
        rows = (shift[here], e_y[here], others[here], scale[here], w_y[here])
        _turn_into_gradient(e, y[here], *rows, w, options)
        if options.softcap:
            e.mul_(slope)
        if not all_valid:
            e.masked_fill_(~valid[here, None], 0.0)
        if not in_place:
            out.copy_(e)

    log_d = (others + e_y).log()
    lse = shift + log_d
    # lse - x[y] = log(1 + others / e[y]): the difference itself cancels for a confident target
    nll = torch.where(e_y >= others, torch.log1p(others / e_y), log_d - x_y)
    losses = (1 - options.label_smoothing) * w_y * nll + options.z_loss * lse * lse
    if options.label_smoothing:
        losses += options.label_smoothing / v * (_total(w, v) * lse - spread)
    losses = torch.where(valid, losses, 0.0)
    lse = torch.where(valid, lse, 0.0)
    return losses.to(working).view(targets.shape), lse.to(working).view(targets.shape)


def mean_scale(targets: Tensor, mask: Tensor | None, weight: Tensor | None, ignore_index: int) -> Tensor:
    """1 / what the mean divides by, in float64, counted on the device; 1 where nothing is valid."""
    valid = valid_positions(targets, mask, ignore_index)
    counts = valid if weight is None else weight.double()[torch.where(valid, targets, 0).long()] * valid
    return torch.where(valid.any(), 1 / counts.sum(dtype=torch.float64), 1.0)


def add_losses(losses: Tensor, scale: Tensor) -> Tensor:
    """scale * sum of the losses."""
    return (losses.sum(dtype=torch.float64) * scale).to(losses.dtype)


def scale_rows(gradient: Tensor, scale: Tensor) -> None:
    """Multiply the rows of gradient (..., V) by one number, or by one each; on a CPU a 1 costs nothing."""
    if scale.dim() == 0 and scale.is_cpu and scale.item() == 1:
        return
    gradient.mul_(scale.to(gradient.dtype) if scale.dim() == 0 else scale[..., None].to(gradient.dtype))


def _exponentiate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (R, V) becomes exp(x - shift), 0 at the target; shift, the target's x and exp, the others' sum."""
    shift = _exact_shift(x.amax(1))
    if not x.is_cpu or shift.any():
        x.sub_(shift[:, None])
    x_y = x.gather(1, y)[:, 0]
    e = x.exp_()
    e_y = e.gather(1, y)[:, 0]
    e.scatter_(1, y, 0.0)
    return shift, x_y, e_y, _accurate_row_sums(e)


def _exact_shift(largest: Tensor) -> Tensor:
    """What to subtract before exp: an integer, near the row's largest, for which x - shift does not round.

    Subtracting the largest itself rounds by half an ulp of the difference, and exp turns that into a relative
    error of 1e-6 from a difference of 16 on: all of a confident target's loss.
    """
    return largest.ceil().clamp_max(0) + (largest.floor() - FAR).clamp_min(0)


def _accurate_row_sums(e: Tensor) -> Tensor:
    """Sums over dim 1 in float64 of sums of 64 in the tensor's own precision."""
    whole = e.shape[1] // 64 * 64
    tail = e[:, whole:].sum(1, dtype=torch.float64)
    return tail + e[:, :whole].unflatten(1, (-1, 64)).sum(2).sum(1, dtype=torch.float64) if whole else tail


def _turn_into_gradient(
    e: Tensor,
    y: Tensor,
    shift: Tensor,
    e_y: Tensor,
    others: Tensor,
    scale: Tensor,
    w_y: Tensor,
    w: Tensor | None,
    options: LossOptions,
) -> None:
    """e (R, V) becomes (hard w_y + pull) e / d - soft w, as d(lse)/dx = e / d; the target's from others."""
    v = e.shape[1]
    hard, soft = (1 - options.label_smoothing) * w_y, options.label_smoothing / v
    d = others + e_y
    if not soft and not options.z_loss:
        factor = hard * scale / d
        target = -factor * others
    else:
        pull = soft * _total(w, v) + 2 * options.z_loss * (shift + d.log())
        factor = (hard + pull) * scale / d
        target = ((pull * e_y - hard * others) / d - soft * w_y) * scale
    e.mul_(factor[:, None].to(e.dtype))
    if soft:
        e.sub_((soft * scale[:, None] * (1.0 if w is None else w)).to(e.dtype))
    e.scatter_(1, y, target[:, None].to(e.dtype))


def _total(w: Tensor | None, v: int) -> Tensor | int:
    return v if w is None else w.sum()


def _row_blocks(x: Tensor, out: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same blocks of up to `step` rows of two tensors (..., V), as views, whatever their strides."""
    if x.dim() <= 2:
        yield from zip(torch.atleast_2d(x).split(step), torch.atleast_2d(out).split(step), strict=True)
    elif all(t.stride(0) == t.shape[1] * t.stride(1) for t in (x, out)):
        yield from _row_blocks(x.flatten(0, 1), out.flatten(0, 1), step)
    else:  # e.g. logits[:, :-1], which is no matrix
        for pair in zip(x, out, strict=True):
            yield from _row_blocks(*pair, step)
