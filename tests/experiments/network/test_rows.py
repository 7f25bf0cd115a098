"""Rows of predictions that are compared with the targets of other samples, and orders that are meant."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.network.samples import are_samples_independent

B, T, K, C = 6, 5, 3, 4
WORDS, TAGS = torch.randint(0, 20, (B, T)), torch.randint(0, C, (B, T))
X = torch.rand(B, 7)


class Tagger(nn.Module):
    """Batch first in, time first out."""

    def __init__(self, bidirectional=True):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.rnn = nn.GRU(8, 8, bidirectional=bidirectional)
        self.out = nn.Linear(16 if bidirectional else 8, C)

    def forward(self, words):
        return self.out(self.rnn(self.embedding(words.t()))[0])


class Draws(nn.Module):
    """K draws of a code for each sample, one draw of all samples after the other."""

    def __init__(self, norm=False):
        super().__init__()
        self.encode, self.decode = nn.Linear(7, 5), nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()

    def forward(self, x):
        code = self.norm(self.encode(x))
        return self.decode((code + torch.randn(K, len(x), 5)).flatten(0, 1))


def by_hand(scores, tags):
    return -scores.log_softmax(1).gather(1, tags[:, None]).mean()


@pytest.mark.parametrize("loss", [F.cross_entropy, by_hand])
def test_time_first_scores_against_batch_first_tags(loss):
    model = Tagger()
    wrong = evidence_of(model, lambda: loss(model(WORDS).reshape(-1, C), TAGS.reshape(-1)))
    (found,) = [v for v in are_samples_independent(wrong) if v.id]
    assert found.id == "axis-or-shape-error/rows-of-another-sample" and "test_rows.py" in found.where
    right = evidence_of(model, lambda: loss(model(WORDS).transpose(0, 1).reshape(-1, C), TAGS.reshape(-1)))
    assert excluded_families(are_samples_independent, right) == ["axis-or-shape-error"]
    right = evidence_of(model, lambda: loss(model(WORDS).reshape(-1, C), TAGS.t().reshape(-1)))
    assert excluded_families(are_samples_independent, right) == ["axis-or-shape-error"]


@pytest.mark.parametrize("norm", [False, True])
def test_draws_against_samples_repeated_in_another_order(norm):
    model, x = Draws(norm), torch.rand(40, 7)
    wrong = evidence_of(model, lambda: F.mse_loss(model(x), x.repeat_interleave(K, 0)))
    assert confirmed_ids(are_samples_independent, wrong) == ["axis-or-shape-error/rows-of-another-sample"]
    right = evidence_of(model, lambda: F.mse_loss(model(x), x.repeat(K, 1)))
    assert excluded_families(are_samples_independent, right) == ["axis-or-shape-error"]


def test_every_pair_of_samples_is_meant():
    model, wanted = nn.Linear(7, 1), torch.rand(B)
    pairs = evidence_of(
        model, lambda: (model(X).squeeze(1).repeat_interleave(B) - wanted.repeat(B)).abs().mean()
    )
    assert not confirmed_ids(are_samples_independent, pairs)


def test_sizes_that_do_not_tell_time_from_batch():
    """(time, batch) in, (batch, time) targets, as long as there are samples: taken for misplaced by their sizes."""
    words, tags = torch.randint(0, 20, (B, B)), torch.randint(0, C, (B, B))
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, C))
    step = evidence_of(
        model,
        lambda: F.cross_entropy(
            model(words.t().contiguous()).transpose(0, 1).reshape(-1, C), tags.reshape(-1)
        ),
    )
    assert not confirmed_ids(are_samples_independent, step)


def test_the_next_rows_of_a_series_and_mixed_samples():
    model = nn.Linear(7, 7)
    series = evidence_of(model, lambda: F.mse_loss(model(X[:-1]), X[1:]))
    assert not confirmed_ids(are_samples_independent, series)
    tagger, other = Tagger(), torch.randperm(B)

    def mixed():
        scores = tagger(WORDS).transpose(0, 1).reshape(-1, C)
        return F.cross_entropy(scores, TAGS.reshape(-1)) + F.cross_entropy(scores, TAGS[other].reshape(-1))

    assert not confirmed_ids(are_samples_independent, evidence_of(tagger, mixed))
    swapped = lambda: F.cross_entropy(  # noqa: E731
        tagger(WORDS).transpose(0, 1).reshape(-1, C), TAGS[other].reshape(-1)
    )
    assert not confirmed_ids(are_samples_independent, evidence_of(tagger, swapped))


def test_time_first_throughout():
    words, tags = WORDS.t().contiguous(), TAGS.t().contiguous()
    for bidirectional in (False, True):
        model = Tagger(bidirectional)
        step = evidence_of(
            model, lambda m=model: F.cross_entropy(m(words.t()).reshape(-1, C), tags.reshape(-1))
        )
        assert not confirmed_ids(are_samples_independent, step)


def test_targets_that_a_recurrent_layer_made_and_transposed_in_place():
    torch.manual_seed(0)
    model, decoder, out = nn.Linear(3, 3), nn.RNN(3, 7, batch_first=True), nn.Linear(7, 1)
    x = torch.randn(6, 14, 3)

    def decode(codes):
        return out(decoder(codes)[0])

    evidence = evidence_of(model, lambda: (decode(model(x)) - decode(x).detach()).square().mean())
    assert not confirmed_ids(are_samples_independent, evidence)


class Experts(nn.Module):
    """Rows go to the expert that a gate chooses, sorted by it, and are put back."""

    def __init__(self, back):
        super().__init__()
        self.gate, self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.back = nn.Linear(6, 1), back

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        parts = x[order].split(torch.bincount(chosen, minlength=2).tolist())
        made = torch.cat([self.first(parts[0]), self.second(parts[1]).tanh()])
        return self.head(x + weight[:, None] * made[self.back(order)])[:, 0]  # back


class Longest(nn.Module):
    """Sequences are sorted by their lengths for a recurrence, and put back."""

    def __init__(self, back):
        super().__init__()
        self.read, self.head, self.back = nn.GRU(6, 6, batch_first=True), nn.Linear(6, 1), back

    def forward(self, x):
        _, order = (x.abs() > 0.1).sum(1).sort(descending=True)
        series = x[order][:, None].expand(-1, 3, -1)
        last = self.read(series)[0][:, -1]
        return self.head(last.index_select(0, self.back(order)))[:, 0]  # chosen


@pytest.mark.parametrize("make, line", [(Experts, "back"), (Longest, "chosen")])
@pytest.mark.parametrize("right", [True, False])
def test_rows_that_are_put_back_by_the_order_in_place_of_its_inverse(make, line, right):
    torch.manual_seed(0)
    model = make(torch.argsort if right else lambda order: order)
    x, y = torch.randn(16, 6) * torch.rand(16, 6).round(), torch.randn(16)
    evidence = evidence_of(model, lambda: F.mse_loss(model(x), y))
    found = confirmed_ids(are_samples_independent, evidence)
    assert found == ([] if right else ["axis-or-shape-error/rows-of-another-sample"])
