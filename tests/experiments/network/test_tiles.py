"""Masks over several tokens a time step, tiled as the tokens lie or otherwise."""

import math

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.network.attention import where_does_attention_look

B, T, WIDTH = 8, 5, 8
STATES, ACTIONS = torch.randint(0, 6, (B, T)), torch.randint(0, 4, (B, T))
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
BY_STREAM, BY_STEP = CAUSAL.repeat(2, 2), CAUSAL.repeat_interleave(2, 0).repeat_interleave(2, 1)
EACH = torch.ones(2 * T, 2 * T, dtype=torch.bool).tril()


class Decisions(nn.Module):
    def __init__(self, mask, interleaved=True, fused=True):
        super().__init__()
        self.states, self.actions = nn.Embedding(6, WIDTH), nn.Embedding(4, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)
        self.mask, self.interleaved, self.fused = mask, interleaved, fused

    def forward(self, states, actions):
        streams = [self.states(states), self.actions(actions)]
        tokens = torch.stack(streams, 2).flatten(1, 2) if self.interleaved else torch.cat(streams, 1)
        q, k, v = self.qkv(tokens)[:, None].chunk(3, -1)
        if self.fused:
            heard = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        else:
            scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(~self.mask, -1e9)
            heard = scores.softmax(-1) @ v
        heard = (tokens + heard[:, 0])[:, 0::2] if self.interleaved else (tokens + heard[:, 0])[:, :T]
        return self.out(heard)


def step(mask, interleaved, fused):
    model = Decisions(mask, interleaved, fused)
    return evidence_of(
        model, lambda: F.cross_entropy(model(STATES, ACTIONS).flatten(0, 1), ACTIONS.flatten())
    )


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_tiled_in_another_order_than_the_tokens(fused):
    for mask, interleaved in ((BY_STREAM, True), (BY_STEP, False)):
        assert confirmed_ids(where_does_attention_look, step(mask, interleaved, fused)) == [
            "attention-mask-error/tiled-in-another-order"
        ]


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_tiled_like_the_tokens(fused):
    for mask, interleaved in ((BY_STREAM, False), (BY_STEP, True)):
        evidence = step(mask, interleaved, fused)
        assert excluded_families(where_does_attention_look, evidence) == ["attention-mask-error"]


@pytest.mark.parametrize("interleaved", [True, False])
def test_other_masks_are_left_alone(interleaved):
    """Each token after the other, also of a prompt and its answer one behind the other; everything; a window."""
    window = EACH & EACH.T.logical_not().triu(-3).logical_or(torch.eye(2 * T, dtype=torch.bool))
    for mask in (EACH, torch.ones_like(EACH), window):
        assert not list(where_does_attention_look(step(mask, interleaved, True)))
