"""Targets that are not one ahead, and language models that see the future, in small GPTs and LSTMs."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from language_models import BATCH, TIME, VOCABULARY, WIDTH, Recurrent, Transformer, language_step
from torch import nn

from gradproof.experiments.data.alignment import do_targets_line_up
from gradproof.experiments.network.future import does_it_see_the_future


@pytest.mark.parametrize("make", [Transformer, Recurrent])
@pytest.mark.parametrize("shift, id", [(0, "no-shift"), (2, "double-shift"), (3, "double-shift")])
def test_targets_not_one_ahead(make, shift, id):
    model = make()
    evidence = evidence_of(model, language_step(model, shift))
    assert confirmed_ids(do_targets_line_up, evidence) == [f"data-target-misaligned/{id}"]


def test_targets_one_ahead_are_excluded():
    for model, time_first in ((Transformer(), False), (Recurrent(), False), (Recurrent(False), True)):
        evidence = evidence_of(model, language_step(model, time_first=time_first))
        assert excluded_families(do_targets_line_up, evidence) == ["data-target-misaligned"]
        assert not confirmed_ids(do_targets_line_up, evidence)
        (verdict,) = do_targets_line_up(evidence)
        assert list(verdict.numbers) == [f"lag {lag}" for lag in range(-3, 4)]
        assert verdict.numbers["lag 1"] == 1 and verdict.numbers["lag 0"] < 0.5


def test_shift_before_the_loss():
    """Logits cut at the end, labels at the start; shifted labels cut once more are a double shift."""
    model = Transformer()
    text = torch.randint(0, VOCABULARY, (BATCH, TIME + 1))

    def make(labels):
        return lambda: F.cross_entropy(
            model(text[:, :TIME])[:, :-1].flatten(0, 1), labels[:, 1:TIME].flatten()
        )

    right, wrong = evidence_of(model, make(text)), evidence_of(model, make(text[:, 1:]))
    assert excluded_families(do_targets_line_up, right) == ["data-target-misaligned"]
    assert confirmed_ids(do_targets_line_up, wrong) == ["data-target-misaligned/double-shift"]


@pytest.mark.parametrize("ahead, ids", [(0, []), (1, ["data-target-misaligned/double-shift"])])
@pytest.mark.parametrize("classes", [VOCABULARY, TIME])
def test_as_many_rows_as_positions(ahead, ids, classes):
    """Which axis is that of time is no matter of its length: rows, and classes, may be as many."""
    model = Transformer()
    text = torch.randint(0, classes, (TIME, TIME + 2))

    def step():
        scores, labels = model(text[:, :TIME])[:, :-1, :classes], text[:, ahead : TIME + ahead]
        return F.cross_entropy(scores.reshape(-1, classes), labels[:, 1:].reshape(-1))

    evidence = evidence_of(model, step)
    assert confirmed_ids(do_targets_line_up, evidence) == ids
    assert excluded_families(do_targets_line_up, evidence) == ([] if ids else ["data-target-misaligned"])


@pytest.mark.parametrize("ahead, ids", [(1, []), (2, ["data-target-misaligned/double-shift"])])
def test_positions_that_are_chosen_by_a_mask(ahead, ids):
    model = Transformer()
    text = torch.randint(0, VOCABULARY, (BATCH, TIME + 2))
    chosen = torch.rand(BATCH, TIME) < 0.8

    def step():
        return F.cross_entropy(model(text[:, :TIME])[chosen], text[:, ahead : TIME + ahead][chosen])

    evidence = evidence_of(model, step)
    assert confirmed_ids(do_targets_line_up, evidence) == ids
    assert excluded_families(do_targets_line_up, evidence) == ([] if ids else ["data-target-misaligned"])


@pytest.mark.parametrize("causal", [True, False])
def test_several_texts_in_one_row(causal):
    """Each token may attend to those of its own text; the loss leaves out the last of each."""
    torch.manual_seed(
        0
    )  # of texts so short that a changed token has no later one of its own, nothing is known
    model = Transformer()
    text, ends = torch.randint(0, VOCABULARY, (BATCH, TIME + 1)), torch.rand(BATCH, TIME + 1) < 0.2
    number = ends.long().cumsum(1) - ends.long()
    same = number[:, :TIME, None] == number[:, None, :TIME]
    allowed = same & torch.ones(TIME, TIME).tril().bool() if causal else same
    counts = number[:, 1:] == number[:, :TIME]
    first = model.blocks[0]

    def step():
        x = model.tok(text[:, :TIME])
        q, k, v = first.qkv(x)[:, None].chunk(3, -1)
        x = x + first.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])[:, 0])
        return F.cross_entropy(model.head(x)[counts], text[:, 1:][counts])

    found = confirmed_ids(does_it_see_the_future, evidence_of(model, step))
    assert found == ([] if causal else ["attention-mask-error/sees-the-future"])


@pytest.mark.parametrize("make", [Transformer, Recurrent])
@pytest.mark.parametrize("ahead, ids", [(1, []), (2, ["data-target-misaligned/double-shift"])])
def test_a_loss_that_leaves_out_the_first_prediction(make, ahead, ids):
    """logits[:, 1:] against text[:, 2:] are next tokens, though the first target is two ahead of the first token."""
    model, text = make(), torch.randint(0, VOCABULARY, (BATCH, TIME + 3))

    def step():
        scores, targets = model(text[:, :TIME])[:, 1:], text[:, 1 + ahead : TIME + ahead]
        return F.cross_entropy(scores.reshape(-1, VOCABULARY), targets.reshape(-1))

    evidence = evidence_of(model, step)
    assert confirmed_ids(do_targets_line_up, evidence) == ids
    assert not confirmed_ids(does_it_see_the_future, evidence)
    assert excluded_families(does_it_see_the_future, evidence) == ([] if ids else ["attention-mask-error"])


def test_a_loss_that_leaves_out_the_first_prediction_of_a_model_without_a_mask():
    model, text = Transformer("fused, not causal"), torch.randint(0, VOCABULARY, (BATCH, TIME + 1))

    def step():
        scores = model(text[:, :TIME])[:, 1:].transpose(1, 2)  # (B, V, T)
        return F.cross_entropy(scores, text[:, 2 : TIME + 1])

    evidence = evidence_of(model, step)
    assert confirmed_ids(does_it_see_the_future, evidence) == ["attention-mask-error/sees-the-future"]


def test_an_autoencoder_through_a_bottleneck_may_have_its_input_as_target():
    model = nn.ModuleDict(
        {"tok": nn.Embedding(VOCABULARY, WIDTH), "out": nn.Linear(WIDTH, TIME * VOCABULARY)}
    )
    ids = torch.randint(0, VOCABULARY, (BATCH, TIME))

    def step():
        code = model["tok"](ids).cumsum(1)[:, -1].tanh()
        return F.cross_entropy(model["out"](code).view(-1, VOCABULARY), ids.view(-1))

    assert not confirmed_ids(do_targets_line_up, evidence_of(model, step))


def padded_text():
    """Rows of four to TIME tokens, 0 behind their ends, and which positions are filled."""
    lengths = torch.tensor([4, TIME, 6, 7, 5, 8])
    filled = torch.arange(TIME) < lengths[:, None]
    return torch.randint(1, VOCABULARY, (BATCH, TIME)) * filled, filled


class Translator(nn.Module):
    """A GRU reads, another writes what it is told to, from the first one's last state."""

    def __init__(self):
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCABULARY, WIDTH, 0), nn.Linear(WIDTH, VOCABULARY)
        self.reads, self.writes = (nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, ids):
        return self.head(self.writes(self.tok(ids), self.reads(self.tok(ids.flip(0, 1)[:, 1:]))[1])[0])


@pytest.mark.parametrize("make", [Transformer, Translator])
@pytest.mark.parametrize("ignored", [0, -100])
@pytest.mark.parametrize("shift", [0, 1])
def test_padding_that_does_not_count_hides_no_target_that_is_fed(make, ignored, shift):
    """The decoder is fed text[:, 1:], which is the target, too; its twin is fed text[:, :-1]."""
    model, (text, _) = make(), padded_text()
    ids, targets = text[:, 1 - shift : TIME - shift], text[:, 1:].masked_fill(text[:, 1:] == 0, ignored)
    evidence = evidence_of(
        model, lambda: F.cross_entropy(model(ids).transpose(1, 2), targets, ignore_index=ignored)
    )
    (found,) = do_targets_line_up(evidence)
    if shift:
        assert (found.verdict, found.about) == ("excluded", "data-target-misaligned/shift")
    else:
        assert (found.id, found.level, found.confidence) == (
            "data-target-misaligned/no-shift",
            "problem",
            "proven",
        )


def masked(text, filled):
    """Every third token is asked for behind a mask, as BERT is."""
    asked = filled & (torch.arange(TIME) % 3 == 1)
    return text.masked_fill(asked, VOCABULARY - 1), text.masked_fill(~asked, -100)


def kept(text, filled):
    """Asked is for some tokens that lie open, to keep a denoiser from changing them."""
    return text, text.masked_fill(~(filled & (torch.arange(TIME) % 3 == 1)), -100)


def span(text, filled):
    """One span is cut out, and asked for in its place."""
    asked = filled & (torch.arange(TIME) > 1) & (torch.arange(TIME) < 5)
    return text.masked_fill(asked, VOCABULARY - 1), text.masked_fill(~asked, -100)


@pytest.mark.parametrize("ask", [masked, kept, span])
@pytest.mark.parametrize("kind", ["fused, not causal", "causal"])
def test_tokens_that_are_asked_for_here_and_there(kind, ask):
    model = Transformer(kind)
    ids, targets = ask(*padded_text())
    evidence = evidence_of(model, lambda: F.cross_entropy(model(ids).transpose(1, 2), targets))
    assert not confirmed_ids(do_targets_line_up, evidence)


def test_an_autoencoder_of_padded_rows():
    model, (text, filled) = nn.Linear(WIDTH, TIME * VOCABULARY), padded_text()
    tok = nn.Embedding(VOCABULARY, WIDTH, 0)
    both = nn.ModuleList([model, tok])

    def step():
        code = (tok(text) * filled[..., None]).cumsum(1)[:, -1].tanh()
        scores = model(code).view(-1, TIME, VOCABULARY).transpose(1, 2)
        return F.cross_entropy(scores, text, ignore_index=0)

    assert not confirmed_ids(do_targets_line_up, evidence_of(both, step))


@pytest.mark.parametrize(
    "kind, id",
    [
        ("upper", "attention-mask-error/sees-only-the-future"),
        ("fused, not causal", "attention-mask-error/sees-the-future"),
        ("diagonal", "attention-mask-error/sees-nothing-before"),
        ("not transposed", "axis-or-shape-error/view-for-transpose"),
        ("queries", "axis-or-shape-error/softmax-axis"),
    ],
)
def test_what_attention_sees(kind, id):
    model = Transformer(kind)
    found = [v for v in does_it_see_the_future(evidence_of(model, language_step(model), step=3)) if v.id]
    assert [v.id for v in found] == [id]
    assert "blocks.0" in found[0].where and "language_models.py" in found[0].where


def test_what_has_heard_the_past_once_is_not_masked_from_it():
    """Weights that have blown up make attention deaf; the mask is what it was."""
    heard, deaf = Transformer(), Transformer("diagonal")
    evidence = evidence_of(heard, language_step(heard), step=1)
    list(does_it_see_the_future(evidence))
    later = evidence_of(deaf, language_step(deaf), step=3)
    later.memory = evidence.memory
    assert not confirmed_ids(does_it_see_the_future, later)


def test_a_bidirectional_recurrence_sees_the_future():
    model = Recurrent(bidirectional=True)
    (found,) = confirmed_ids(does_it_see_the_future, evidence_of(model, language_step(model)))
    assert found == "attention-mask-error/sees-the-future"


@pytest.mark.parametrize("model", [Transformer("causal"), Transformer("fused"), Recurrent()])
def test_a_causal_model_is_excluded(model):
    evidence = evidence_of(model, language_step(model), step=3)
    assert excluded_families(does_it_see_the_future, evidence) == ["attention-mask-error"]
    assert not confirmed_ids(does_it_see_the_future, evidence)


@pytest.mark.parametrize(
    "kind, id", [("fused", []), ("fused, not causal", ["attention-mask-error/sees-the-future"])]
)
def test_a_text_that_is_written_word_by_word_in_the_step(kind, id):
    torch.manual_seed(0)
    model = Transformer(kind)

    def step():
        text = torch.randint(0, VOCABULARY, (BATCH, TIME + 1))
        for place in range(2, TIME + 1):
            text[:, place] = (text[:, place - 1] + text[:, place - 2]) % VOCABULARY
        return F.cross_entropy(model(text[:, :-1]).reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    verdicts = list(does_it_see_the_future(evidence_of(model, step)))
    assert [v.id for v in verdicts if v.verdict == "confirmed"] == id
    assert verdicts and all(v.where.startswith("blocks.0") for v in verdicts if v.id)
