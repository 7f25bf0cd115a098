"""A tag that never counts in a masked loss; and padding, prompts, special tokens and weights that are meant so."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradproof.experiments.losses.positions import which_positions_count

PAD, WORDS, TAGS, ROWS, LENGTH = 0, 40, 5, 24, 14
ID = "loss-mask-error/class-left-out"


def sentences(padded=True):
    torch.manual_seed(0)
    lengths = torch.randint(5, LENGTH + 1, (ROWS, 1)) if padded else torch.full((ROWS, 1), LENGTH)
    real = torch.arange(LENGTH) < lengths
    words = torch.where(real, torch.randint(1, WORDS, (ROWS, LENGTH)), PAD)
    return words, torch.randint(0, TAGS, (ROWS, LENGTH)), real


class Tagger(nn.Module):
    def __init__(self, classes=TAGS):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, classes)

    def forward(self, words):
        return self.head(self.embedding(words))


class Packed(Tagger):
    """An LSTM over packed sentences, written back into a padded grid."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(16, 16, batch_first=True)

    def forward(self, words):
        lengths = (words != PAD).sum(1)
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=LENGTH)[0])


def masked(logits, tags, mask):
    losses = F.cross_entropy(logits.transpose(1, 2), tags.clamp(min=0), reduction="none")
    return (losses * mask.float()).sum() / mask.sum()


def found(words, make_loss, classes=TAGS):
    model = Tagger(classes)
    return confirmed_ids(which_positions_count, evidence_of(model, lambda: make_loss(model(words))))


def test_a_mask_that_takes_tag_zero_for_padding():
    words, tags, real = sentences()
    padded = torch.where(real, tags, -1)
    assert found(words, lambda out: masked(out, padded, padded > 0)) == [ID]
    assert not found(words, lambda out: masked(out, padded, padded >= 0))


def test_packed_sentences():
    words, tags, real = sentences()
    padded, model = torch.where(real, tags, -1), Packed()
    bad = evidence_of(model, lambda: masked(model(words), padded, padded > 0))
    good = evidence_of(model, lambda: masked(model(words), padded, padded >= 0))
    assert confirmed_ids(which_positions_count, bad) == [ID] and not confirmed_ids(
        which_positions_count, good
    )


@pytest.mark.parametrize("padded", [True, False])
def test_an_ignored_index_that_is_a_tag(padded):
    words, tags, real = sentences(padded)
    shared, apart = torch.where(real, tags, 0).flatten(), torch.where(real, tags, -100).flatten()
    assert found(words, lambda out: F.cross_entropy(out.flatten(0, 1), shared, ignore_index=0)) == [ID]
    assert not found(words, lambda out: F.cross_entropy(out.flatten(0, 1), apart))


def test_words_chosen_by_a_mask():
    words, tags, real = sentences()
    model = Tagger()
    padded = torch.where(real, tags, 0)
    step = evidence_of(model, lambda: masked(model(words), padded, padded != 0))
    (verdict,) = which_positions_count(step)
    assert (
        verdict.where.startswith("test_positions_classes.py") or "test_positions_classes.py" in verdict.where
    )


def test_a_tag_for_padding_beside_special_tokens():
    words, tags, real = sentences()
    tags = torch.where(real, tags.clamp(min=1), 0)
    words[:, 0], tags[:, 0] = 1, 0  # a token that begins each sentence
    assert not found(words, lambda out: F.cross_entropy(out.flatten(0, 1), tags.flatten(), ignore_index=0))


def test_a_class_of_weight_zero():
    words, tags, _ = sentences(False)
    weight = torch.tensor([0.0, 1, 1, 1, 1])
    assert not found(words, lambda out: F.cross_entropy(out.flatten(0, 1), tags.flatten(), weight=weight))


def test_second_halves_of_words_are_a_warning_at_most():
    words, tags, real = sentences()
    tags = torch.where(real & (words < 25), tags.clamp(min=1), 0)
    model = Tagger()
    step = evidence_of(
        model, lambda: F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=0)
    )
    assert [verdict.level for verdict in which_positions_count(step)] == ["warning"]


def next_words(words):
    return torch.cat([words[:, 1:], words[:, :1]], 1)


def test_a_letter_that_is_never_learned():
    words, *_ = sentences(False)
    words = words % 10
    targets = next_words(words).flatten()
    assert found(words, lambda out: F.cross_entropy(out.flatten(0, 1), targets, ignore_index=3), WORDS) == [
        ID
    ]


@pytest.mark.parametrize("mark", [PAD, 3])
def test_prompts_and_hidden_words_are_meant_so(mark):
    words, *_ = sentences(False)
    prompt = torch.where(torch.arange(LENGTH) < 6, mark, next_words(words)).flatten()
    assert not found(words, lambda out: F.cross_entropy(out.flatten(0, 1), prompt, ignore_index=mark), WORDS)
    chosen = torch.where(torch.rand(words.shape) < 0.5, words, mark).flatten()
    hidden = torch.where(chosen.view_as(words) == mark, words, 39)
    assert not found(hidden, lambda out: F.cross_entropy(out.flatten(0, 1), chosen, ignore_index=mark), WORDS)


def test_an_answer_behind_the_question_in_classes_of_its_own():
    words, tags, _ = sentences(False)
    tags = torch.where(torch.arange(LENGTH) < 6, 0, tags.clamp(min=1)).flatten()
    assert not found(words, lambda out: F.cross_entropy(out.flatten(0, 1), tags, ignore_index=0))
