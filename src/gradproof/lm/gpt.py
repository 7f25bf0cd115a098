"""The GPT as an nn.Module: for GPUs, and the autograd that the explicit one is held against."""

# B batch, T time, C channels, H heads, D = C/H, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradproof.errors import UserError
from gradproof.kernels.linear_cross_entropy import linear_cross_entropy
from gradproof.lm.shape import GPTShape, initialise


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        query, key, value = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, T, D)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 4 * width)
        self.w2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """x + attention(norm1(x)), then x + feed_forward(norm2(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Parameters by the names of `parameter_shapes`; called with targets it returns the mean loss."""

    def __init__(self, shape: GPTShape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        initialise(dict(self.named_parameters()), shape.layers, seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T) tokens to (B, T, V) logits, or to the mean cross-entropy of (B, T) targets."""
        if tokens.shape[1] > self.shape.context:
            raise UserError(f"{tokens.shape[1]} tokens in a row do not fit a context of {self.shape.context}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, weight)
        return output_loss(x, weight, targets)


def output_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of x @ weight.mT, in a bounded slab of logits; the product follows autocast."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    loss = linear_cross_entropy(x, weight, targets)
    assert isinstance(loss, Tensor)
    return loss
