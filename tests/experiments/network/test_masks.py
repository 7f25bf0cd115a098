"""Masks of the loss and of attention: padding that counts or is looked at, masks the wrong way round."""

import math

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.losses.positions import which_positions_count
from gradproof.experiments.network.attention import where_does_attention_look
from gradproof.instruments.grids import find_grids, find_padding

PAD, MASK, END, VOCABULARY, LENGTH, ROWS, WIDTH = 0, 1, 2, 15, 12, 16, 16


class Encoder(nn.Module):
    def __init__(self, mask="right", axis=-1):
        super().__init__()
        self.mask, self.axis = mask, axis
        self.tok, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x).view(*ids.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)
        real = (ids != PAD)[:, None, None, :]
        if self.mask == "fused":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=real)
        else:
            scores = q @ k.mT / math.sqrt(WIDTH)
            if self.mask == "right":
                scores = scores.masked_fill(~real, -1e9)
            elif self.mask == "inverted":
                scores = scores.masked_fill(real, -1e9)
            y = scores.softmax(self.axis) @ v
        return self.head(x + y.transpose(1, 2).reshape(x.shape))


def padded():
    lengths = torch.randint(4, LENGTH + 1, (ROWS, 1))
    lengths[0], lengths[1] = 4, LENGTH
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    ids = torch.where(torch.arange(LENGTH) == lengths - 1, END, ids)
    return torch.where(torch.arange(LENGTH) < lengths, ids, PAD)


def masked():
    ids = padded()
    chosen = (torch.rand(ids.shape) < 0.3) & (ids != PAD)
    return ids, torch.where(chosen, MASK, ids), chosen


def step(model, inputs, targets, **options):
    return evidence_of(
        model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), **options)
    )


@pytest.mark.parametrize(
    "kind, id",
    [("inverted", "only-padding-attended"), ("none", "padding-attended"), ("right", ""), ("fused", "")],
)
def test_attention_to_padding(kind, id):
    ids = padded()
    evidence = step(Encoder(kind), ids, ids.roll(-1, 1), ignore_index=PAD)
    assert confirmed_ids(where_does_attention_look, evidence) == (
        [f"attention-mask-error/{id}"] if id else []
    )
    if not id:
        assert excluded_families(where_does_attention_look, evidence) == ["attention-mask-error"]


@pytest.mark.parametrize("kind, ids", [("fused", []), ("none", ["attention-mask-error/padding-attended"])])
def test_padding_of_one_micro_batch_is_none_of_another(kind, ids):
    model, batches = Encoder(kind), [padded(), padded().flip(0)]

    def loss():
        wanted = [batch.roll(-1, 1).flatten() for batch in batches]
        terms = zip(batches, wanted, strict=True)
        return sum(F.cross_entropy(model(x).flatten(0, 1), y, ignore_index=PAD) for x, y in terms) / 2

    assert confirmed_ids(where_does_attention_look, evidence_of(model, loss)) == ids


def test_softmax_over_queries():
    ids = padded()
    evidence = step(Encoder("none", axis=-2), ids, ids.roll(-1, 1))
    assert "axis-or-shape-error/softmax-axis" in confirmed_ids(where_does_attention_look, evidence)


def test_padding_in_the_loss():
    ids = padded()
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), PAD)], 1)
    counted, end_ignored = (step(Encoder(), ids, targets, **o) for o in ({}, {"ignore_index": END}))
    for evidence in (counted, end_ignored):
        assert confirmed_ids(which_positions_count, evidence) == ["loss-mask-error/padding-counts"]
    right = step(Encoder(), ids, targets, ignore_index=PAD)
    assert excluded_families(which_positions_count, right) == ["loss-mask-error"]
    assert not confirmed_ids(which_positions_count, right)


def test_a_mask_by_hand():
    ids, model = padded(), Encoder()
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), PAD)], 1)

    def by_hand(mask):
        def make_loss():
            each = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
            return (each * mask.flatten()).sum() / mask.sum()

        return evidence_of(model, make_loss)

    assert not confirmed_ids(which_positions_count, by_hand(targets != PAD))
    assert confirmed_ids(which_positions_count, by_hand(targets == PAD)) == ["loss-mask-error/inverted"]


def test_masked_language_model():
    ids, inputs, chosen = masked()
    right = step(Encoder(), inputs, torch.where(chosen, ids, -100))
    inverted = step(Encoder(), inputs, torch.where(chosen, -100, ids))
    filled = step(Encoder(), inputs, torch.where(chosen, ids, PAD))
    changed = chosen & (torch.rand(ids.shape) < 0.2)  # as BERT does it: some are shown, some exchanged
    shown = torch.where(changed, torch.randint(3, VOCABULARY, ids.shape), inputs)
    some_shown = step(Encoder(), shown, torch.where(chosen, -100, ids))
    assert confirmed_ids(which_positions_count, some_shown) == ["loss-mask-error/inverted"]
    assert not confirmed_ids(which_positions_count, step(Encoder(), shown, torch.where(chosen, ids, -100)))
    assert not confirmed_ids(which_positions_count, right)
    assert confirmed_ids(which_positions_count, inverted) == ["loss-mask-error/inverted"]
    assert confirmed_ids(which_positions_count, filled) == ["loss-mask-error/padding-counts"]


def test_a_batch_padded_in_the_step():
    """pad_sequence fills its result in place: the tokens are those that the embedding read."""
    rows = [row[row != PAD] for row in padded()]
    model = Encoder("inverted")

    def make_loss():
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten(), ignore_index=PAD)

    evidence = evidence_of(model, make_loss)
    found = confirmed_ids(where_does_attention_look, evidence)
    assert found == ["attention-mask-error/only-padding-attended"]
    (grid, *_) = find_grids(evidence)
    assert float(grid.perturb(0, 1)[1].max()) > 0


def test_a_mean_over_all_positions():
    model, x, y = nn.Linear(3, 5), torch.randn(8, 3), torch.randn(8, 5)
    mask = (torch.arange(5) < 2).float().expand(8, 5)
    reductions = {
        "all": lambda each: (each * mask).mean(),
        "filled": lambda each: each.masked_fill(mask == 0, 0.0).mean(),
        "valid": lambda each: (each * mask).sum() / mask.sum(),
        "picked": lambda each: each[mask == 1].mean(),
        "weighed": lambda each: (each * torch.tensor([1.0, 2, 1, 1, 2])).mean(),
    }
    for name, reduce in reductions.items():
        evidence = evidence_of(model, lambda r=reduce: r((model(x) - y) ** 2))
        expected = ["loss-mask-error/mean-over-all"] if name in ("all", "filled") else []
        assert confirmed_ids(which_positions_count, evidence) == expected, name


def test_sorted_targets_are_not_padded():
    rows = torch.randint(1, 9, (64, 5), generator=torch.Generator().manual_seed(0)).sort(1).values
    assert find_padding(rows) is None and find_padding(rows.flip(1)) is None
    rows[::2, 3:] = 9
    rows[::4, 2:] = 9
    assert find_padding(rows.roll(1, 0)[:, [1, 0, 2, 3, 4]]) == 9


@pytest.mark.parametrize(
    "options, ids", [({}, ["loss-mask-error/padding-counts"]), ({"ignore_index": 0}, [])]
)
def test_what_a_packed_recurrence_writes_into_a_view_is_seen(options, ids):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.tok, self.rnn, self.out = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)

        def forward(self, words, lengths):
            pack = nn.utils.rnn.pack_padded_sequence
            packed = pack(self.tok(words), lengths, batch_first=True, enforce_sorted=False)
            return self.out(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])

    torch.manual_seed(0)
    words = [torch.randint(1, 9, (length,)) for length in (7, 4, 6, 3, 7, 5, 2, 6)]
    lengths = torch.tensor([len(row) for row in words])
    tags = nn.utils.rnn.pad_sequence([row % 8 + 1 for row in words], batch_first=True)
    words = nn.utils.rnn.pad_sequence(words, batch_first=True)
    model = Tagger()
    loss = lambda: F.cross_entropy(model(words, lengths).flatten(0, 1), tags.flatten(), **options)  # noqa: E731
    assert confirmed_ids(which_positions_count, evidence_of(model, loss)) == ids


@pytest.mark.parametrize("answers_count, id", [(True, []), (False, ["loss-mask-error/rest-left-out"])])
def test_prompts_and_answers(answers_count, id):
    ids = padded()
    targets = torch.cat([ids[:, 1:], torch.full((ROWS, 1), PAD)], 1)
    places = torch.arange(LENGTH)
    targets = torch.where((places < 1) if answers_count else (places >= 1), -100, targets)
    targets[targets == PAD] = -100
    assert confirmed_ids(which_positions_count, step(Encoder(), ids, targets)) == id


def test_one_token_for_the_start_the_end_and_padding():
    """Names, one a row: 0 opens it, closes it and fills what is left, which does not count."""
    lengths = torch.randint(2, LENGTH - 4, (ROWS, 1))
    names = torch.where(
        torch.arange(LENGTH) < lengths, torch.randint(1, VOCABULARY, (ROWS, LENGTH)), torch.tensor(0)
    )
    ids = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), names[:, :-1]], 1)
    targets = torch.where(torch.arange(LENGTH) <= lengths, names, -100)
    assert confirmed_ids(which_positions_count, step(Encoder("none"), ids, targets)) == []


@pytest.mark.parametrize("ends", [1, 2, LENGTH])
def test_one_token_for_the_end_and_for_padding(ends):
    """The end of each text is learned, as it must be; what comes behind it is padding."""
    lengths = torch.randint(4, LENGTH - 2, (ROWS, 1))
    ids = torch.where(
        torch.arange(LENGTH) < lengths, torch.randint(3, VOCABULARY, (ROWS, LENGTH)), torch.tensor(PAD)
    )
    targets = torch.where(torch.arange(LENGTH) < lengths + ends, ids, -100).roll(-1, 1)
    targets[:, -1] = -100
    found = confirmed_ids(which_positions_count, step(Encoder("none"), ids, targets))
    assert found == ([] if ends == 1 else ["loss-mask-error/padding-counts"])


def spell(lengths, labels=8, first=1, **options):
    """Sounds of 40 frames that a network makes 20 of, with the lengths that the loss is told."""
    torch.manual_seed(0)
    model = nn.Conv1d(4, 6, 2, stride=2)
    sounds, letters = torch.randn(16, 4, 40), torch.randint(first, first + 5, (16, labels))
    options = {"zero_infinity": True, **options}

    def loss():
        scores = model(sounds).permute(2, 0, 1).log_softmax(-1)
        return F.ctc_loss(scores, letters, lengths, torch.full((16,), labels), **options)

    return confirmed_ids(which_positions_count, evidence_of(model, loss))


def test_frames_that_the_loss_is_not_told_of():
    assert spell(torch.full((16,), 40 // 8)) == ["loss-mask-error/frames-left-out"]
    assert spell(torch.full((16,), 20)) == []
    assert spell(torch.randint(12, 21, (16,))) == []
    assert spell(torch.full((16,), 20), labels=24) == []  # that is no matter of lengths


def test_labels_that_are_the_blank():
    frames = torch.full((16,), 20)
    assert spell(frames, first=0) == ["loss-mask-error/blank-in-targets"]
    assert spell(frames, first=0, blank=5) == []


def test_padding_that_is_the_blank_is_no_label():
    torch.manual_seed(0)
    model, sounds, lengths = nn.LSTM(4, 6), torch.randn(20, 12, 4), torch.randint(2, 6, (12,))
    letters = torch.randint(1, 6, (12, 6)) * (torch.arange(6) < lengths[:, None])

    def loss(letters):
        return F.ctc_loss(model(sounds)[0].log_softmax(-1), letters, torch.full((12,), 20), lengths)

    flat = torch.cat([row[:length] for row, length in zip(letters, lengths.tolist(), strict=True)])
    for given in (letters, flat):
        assert confirmed_ids(which_positions_count, evidence_of(model, lambda given=given: loss(given))) == []
        wrong = evidence_of(model, lambda given=given: loss((given - 1).clamp(min=0)))
        assert confirmed_ids(which_positions_count, wrong) == ["loss-mask-error/blank-in-targets"]
