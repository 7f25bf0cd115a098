"""Samples that hear each other by mistake, and couplings that are meant."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from language_models import Recurrent, Transformer, language_step
from torch import nn

from gradproof.experiments.needs import why_not
from gradproof.experiments.network.samples import are_samples_independent
from gradproof.experiments.table import BY_NAME, find

X, Y, CLASS = torch.randn(8, 5), torch.randn(8), torch.randint(0, 3, (8,))


class Net(nn.Module):
    def __init__(self, middle=None, out=3):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, out)
        self.middle = middle or (lambda h: h)

    def forward(self, x):
        return self.b(self.middle(torch.tanh(self.a(x))))


class SequenceClassifier(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.rnn = nn.GRU(5, 7, batch_first=batch_first)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def classify(model, x=X):
    return evidence_of(model, lambda: F.cross_entropy(model(x), CLASS))


@pytest.mark.parametrize(
    "middle, id",
    [
        (lambda h: h.softmax(0), "softmax-over-the-batch"),
        (lambda h: F.normalize(h, dim=0), "normalised-over-the-batch"),
        (lambda h: h.T.contiguous().view(8, 7), "view-for-transpose"),
    ],
)
def test_an_axis_too_far(middle, id):
    (found,) = [v for v in are_samples_independent(classify(Net(middle))) if v.id]
    assert found.id == f"axis-or-shape-error/{id}" and "test_samples.py" in found.where
    assert ("permute" in found.fix) == (id == "view-for-transpose")


@pytest.mark.parametrize("axis, ids", [(0, ["axis-or-shape-error/sum-over-the-batch"]), (1, [])])
@pytest.mark.parametrize("running", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_a_running_total_along_the_batch(running, axis, ids):
    """What light is left along each ray, say."""
    evidence = classify(Net(lambda h: running(h.sigmoid(), axis)))
    assert confirmed_ids(are_samples_independent, evidence) == ids


def test_time_taken_for_batch():
    for model, x in ((SequenceClassifier(False), torch.randn(8, 6, 5)),):
        assert confirmed_ids(are_samples_independent, classify(model, x)) == [
            "axis-or-shape-error/batch-first"
        ]
    model = Recurrent(batch_first=False)
    found = confirmed_ids(are_samples_independent, evidence_of(model, language_step(model)))
    assert found == ["axis-or-shape-error/batch-first"]


class ReadsByOneToken(nn.Module):
    """A token in front of the series that is to hear it all: attention along the batch hears nothing."""

    def __init__(self, batch_first):
        super().__init__()
        self.inp, self.out, self.token = nn.Linear(5, 8), nn.Linear(8, 3), nn.Parameter(torch.zeros(1, 1, 8))
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)

    def forward(self, x):
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.inp(x)], 1)
        return self.out(self.attention(tokens)[:, 0])


def test_a_batch_taken_for_time_of_which_no_prediction_hears():
    x = torch.randn(8, 6, 5)
    found = confirmed_ids(are_samples_independent, classify(ReadsByOneToken(False), x))
    assert found == ["axis-or-shape-error/batch-first"]
    assert confirmed_ids(are_samples_independent, classify(ReadsByOneToken(True), x)) == []


def test_a_head_of_zeros_is_deaf_and_excludes_nothing():
    model = Net()
    nn.init.zeros_(model.b.weight)
    (said,) = are_samples_independent(classify(model))
    assert said.verdict == "undecided" and "not its own either" in said.reason


def test_rows_that_may_be_one_series_are_a_note():
    class Series(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(5, 7), nn.Linear(7, 3)

        def forward(self, x):
            return self.out(self.rnn(x.unsqueeze(1))[0].squeeze(1))

    (found,) = [v for v in are_samples_independent(classify(Series())) if v.id]
    assert (found.level, found.confidence) == ("note", "possible")


class Forecaster(nn.Module):
    """A prediction for every hour of every series: the shapes do not tell which axis is which."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.out(self.rnn(x.unsqueeze(-1))[0]).squeeze(-1)


SHAPED = [("time first", "note"), ("batch first", "problem"), ("noise", "note")]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case, level", SHAPED)
def test_of_two_axes_the_smooth_one_is_time(case, level, stacked):
    """Also of a batch that the step itself makes of its windows."""
    model, hours = Forecaster(), torch.arange(48.0)
    series = torch.sin(hours[:, None] / 4 + 7 * torch.rand(24)) + 0.1 * torch.randn(48, 24)
    x = {"time first": series, "batch first": series.T, "noise": torch.randn(48, 24)}[case]

    def make_loss():
        batch = torch.stack(list(x)) if stacked else x
        return F.mse_loss(model(batch), batch.roll(-1, 0))

    evidence = evidence_of(model, make_loss)
    (found,) = [v for v in are_samples_independent(evidence) if v.id]
    assert found.id.endswith("batch-first")
    assert (found.level, found.confidence) == (level, "possible" if level == "note" else "proven")


@pytest.mark.parametrize("model", [Net(), Net(lambda h: F.normalize(h, dim=1)), Net(lambda h: h.softmax(1))])
def test_independent_samples_are_excluded(model):
    assert excluded_families(are_samples_independent, classify(model)) == ["axis-or-shape-error"]


def test_sequences_of_either_order_are_well():
    for model, time_first in ((Transformer(), False), (Recurrent(), False), (Recurrent(False), True)):
        evidence = evidence_of(model, language_step(model, time_first=time_first))
        assert not confirmed_ids(are_samples_independent, evidence)


def test_couplings_that_are_meant():
    graph = torch.rand(8, 8).softmax(1)

    def contrastive(model):
        z = F.normalize(model(X), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(8))

    def standardised(h):
        return (h - h.mean(0)) / (h.std(0) + 1e-5)

    norm, plain = Net(nn.BatchNorm1d(7)), Net()
    for evidence in (
        evidence_of(plain, lambda: contrastive(plain)),
        classify(norm),
        classify(Net(standardised)),
        classify(Net(lambda h: graph @ h)),
    ):
        assert not confirmed_ids(are_samples_independent, evidence)


def test_batch_norm_hides_nothing():
    """Its statistics couple samples by design; held, they show whether something else does."""
    healthy = Net(nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 7)))
    assert excluded_families(are_samples_independent, classify(healthy)) == ["axis-or-shape-error"]
    guilty = Net(nn.Sequential(nn.BatchNorm1d(7), nn.Softmax(0)))
    (found,) = [v for v in are_samples_independent(classify(guilty)) if v.id]
    assert found.id == "axis-or-shape-error/softmax-over-the-batch"
    assert "first through _softmax" in found.evidence[0]


def test_packed_sequences_lie_in_one_column():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.out(self.gru(packed)[1][-1])

    model, lengths = Packed(), torch.tensor([7, 5, 3, 6])
    x, y = torch.randn(4, 7, 5), torch.tensor([0, 1, 2, 0])
    evidence = evidence_of(model, lambda: F.cross_entropy(model(x, lengths), y))
    assert not confirmed_ids(are_samples_independent, evidence)


def test_sparse_inputs_are_asked_about_without_an_error():
    """A graph between samples, and features that are mostly zero: none of them can be viewed, or made dense."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(0.1 * torch.randn(9, 7)), nn.Parameter(0.1 * torch.randn(7, 3))

        def forward(self, features, graph):
            hidden = torch.relu(torch.sparse.mm(graph, torch.sparse.mm(features, self.a)))
            return torch.sparse.mm(graph, hidden @ self.b)

    torch.manual_seed(0)
    graph = (torch.eye(16) + torch.eye(16).roll(1, 0)).to_sparse()
    features = (torch.rand(16, 9) > 0.7).float().to_sparse()
    model, classes = Graph(), torch.randint(0, 3, (16,))
    evidence = evidence_of(model, lambda: F.cross_entropy(model(features, graph), classes))
    asked = [name for name, question in BY_NAME.items() if not why_not(question, evidence)]
    assert len(asked) > 25 and "are_samples_independent" in asked
    said = [v.id for name in asked for v in find(BY_NAME[name])(evidence) if v.verdict == "confirmed"]
    assert not [
        id for id in said if id.startswith(("axis", "data", "input", "detached"))
    ]  # nothing of these inputs
