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

from gradproof.kernels.cross_entropy import backend_of, check_targets, reduce_losses, scale_of_loss
from gradproof.kernels.loss_options import LossOptions

NORM_EPS = 1e-5
CACHED_ELEMENTS = 1 << 18  # a row block of this many elements stays in a core's cache over several passes
TALL_ROWS = 512  # of several matrix products in turn
CACHED_SCORES = 1 << 18  # attention scores of the samples that attend together
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
    x: Tensor, weight: Tensor, bias: Tensor, xhat: Tensor, rstd: Tensor, out: Tensor, scratch: Tensor
) -> None:
    """xhat and rstd are kept for the backward; scratch holds a block of rows."""
    for rows in row_blocks(x):
        centred = scratch[: x[rows].numel()].view_as(x[rows])
        torch.sub(x[rows], x[rows].mean(1, keepdim=True), out=centred)
        norm = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
        torch.rsqrt(norm.square_().div_(x.shape[1]).add_(NORM_EPS), out=rstd[rows])
        torch.mul(centred, rstd[rows], out=xhat[rows])
        layernorm_output(xhat[rows], weight, bias, out[rows])


def layernorm_output(xhat: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """The last line of the forward, which a backward repeats instead of keeping its result."""
    torch.addcmul(bias, xhat, weight, out=out)


def layernorm_backward(
    dout: Tensor,
    xhat: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    scratch: Tensor,
) -> None:
    """Adds to dx, which holds the gradient of the residual around the norm."""
    weight = weight.to(dx.dtype)
    mean_weight = weight / len(weight)
    for rows in row_blocks(dout):
        d, unit = dout[rows].to(dx.dtype), xhat[rows].to(dx.dtype)
        # forward was out = xhat * weight + bias
        dbias += d.sum(0)
        product = torch.mul(d, unit, out=scratch[: d.numel()].view_as(d))
        dweight += product.sum(0)
        # forward was xhat = (x - mean(x)) * rstd: dxhat loses its mean and its part along xhat
        level, along = (d @ mean_weight)[:, None], (product @ mean_weight)[:, None]
        dxhat = torch.mul(d, weight, out=product).addcmul_(unit, along, value=-1).sub_(level)
        dx[rows].addcmul_(dxhat, rstd[rows])


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3C) to query, key and value of shape (B, H, T, D), as views."""
    B, T, width = qkv.shape
    query, key, value = qkv.view(B, T, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    return query, key, value


def samples_at_once(B: int, heads: int, T: int, device: torch.device) -> int:
    """How many samples attend together: on a CPU as many as keep the scores in cache, on a GPU all."""
    if device.type != "cpu":
        return B
    most = max(1, CACHED_SCORES // (heads * T * T))
    return max(n for n in range(1, min(B, most) + 1) if B % n == 0)


def as_matrices(heads: Tensor, place: Tensor) -> Tensor:
    """(n, H, T, D) of a group of samples as matrices (n·H, T, D): as they are, or copied into place."""
    if len(heads) == 1:
        return heads[0]
    place.view_as(heads).copy_(heads)
    return place


def attention_forward(
    qkv: Tensor, mask: Tensor, scores: Tensor, scratch: Tensor, attention: Tensor, out: Tensor
) -> None:
    """Multi-head causal attention; mask is (T, T) with 0 where a row may look and -inf where it may not.

    qkv is (B, T, 3C), out (B, T, C); attention (B, H, T, T) is kept for the backward; scores are (n·H, T, T)
    and scratch (7, n·H, T, D) for the n samples that attend together.
    """
    B, heads = attention.shape[:2]
    inputs = split_heads(qkv, heads)
    out_heads = out.unflatten(2, (heads, -1)).transpose(1, 2)  # (B, H, T, D)
    scale = sqrt(heads / out.shape[2])  # 1/√D
    mask = mask.expand_as(scores)
    at_once = len(scores) // heads
    for start in range(0, B, at_once):
        group = slice(start, start + at_once)
        q, k, v = (as_matrices(x[group], place) for x, place in zip(inputs, scratch, strict=False))
        att = attention[group].flatten(0, 1)
        torch.baddbmm(mask, q, k.mT, alpha=scale, out=scores)
        torch.softmax(scores, dim=-1, out=att)
        out_heads[group] = torch.bmm(att, v, out=scratch[3]).view_as(out_heads[group])


def attention_backward(
    dout: Tensor, out: Tensor, qkv: Tensor, attention: Tensor, scores: Tensor, scratch: Tensor, dqkv: Tensor
) -> None:
    """Writes dqkv (B, T, 3C); scores and scratch are as in the forward."""
    B, heads = attention.shape[:2]
    dout_heads, out_heads = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (dout, out))
    inputs = (*split_heads(qkv, heads), dout_heads, out_heads)
    outputs = split_heads(dqkv, heads)
    scale = sqrt(heads / out.shape[2])  # 1/√D
    at_once = len(scores) // heads
    for start in range(0, B, at_once):
        group = slice(start, start + at_once)
        q, k, v, do, o = (as_matrices(x[group], place) for x, place in zip(inputs, scratch, strict=False))
        dq, dk, dv = (x[group] for x in outputs)
        att, product, result = attention[group].flatten(0, 1), scratch[5], scratch[6]
        # forward was out = att @ v
        dv.copy_(torch.bmm(att.mT, do, out=result).view_as(dv))
        dscores = torch.bmm(do, v.mT, out=scores)  # datt
        # forward was att = softmax(scores); the row sums of att * datt are those of out * dout
        dscores -= torch.mul(do, o, out=product).sum(-1, keepdim=True)
        dscores *= att
        # forward was scores = scale * q @ k.mT + mask
        dq.copy_(torch.baddbmm(q, dscores, k, beta=0, alpha=scale, out=result).view_as(dq))
        dk.copy_(torch.baddbmm(k, dscores.mT, q, beta=0, alpha=scale, out=result).view_as(dk))


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
    losses, _ = backend_of(logits).losses_and_gradient(logits, targets, None, None, LOSS, scale, logits)
    return reduce_losses(losses, scale, LOSS.reduction)


def cross_entropy_backward(dlogits: Tensor, scale: float) -> None:
    """Multiplies what the forward left, dlogits of the mean loss, by the gradient of that loss."""
    if scale != 1:
        dlogits *= scale
