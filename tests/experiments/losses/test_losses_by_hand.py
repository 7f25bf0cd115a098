"""What is asked of a language model is asked whatever its loss is written with, also inside a Function by hand."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from language_models import BATCH, TIME, VOCABULARY, WIDTH, Transformer
from torch import nn

from gradproof.experiments.data.alignment import do_targets_line_up
from gradproof.experiments.losses.activation import does_the_output_fit_the_loss
from gradproof.experiments.network.future import does_it_see_the_future
from gradproof.experiments.network.samples import are_samples_independent


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        exps = (logits - logits.amax(-1, keepdim=True)).exp()
        softmax = exps / exps.sum(-1, keepdim=True)
        ctx.save_for_backward(softmax, targets)
        return -softmax.gather(-1, targets.unsqueeze(-1)).log().mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, targets = ctx.saved_tensors
        return grad * (softmax - F.one_hot(targets, softmax.shape[-1])) / targets.numel(), None


def by_rows(logits, targets):
    flat = logits.log_softmax(-1).view(-1, VOCABULARY)
    return -flat[torch.arange(len(flat)), targets.reshape(-1)].mean()


LOSSES = {
    "gather": lambda logits, targets: -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean(),
    "rows": by_rows,
    "all axes": lambda logits, targets: (
        logits.logsumexp(-1) - logits[torch.arange(BATCH)[:, None], torch.arange(TIME), targets]
    ).mean(),
    "function": CrossEntropy.apply,
}


class OverAllTexts(nn.Module):
    """A transformer whose attention has lost the axis of the batch, and takes its tokens out of a table by hand."""

    def __init__(self, apart=True, causal=True):
        super().__init__()
        self.apart, self.causal = apart, causal
        self.table, self.places = (nn.Parameter(torch.randn(n, WIDTH)) for n in (VOCABULARY, TIME))
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.table[ids] + self.places
        q, k, v = (self.qkv(x) if self.apart else self.qkv(x).flatten(0, 1)).chunk(3, -1)
        scores = q @ k.mT / 4
        if self.causal:
            size = scores.shape[-1]
            scores = scores.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -1e9)
        return self.head(x + (scores.softmax(-1) @ v).view(x.shape))


def step_of(model, loss, shift=1):
    text = torch.randint(0, VOCABULARY, (BATCH, TIME + 4))
    return evidence_of(model, lambda: LOSSES[loss](model(text[:, :TIME]), text[:, shift : shift + TIME]))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_healthy_model_is_asked_and_cleared(loss):
    for model in (Transformer(), OverAllTexts()):
        evidence = step_of(model, loss)
        for question in (do_targets_line_up, does_it_see_the_future, are_samples_independent):
            assert excluded_families(question, evidence) and not confirmed_ids(question, evidence)
        assert not confirmed_ids(does_the_output_fit_the_loss, evidence)


@pytest.mark.parametrize("loss", LOSSES)
def test_targets_and_masks(loss):
    assert confirmed_ids(do_targets_line_up, step_of(Transformer(), loss, 2)) == [
        "data-target-misaligned/double-shift"
    ]
    for model in (Transformer("fused, not causal"), OverAllTexts(causal=False)):
        evidence = step_of(model, loss)
        assert confirmed_ids(does_it_see_the_future, evidence) == ["attention-mask-error/sees-the-future"]


@pytest.mark.parametrize("loss", LOSSES)
def test_attention_over_all_texts_of_the_batch(loss):
    for causal in (True, False):
        evidence = step_of(OverAllTexts(apart=False, causal=causal), loss)
        (found,) = [v for v in are_samples_independent(evidence) if v.verdict == "confirmed"]
        assert found.id == "axis-or-shape-error/coupled-samples" and found.confidence == "proven"
        assert "test_losses_by_hand.py" in found.where
        # a mask over all tokens in a row keeps each text in order; without one both faults are told
        seen = [] if causal else ["attention-mask-error/sees-the-future"]
        assert confirmed_ids(does_it_see_the_future, evidence) == seen


def test_samples_that_meet_in_a_loss_over_pairs_are_no_texts():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
    first, second = torch.randn(8, 8), torch.randn(8, 8)

    def contrast():
        a, b = F.normalize(model(first), dim=-1), F.normalize(model(second), dim=-1)
        return CrossEntropy.apply(a @ b.T / 0.1, torch.arange(8))

    assert not confirmed_ids(are_samples_independent, evidence_of(model, contrast))
