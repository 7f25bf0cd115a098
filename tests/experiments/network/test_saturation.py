"""Attention whose scores leave no choice from the start, and queries that see no key; and healthy heads."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.attention import where_does_attention_look


class Attention(nn.Module):
    def __init__(self, factor=1.0, mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.factor, self.mask = factor, mask

    def forward(self, x):
        scores = self.factor * self.q(x) @ self.k(x).mT / 4
        if self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(-1) @ self.v(x)


def verdicts(model):
    x = torch.randn(4, 12, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return examine(
        where_does_attention_look,
        model,
        optimizer,
        plain_step(model, optimizer, lambda: model(x).pow(2).mean()),
    )


@pytest.mark.parametrize(
    "factor, found", [(1e4, {"exploding-signal/attention-scores"}), (1.0, set()), (5.0, set())]
)
def test_scores_that_leave_no_choice(factor, found):
    said = verdicts(Attention(factor))
    assert ids(said) == found and all(v.if_troubled for v in said)


def test_queries_that_see_no_key():
    causal = torch.full((12, 12), -1e9).triu(1)
    assert not verdicts(Attention(mask=causal))
    nothing = causal.clone()
    nothing[:3] = -1e9
    (first, *_) = verdicts(Attention(mask=nothing))
    assert first.id == "attention-mask-error/all-masked-row" and "25 %" in first.evidence[0]


def test_scores_that_have_grown_huge_are_not_taken_for_masks():
    grown = 1e5 * torch.arange(-13.0, -1.0).expand(12, 12)  # far below zero, and far apart
    assert "attention-mask-error/all-masked-row" not in ids(verdicts(Attention(mask=grown)))
