"""The cascade transformer: stages of growing width, each refining the output of the one before.

A stage sees the input, the previous stage's output and an encoding of the target's place side by side, and
its output is brought back to the RMS of its input. That division is where such a model explodes: with a weak
residual a stage's output can come near zero, and an unbounded rescale multiplies by its inverse.
"""

# B batch, T time, C channels of the cascade, W width inside a stage

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradproof.errors import UserError
from gradproof.lm.gpt import Block, output_loss
from gradproof.lm.shape import initialise


@dataclass(frozen=True)
class CascadeShape:
    """Stable as it stands; residuals=(1.0, 1.0, 0.05) with rescale_limit=None is the one that explodes."""

    vocabulary: int
    context: int = 128
    width: int = 96
    heads: int = 4
    stage_widths: tuple[int, ...] = (96, 128, 160)
    stage_layers: int = 1
    residuals: tuple[float, ...] = field(default=())  # weight of each stage's residual, 1 where not given
    rescale_limit: float | None = 2.0  # of the factor that restores the RMS, up and down; None is unbounded

    def __post_init__(self) -> None:
        for width in self.stage_widths:
            if width % self.heads:
                raise UserError(f"{self.heads} heads do not divide a stage width of {width}")
        if self.residuals and len(self.residuals) != len(self.stage_widths):
            raise UserError(
                f"{len(self.residuals)} residual weights for {len(self.stage_widths)} stages: give one each"
            )


class Stage(nn.Module):
    """One transformer of the cascade."""

    def __init__(self, shape: CascadeShape, inputs: int, inner: int, residual: float) -> None:
        super().__init__()
        self.residual, self.rescale_limit = residual, shape.rescale_limit
        self.input_proj = nn.Linear(inputs * shape.width, inner)
        self.input_norm = nn.LayerNorm(inner)
        self.blocks = nn.ModuleList(Block(inner, shape.heads) for _ in range(shape.stage_layers))
        self.post_norm = nn.LayerNorm(inner)
        self.output_proj = nn.Linear(inner, shape.width)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """x is (B, T, C), what this stage refines; the others are concatenated with it."""
        h = self.input_norm(self.input_proj(torch.cat((x, *others), dim=-1)))
        for block in self.blocks:
            h = block(h)
        out = self.output_proj(self.post_norm(h)) + self.residual * x
        return rescale(out, x, self.rescale_limit)


def rescale(out: Tensor, like: Tensor, limit: float | None) -> Tensor:
    """out × RMS(like)/RMS(out), each position by itself; the factor stays within [1/limit, limit]."""
    factor = rms(like) / rms(out)
    return out * (factor if limit is None else factor.clamp(1 / limit, limit))


def rms(x: Tensor) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-12).sqrt()


class Cascade(nn.Module):
    """A causal language model of stages; called with targets it returns the mean loss."""

    def __init__(self, shape: CascadeShape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.target_encoding = nn.Embedding(
            shape.context, shape.width
        )  # of the place that is to be predicted
        residuals = shape.residuals or (1.0,) * len(shape.stage_widths)
        self.cascade_stages = nn.ModuleList(
            Stage(shape, 2 if i == 0 else 3, inner, residual)
            for i, (inner, residual) in enumerate(zip(shape.stage_widths, residuals, strict=True))
        )
        self.norm = nn.LayerNorm(shape.width)
        depth = len(shape.stage_widths) * (shape.stage_layers + 1)
        initialise(dict(self.named_parameters()), depth, seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, T) tokens to (B, T, V) logits, or to the mean cross-entropy of (B, T) targets."""
        T = tokens.shape[1]
        if self.shape.context < T:
            raise UserError(f"{T} tokens in a row do not fit a context of {self.shape.context}")
        positions = torch.arange(T, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        target = self.target_encoding(positions).expand_as(x)
        out = self.cascade_stages[0](x, target)
        for stage in self.cascade_stages[1:]:
            out = stage(out, x, target)
        out = self.norm(out)
        if targets is None:
            return F.linear(out, self.token_embedding.weight)
        return output_loss(out, self.token_embedding.weight, targets)
