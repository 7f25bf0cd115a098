"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradproof.errors import UserError


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    end_of_text: int | None = None,
    device: str | torch.device = "cpu",
) -> list[int]:
    """Up to `count` tokens after the prompt, the same for the same seed; at temperature 0 the likeliest."""
    if not prompt:
        raise UserError("generation needs a prompt of at least one token: --prompt TEXT")
    if temperature < 0 or top_k < 1:
        raise UserError(f"temperature must be at least 0 and top-k at least 1, not {temperature} and {top_k}")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = logits_of(window)[0, -1].float().cpu()
        best = logits.topk(min(top_k, len(logits)))
        if temperature == 0:
            token = int(best.indices[0])
        else:
            chosen = torch.softmax(best.values / temperature, 0).multinomial(1, generator=generator)
            token = int(best.indices[chosen])
        if token == end_of_text:
            break
        tokens.append(token)
    return tokens[len(prompt) :]
