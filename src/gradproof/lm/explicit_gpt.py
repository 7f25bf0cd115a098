"""A GPT whose every backward is written by hand: parameters, gradients and activations are buffers.

The same parameters as `lm.gpt.GPT`, by name and by value; its gradients agree with autograd's to rounding.
"""

# B batch, T time, N = B·T rows, C channels, F = 4·C feed-forward, H heads, V vocabulary, L layers

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradproof.errors import UserError
from gradproof.lm.layers import (
    add_product,
    attention_backward,
    attention_forward,
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    embedding_forward,
    gelu_backward,
    gelu_forward,
    layernorm_backward,
    layernorm_forward,
    layernorm_output,
    linear_backward,
    linear_forward,
    row_blocks,
    samples_at_once,
    tall_blocks,
)
from gradproof.lm.shape import GPTShape, flat_tensors, initialise, parameter_shapes


@dataclass(frozen=True)
class BlockActivations:
    """What one block's backward needs of its forward."""

    xhat1: Tensor  # (N, C)
    rstd1: Tensor  # (N, 1)
    qkv: Tensor  # (N, 3C)
    attention: Tensor  # (B, H, T, T)
    mixed: Tensor  # (N, C), what attention passes to its output projection
    xhat2: Tensor  # (N, C)
    rstd2: Tensor  # (N, 1)
    hidden: Tensor  # (N, F), before the GELU
    activated: Tensor  # (N, F), after it


@dataclass(frozen=True)
class Workspace:
    """Buffers that every block uses in turn."""

    stream: Tensor  # (N, C), the residual stream; its gradient in the backward
    normed: Tensor  # (N, C)
    narrow: Tensor | None  # (N, C), the stream's gradient in the activations' dtype, when that is another
    again: Tensor | None  # (N, C), the stream of a block that is computed again
    dqkv: Tensor  # (N, 3C)
    wide: Tensor  # (rows of a tall block, F)
    scores: Tensor  # (n·H, T, T) for the n samples that attend together
    heads: Tensor  # (7, n·H, T, D): query, key and so on of those samples
    scratch: Tensor  # a block of rows of a norm
    mask: Tensor  # (T, T)
    xhat: Tensor  # (N, C), of the final norm
    rstd: Tensor  # (N, 1)
    last: Tensor  # (N, C), the final norm's output in the parameters' dtype
    logits: Tensor  # (N, V); their gradient in the backward


class ExplicitGPT:
    """Forward, backward and gradient buffers of a GPT, without autograd.

    `activations` may be bfloat16 beside float32 parameters, gradients and residual stream; with `recompute` a
    block's activations are computed again in the backward and only its input is kept.
    """

    def __init__(
        self,
        shape: GPTShape,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        activations: torch.dtype | None = None,
        recompute: bool = False,
        seed: int = 0,
    ) -> None:
        self.shape, self.recompute, self.activations = shape, recompute, activations or dtype
        shapes = parameter_shapes(shape)
        self.flat_parameters, self.parameters = flat_tensors(
            shapes, lambda n: torch.empty(n, dtype=dtype, device=device)
        )
        self.flat_gradients, self.gradients = flat_tensors(
            shapes, lambda n: torch.zeros(n, dtype=dtype, device=device)
        )
        initialise(self.parameters, shape.layers, seed)
        self.flat_weights, self.weights = self.flat_parameters, self.parameters
        if self.activations != dtype:  # what the blocks compute with: a copy in the activations' dtype
            self.flat_weights, self.weights = flat_tensors(
                shapes, lambda n: torch.empty(n, dtype=self.activations, device=device)
            )
        self.blocks: list[BlockActivations]
        self.inputs: list[Tensor]  # of each block, for recomputation
        self.work: Workspace
        self._buffers_for: tuple[int, int] = (0, 0)

    def zero_gradients(self) -> None:
        self.flat_gradients.zero_()

    def gradient_views(self) -> dict[str, Tensor]:
        """Every gradient by name, with query, key and value apart."""
        views = {}
        for name, gradient in self.gradients.items():
            if ".qkv." in name:
                for part, view in zip(("query", "key", "value"), gradient.chunk(3), strict=True):
                    views[name.replace("qkv", part)] = view
            else:
                views[name] = gradient
        return views

    def load(self, weights: dict[str, Tensor]) -> None:
        """Takes over the parameters of a state dict that has exactly these names and shapes."""
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])

    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens to (B, T, V) logits, in a buffer that the next call overwrites."""
        B, T = tokens.shape
        if self.shape.context < T:
            raise UserError(f"{T} tokens in a row do not fit a context of {self.shape.context}")
        self.allocate(B, T)
        if self.flat_weights is not self.flat_parameters:
            self.flat_weights.copy_(self.flat_parameters)
        work = self.work
        p = self.parameters
        embedding_forward(tokens, p["token_embedding.weight"], p["position_embedding.weight"], work.stream)
        for l in range(self.shape.layers):
            if self.recompute:
                self.inputs[l].copy_(work.stream)
            self._block_forward(l, work.stream)
        layernorm_forward(
            work.stream, p["norm.weight"], p["norm.bias"], work.xhat, work.rstd, work.last, work.scratch
        )
        torch.mm(work.last, self._head(p).mT, out=work.logits)
        return work.logits.view(B, T, -1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of (B, T) targets; `backward` may follow once."""
        self.tokens, self.targets = tokens, targets.reshape(-1)
        self.logits(tokens)
        return cross_entropy_forward(self.work.logits, self.targets)

    def backward(self, scale: float = 1.0) -> None:
        """Adds the gradient of scale × the last forward's loss; scale is 1/k for k micro-batches."""
        work, p, d = self.work, self.parameters, self.gradients
        cross_entropy_backward(work.logits, scale)
        # forward was logits = last @ head.mT
        linear_backward(work.logits, work.last, self._head(p), work.last, self._head(d), None)
        work.stream.zero_()  # the residual stream is not needed any more: from here on it is its gradient
        dnorm = d["norm.weight"], d["norm.bias"]
        layernorm_backward(
            work.last, work.xhat, work.rstd, p["norm.weight"], work.stream, *dnorm, work.scratch
        )
        for l in reversed(range(self.shape.layers)):
            if work.again is not None:
                self._block_forward(l, work.again.copy_(self.inputs[l]))
            self._block_backward(l, work.stream)
        embedding_backward(
            work.stream, self.tokens, d["token_embedding.weight"], d["position_embedding.weight"]
        )

    def _head(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["token_embedding.weight" if self.shape.tied else "head.weight"]

    def _block_forward(self, l: int, x: Tensor) -> None:
        """x += attention(norm1(x)); x += feed_forward(norm2(x)), in place."""
        a, work = self.blocks[l], self.work
        norm1, qkv, out, norm2, w1, w2 = block_tensors(self.weights, l)
        layernorm_forward(x, *norm1, a.xhat1, a.rstd1, work.normed, work.scratch)
        linear_forward(work.normed, *qkv, a.qkv)
        heads, mixed = self._by_sample(a.qkv), self._by_sample(a.mixed)
        attention_forward(heads, work.mask, work.scores, work.heads, a.attention, mixed)
        add_linear(x, a.mixed, *out, work.normed)
        for rows in tall_blocks(x):
            normed, hidden, activated = work.normed[rows], a.hidden[rows], a.activated[rows]
            layernorm_forward(x[rows], *norm2, a.xhat2[rows], a.rstd2[rows], normed, work.scratch)
            linear_forward(normed, *w1, hidden)
            gelu_forward(hidden, activated)
            add_linear(x[rows], activated, *w2, normed)

    def _block_backward(self, l: int, dx: Tensor) -> None:
        """Turns the gradient of the block's output into that of its input, in place."""
        a, work = self.blocks[l], self.work
        norm1, qkv, out, norm2, w1, w2 = block_tensors(self.weights, l)
        dnorm1, dqkv, dout, dnorm2, dw1, dw2 = block_tensors(self.gradients, l)

        # forward was x + w2(gelu(w1(norm2(x)))): dx stays for the x, the branch adds to it
        for rows in tall_blocks(dx):
            normed, hidden, wide = work.normed[rows], a.hidden[rows], work.wide[: len(dx[rows])]
            linear_backward(self._narrow(dx[rows]), a.activated[rows], w2[0], wide, *dw2)
            gelu_backward(wide, hidden)
            layernorm_output(a.xhat2[rows], *norm2, normed)
            linear_backward(wide, normed, w1[0], normed, *dw1)
            layernorm_backward(
                normed, a.xhat2[rows], a.rstd2[rows], norm2[0], dx[rows], *dnorm2, work.scratch
            )

        # forward was x + out(attention(qkv(norm1(x))))
        linear_backward(self._narrow(dx), a.mixed, out[0], work.normed, *dout)
        dmixed, mixed, heads, dheads = map(self._by_sample, (work.normed, a.mixed, a.qkv, work.dqkv))
        attention_backward(dmixed, mixed, heads, a.attention, work.scores, work.heads, dheads)
        layernorm_output(a.xhat1, *norm1, work.normed)
        linear_backward(work.dqkv, work.normed, qkv[0], work.normed, *dqkv)
        layernorm_backward(work.normed, a.xhat1, a.rstd1, norm1[0], dx, *dnorm1, work.scratch)

    def _narrow(self, dx: Tensor) -> Tensor:
        """Rows of the stream's gradient in the activations' dtype."""
        return dx if self.work.narrow is None else self.work.narrow[: len(dx)].copy_(dx)

    def _by_sample(self, rows: Tensor) -> Tensor:
        return rows.view(*self._buffers_for, rows.shape[1])

    def allocate(self, B: int, T: int) -> None:
        """The activations of a (B, T) batch: once, unless the shape changes."""
        if self._buffers_for == (B, T):
            return
        self._buffers_for = (B, T)
        vars(self).update(blocks=None, work=None, inputs=None)  # free the old ones before there are new ones
        N, C, F, H, L = B * T, self.shape.width, self.shape.hidden, self.shape.heads, self.shape.layers

        def full(*size: int) -> Tensor:
            return self.flat_parameters.new_empty(size)

        def narrow(*size: int) -> Tensor:
            return self.flat_parameters.new_empty(size, dtype=self.activations)

        blocks = [
            BlockActivations(
                xhat1=narrow(N, C),
                rstd1=full(N, 1),
                qkv=narrow(N, 3 * C),
                attention=narrow(B, H, T, T),
                mixed=narrow(N, C),
                xhat2=narrow(N, C),
                rstd2=full(N, 1),
                hidden=narrow(N, F),
                activated=narrow(N, F),
            )
            for _ in range(1 if self.recompute else L)
        ]
        self.blocks = blocks * L if self.recompute else blocks
        self.inputs = [full(N, C) for _ in range(L if self.recompute else 0)]
        stream, normed, same = full(N, C), narrow(N, C), self.flat_weights is self.flat_parameters
        at_once = samples_at_once(B, H, T, stream.device)
        self.work = Workspace(
            stream=stream,
            normed=normed,
            narrow=None if same else narrow(N, C),
            again=full(N, C) if self.recompute else None,
            dqkv=narrow(N, 3 * C),
            wide=narrow(len(stream[next(tall_blocks(stream))]), F),
            scores=narrow(at_once * H, T, T),
            heads=narrow(7, at_once * H, T, C // H),
            scratch=full(len(stream[next(row_blocks(stream))]) * C),
            mask=torch.full_like(narrow(T, T), float("-inf")).triu_(1),
            xhat=full(N, C),
            rstd=full(N, 1),
            last=normed if same else full(N, C),
            logits=full(N, self.shape.vocabulary),
        )


def block_tensors(tensors: dict[str, Tensor], l: int) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of norm1, qkv, out, norm2, w1 and w2 of block l."""
    layers = ("norm1", "attention.qkv", "attention.out", "norm2", "feed_forward.w1", "feed_forward.w2")
    return [(tensors[f"blocks.{l}.{layer}.weight"], tensors[f"blocks.{l}.{layer}.bias"]) for layer in layers]


def add_linear(total: Tensor, x: Tensor, weight: Tensor, bias: Tensor, scratch: Tensor) -> None:
    """total += x @ weight.mT + bias: the linear layer that ends a residual branch."""
    if total.dtype == x.dtype:
        add_product(total, x, weight.mT)
        total += bias
    else:
        linear_forward(x, weight, bias, scratch)
        total += scratch
