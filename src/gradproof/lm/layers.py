"""The layers of a transformer as pairs of functions, forward and backward, written by hand: no autograd.

Results go into buffers that the caller owns, so that a step allocates nothing large. In a backward function
`dx` of a plain layer is written, gradients of weights are added (`+=`): micro-batches accumulate.
"""

# B batch, T time, N = B·T rows, C channels, F = 4·C feed-forward, H heads, D = C/H, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor

from gradproof.kernels.cross_entropy import check_targets, losses_and_gradient, reduce_losses, scale_of_loss
from gradproof.kernels.loss_options import LossOptions

NORM_EPS = 1e-5
CACHED_ELEMENTS = 1 << 17  # a row block of this many elements stays in a core's cache over several passes
TALL_ROWS = 512
LOSS = LossOptions()


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows for several elementwise passes in turn: cache-sized on a CPU, all rows on a GPU."""
    rows = max(1, CACHED_ELEMENTS // x.shape[1]) if x.device.type == "cpu" else len(x)
    return (slice(start, start + rows) for start in range(0, len(x), rows))


def tall_blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows for several matrix products in turn: long enough for speed, short enough for cache."""
    rows = TALL_ROWS if x.device.type == "cpu" else len(x)
    return (slice(start, start + rows) for start in range(0, len(x), rows))


def embedding_forward(tokens: Tensor, token_weight: Tensor, position_weight: Tensor, out: Tensor) -> None:
    """(B, T) tokens to (N, C) vectors: the token's plus the position's."""
    B, T = tokens.shape
    torch.index_select(token_weight, 0, tokens.reshape(-1), out=out)
    out.view(B, T, -1).add_(position_weight[:T])


def embedding_backward(dout: Tensor, tokens: Tensor, dtoken_weight: Tensor, dposition_weight: Tensor) -> None:
    B, T = tokens.shape
    # forward was out[b, t] = token_weight[tokens[b, t]] + position_weight[t]: a row read twice adds up
    dtoken_weight.index_add_(0, tokens.reshape(-1), dout)
    dposition_weight[:T] += dout.view(B, T, -1).sum(0)


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    torch.addmm(bias, x, weight.mT, out=out)


def linear_backward(
    dout: Tensor, x: Tensor, weight: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor | None
) -> None:
    # forward was out = x @ weight.mT + bias
    add_product(dweight, dout.mT, x)
    if dbias is not None:
        dbias += dout.sum(0)
    torch.mm(dout, weight, out=dx)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, inside the matrix product when all have one dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # bf16 factors, float32 total
        total += a @ b


def layernorm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, xhat: Tensor, rstd: Tensor, out: Tensor
) -> None:
    for rows in row_blocks(x):
        centred = x[rows] - x[rows].mean(1, keepdim=True)
        norm = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        torch.rsqrt(norm.square_().div_(x.shape[1]).add_(NORM_EPS), out=rstd[rows])
        torch.mul(centred, rstd[rows], out=xhat[rows])
        layernorm_output(xhat[rows], weight, bias, out[rows])


def layernorm_output(xhat: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """The last line of the forward, which a backward repeats instead of keeping its result."""
    torch.addcmul(bias, xhat, weight, out=out)


def layernorm_backward(
    dout: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor, dx: Tensor, dweight: Tensor, dbias: Tensor
) -> None:
    """Adds to dx, which holds the gradient of the residual around the norm."""
    for rows in row_blocks(dout):
        d, unit = dout[rows].to(dx.dtype), xhat[rows].to(dx.dtype)
        # forward was out = xhat * weight + bias
        dbias += d.sum(0)
        dweight += (d * unit).sum(0)
        dxhat = d * weight
        # forward was xhat = (x - mean(x)) * rstd: dx loses its mean and its part along xhat
        along = (dxhat * unit).mean(1, keepdim=True)
        dxhat -= dxhat.mean(1, keepdim=True)
        dx[rows] += dxhat.addcmul_(unit, along, value=-1).mul_(rstd[rows])


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3C) to query, key and value of shape (B, H, T, D), as views."""
    B, T, width = qkv.shape
    query, key, value = qkv.view(B, T, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    return query, key, value


def by_group(x: Tensor) -> tuple[Tensor, ...]:
    """(B, H, T, ·) cut into what attends at once: a sample on a CPU (no copies, cached scores), else all."""
    return x.unbind(0) if x.device.type == "cpu" else (x,)


def attention_forward(qkv: Tensor, mask: Tensor, scores: Tensor, attention: Tensor, out: Tensor) -> None:
    """Multi-head causal attention; mask is (T, T) with 0 where a row may look and -inf where it may not.

    qkv is (B, T, 3C), out (B, T, C); attention (B, H, T, T) is kept for the backward; scores are (H, T, T)
    for each sample of a group.
    """
    heads = attention.shape[1]
    query, key, value = split_heads(qkv, heads)
    out_heads = out.unflatten(2, (heads, -1)).transpose(1, 2)  # (B, H, T, D)
    scale = 1 / sqrt(query.shape[3])
    mask = mask.expand_as(scores)
    for q, k, v, att, o in zip(*map(by_group, (query, key, value, attention, out_heads)), strict=True):
        q, k, v, att = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, att))
        torch.baddbmm(mask, q, k.mT, alpha=scale, out=scores)
        torch.softmax(scores, dim=-1, out=att)
        o.copy_(torch.bmm(att, v).view_as(o))


def attention_backward(
    dout: Tensor, out: Tensor, qkv: Tensor, attention: Tensor, scores: Tensor, dqkv: Tensor
) -> None:
    """Writes dqkv (B, T, 3C); `scores` is scratch of the forward's shape."""
    heads = attention.shape[1]
    dout_heads, out_heads = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (dout, out))
    inputs = (*split_heads(qkv, heads), attention, dout_heads, out_heads)
    scale = 1 / sqrt(out_heads.shape[3])
    for (q, k, v, att, do, o), (dq, dk, dv) in zip(
        zip(*map(by_group, inputs), strict=True),
        zip(*map(by_group, split_heads(dqkv, heads)), strict=True),
        strict=True,
    ):
        along = (do * o).sum(-1, keepdim=True).reshape(-1, do.shape[-2], 1)
        q, k, v, att, do = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, att, do))
        # forward was out = att @ v
        dv.copy_(torch.bmm(att.mT, do).view_as(dv))
        dscores = torch.bmm(do, v.mT, out=scores)  # datt
        # forward was att = softmax(scores); the row sums of att * datt are those of out * dout
        dscores -= along
        dscores *= att
        # forward was scores = scale * q @ k.mT + mask
        dq.copy_(torch.bmm(dscores, k).mul_(scale).view_as(dq))
        dk.copy_(torch.bmm(dscores.mT, q).mul_(scale).view_as(dk))


def gelu_forward(x: Tensor, out: Tensor) -> None:
    """out = x Φ(x), with Φ the normal distribution function."""
    torch.ops.aten.gelu.out(x, out=out)


def gelu_backward(dout: Tensor, x: Tensor) -> None:
    """Turns dout into dx in place."""
    # forward was out = x Φ(x), so dx = dout (Φ(x) + x φ(x)): one fused pass instead of ten
    torch.ops.aten.gelu_backward.grad_input(dout, x, grad_input=dout)


def cross_entropy_forward(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss over all rows; its gradient is computed with it and left in place of the logits."""
    check_targets(targets, None, LOSS.ignore_index, logits.shape[1])
    scale = scale_of_loss(targets, None, None, LOSS)
    losses, _ = losses_and_gradient(logits, targets, None, None, LOSS, scale, logits)
    return reduce_losses(losses, scale, LOSS.reduction)


def cross_entropy_backward(dlogits: Tensor, scale: float) -> None:
    """Multiplies what the forward left, dlogits of the mean loss, by the gradient of that loss."""
    if scale != 1:
        dlogits *= scale
