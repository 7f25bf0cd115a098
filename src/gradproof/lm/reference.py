"""The language models as references of another program's step: a loss from named weights, with what lies between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.errors import UserError
from gradproof.lm.cascade import Cascade, CascadeShape
from gradproof.lm.gpt import GPT
from gradproof.lm.shape import GPTShape

Reference = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def gpt_reference(heads: int) -> Reference:
    """A GPT of as many layers, channels and words as the weights have; activations are its modules' outputs."""

    def gpt(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, positions = (_weight(weights, f"{n}_embedding.weight") for n in ("token", "position"))
        layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
        shape = GPTShape(
            len(tokens), len(positions), tokens.shape[1], heads, max(layers, 1), "head.weight" not in weights
        )
        return _run(GPT(shape), weights, batch)

    return gpt


def cascade_reference(heads: int) -> Reference:
    """The cascade, with stages as wide and as many as the weights have."""

    def cascade(
        weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, positions = (_weight(weights, f"{n}_embedding.weight") for n in ("token", "position"))
        stages = sorted({int(name.split(".")[1]) for name in weights if name.startswith("cascade_stages.")})
        widths = tuple(len(_weight(weights, f"cascade_stages.{k}.input_norm.weight")) for k in stages)
        blocks = {name.split(".")[3] for name in weights if name.startswith("cascade_stages.0.blocks.")}
        shape = CascadeShape(
            len(tokens), len(positions), tokens.shape[1], heads, widths, stage_layers=max(len(blocks), 1)
        )
        return _run(Cascade(shape), weights, batch)

    return cascade


def _weight(weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise UserError(f"the dump has no weights/{name}; its weights are {', '.join(list(weights)[:6])}")
    return weights[name]


def _run(
    model: nn.Module, weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    missing = sorted(name for name in ("tokens", "targets") if name not in batch)
    if missing:
        raise UserError(f"the dump has no batch/{missing[0]}; it has {', '.join(batch) or 'no batch'}")
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, shape in expected.items():
        given = tuple(_weight(weights, name).shape)
        if given != shape:
            raise UserError(f"weights/{name} has the shape {given} in the dump, {shape} in the model")
    activations: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                activations[name] = out

        return hook

    for name, module in model.double().named_modules():
        if name:
            module.register_forward_hook(keep(name))
    chosen = {name: weights[name] for name in expected}
    logits = torch.func.functional_call(model, chosen, (batch["tokens"],))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    return loss, activations | {"logits": logits}
