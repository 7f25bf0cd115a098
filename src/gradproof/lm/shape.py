"""The sizes of a language model, and the names, shapes and first values of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

from gradproof.errors import UserError

INIT_STD = 0.02


@dataclass(frozen=True)
class GPTShape:
    """V vocabulary, T context, C width, H heads, L layers; the feed-forward layer is 4 C wide."""

    vocabulary: int
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4
    tied: bool = True

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "tied" and value < 1:
                raise UserError(f"a model needs {name} of at least 1, not {value}")
        if self.width % self.heads:
            fitting = [h for h in range(1, self.width + 1) if self.width % h == 0]
            raise UserError(
                f"{self.heads} heads do not divide a width of {self.width}: "
                f"choose heads from {', '.join(map(str, fitting))}, or another width"
            )

    @property
    def hidden(self) -> int:
        return 4 * self.width


def parameter_shapes(shape: GPTShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, matrices before vectors: weight decay then is one cut."""
    V, T, C, F = shape.vocabulary, shape.context, shape.width, shape.hidden
    shapes: dict[str, tuple[int, ...]] = {}
    shapes |= {"token_embedding.weight": (V, C), "position_embedding.weight": (T, C)}
    for l in range(shape.layers):
        shapes |= {
            f"blocks.{l}.norm1.weight": (C,),
            f"blocks.{l}.norm1.bias": (C,),
            f"blocks.{l}.attention.qkv.weight": (3 * C, C),
            f"blocks.{l}.attention.qkv.bias": (3 * C,),
            f"blocks.{l}.attention.out.weight": (C, C),
            f"blocks.{l}.attention.out.bias": (C,),
            f"blocks.{l}.norm2.weight": (C,),
            f"blocks.{l}.norm2.bias": (C,),
            f"blocks.{l}.feed_forward.w1.weight": (F, C),
            f"blocks.{l}.feed_forward.w1.bias": (F,),
            f"blocks.{l}.feed_forward.w2.weight": (C, F),
            f"blocks.{l}.feed_forward.w2.bias": (C,),
        }
    shapes |= {"norm.weight": (C,), "norm.bias": (C,)}
    if not shape.tied:
        shapes["head.weight"] = (V, C)
    return dict(sorted(shapes.items(), key=lambda item: len(item[1]) == 1))  # a stable sort


def count_parameters(shape: GPTShape) -> int:
    return sum(prod(s) for s in parameter_shapes(shape).values())


def initialise(parameters: dict[str, Tensor], layers: int, seed: int) -> None:
    """Normal(0.02) matrices, those that end a residual branch divided by √(2L); norms 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(parameters):  # by name, so that the order of registration does not matter
        value = parameters[name]
        with torch.no_grad():
            if value.dim() > 1:
                ends_branch = name.endswith(("attention.out.weight", "feed_forward.w2.weight"))
                std = INIT_STD / (2 * layers) ** 0.5 if ends_branch else INIT_STD
                value.copy_(torch.randn(value.shape, generator=generator) * std)
            else:
                value.fill_(1.0 if name.endswith("weight") else 0.0)


def flat_tensors(
    shapes: dict[str, tuple[int, ...]], make: Callable[[int], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One allocation `make(n)` and a view into it for each shape, in order."""
    flat = make(sum(prod(s) for s in shapes.values()))
    parts = flat.split([prod(s) for s in shapes.values()])
    return flat, {name: part.view(s) for (name, s), part in zip(shapes.items(), parts, strict=True)}
