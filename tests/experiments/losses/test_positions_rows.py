"""Short sequences whose answers never count, and batches in which some rows have no targets by nature."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.losses.positions import which_positions_count

ID = "loss-mask-error/sequences-without-targets"
ROWS, LENGTH, VOCABULARY, ANSWER = 32, 15, 30, 3
PROMPTS = [4 + i % 8 for i in range(ROWS)]  # with their answers 7 to 14 tokens


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.out(self.embedding(tokens))


def batch(hide, length=LENGTH, prompts=PROMPTS):
    """Padded rows, and labels of which `hide(labels, row, prompt)` takes some away."""
    torch.manual_seed(0)
    tokens, labels = torch.zeros(ROWS, length, dtype=torch.long), torch.full((ROWS, length), -100)
    for row, prompt in enumerate(prompts):
        text = torch.randint(1, VOCABULARY, (prompt + ANSWER,))[:length]
        tokens[row, : len(text)] = labels[row, : len(text)] = text
        hide(labels, row, prompt)
    return tokens, labels


def from_the_end(labels, row, prompt):
    labels[row, :-ANSWER] = -100


def from_the_front(labels, row, prompt):
    labels[row, :prompt] = -100


def half_unlabelled(labels, row, prompt):
    labels[row, : prompt if row % 16 < 6 else LENGTH] = -100


def learn(tokens, labels, by_hand=False):
    model = Model()

    def loss():
        scores, wanted = model(tokens)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)
        if not by_hand:
            return F.cross_entropy(scores, wanted)
        mask = (wanted != -100).float()
        each = F.cross_entropy(scores, tokens[:, 1:].reshape(-1), reduction="none")
        return (each * mask).sum() / mask.sum()

    return evidence_of(model, loss)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_mask_counted_from_the_end_of_the_padding(by_hand):
    evidence = learn(*batch(from_the_end), by_hand)
    (found,) = [v for v in which_positions_count(evidence) if v.id]
    assert found.id == ID and "test_positions_rows.py" in found.where
    assert excluded_families(which_positions_count, learn(*batch(from_the_front), by_hand))


def test_rows_without_targets_that_are_not_the_short_ones():
    """Texts that were cut off lost their answers; samples without labels come in every length."""
    cut_off = learn(
        *batch(from_the_front, length=10, prompts=[p + 4 if i % 3 else 4 for i, p in enumerate(PROMPTS)])
    )
    for evidence in (cut_off, learn(*batch(half_unlabelled))):
        assert not confirmed_ids(which_positions_count, evidence)
