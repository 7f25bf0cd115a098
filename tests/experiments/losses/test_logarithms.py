"""Rates, variances and distributions given to losses that want their logarithms, the reverse, and fitting pairs."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.losses.activation import does_the_output_fit_the_loss
from gradproof.experiments.losses.logarithms import are_logarithms_where_they_are_wanted

QUESTIONS = (does_the_output_fit_the_loss, are_logarithms_where_they_are_wanted)
torch.manual_seed(0)
X = torch.randn(16, 5)
COUNTS, VALUE = torch.poisson(torch.ones(16, 4) * 2), torch.randn(16, 4)
SOFT = torch.randn(16, 4).softmax(1)
CLASSES = torch.randint(1, 4, (4, 2))


def ctc(log_probs):
    return F.ctc_loss(log_probs.view(4, 4, 4), CLASSES, torch.full((4,), 4), torch.full((4,), 2))


def by_hand(log_rate):
    return (torch.exp(log_rate) - COUNTS * log_rate).mean()


def gaussian(out, log_variance):
    return (log_variance + (out - VALUE) ** 2 / log_variance.exp()).mean()


def divergence(log_variance, mean):
    return -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()


def focal(scores):
    p = torch.sigmoid(scores).clamp(1e-4, 1 - 1e-4)
    return -((1 - p) ** 2 * p.log() * (VALUE > 0) + p**2 * (1 - p).log() * (VALUE <= 0)).mean()


BAD = {
    "focal loss of a sigmoid": (lambda out: focal(out.sigmoid()), "sigmoid-twice"),
    "log sigmoid of a softmax": (lambda out: -F.logsigmoid(out.softmax(1))[:, 0].mean(), "sigmoid-twice"),
    "softplus": (lambda out: F.poisson_nll_loss(F.softplus(out), COUNTS), "rate-as-log-rate"),
    "relu and more": (
        lambda out: F.poisson_nll_loss(F.relu(out) + 1e-3, COUNTS, full=True),
        "rate-as-log-rate",
    ),
    "exp twice": (lambda out: F.poisson_nll_loss(out.exp().view(-1), COUNTS.view(-1)), "rate-as-log-rate"),
    "by hand": (lambda out: by_hand(out.abs()), "rate-as-log-rate"),
    "square": (lambda out: F.poisson_nll_loss(out**2, COUNTS), "rate-as-log-rate"),
    "log variance": (lambda out: gaussian(out, out.relu()), "positive-as-log"),
    "variational": (lambda out: divergence(F.relu(out), out), "positive-as-log"),
    "raw rate": (lambda out: F.poisson_nll_loss(out, COUNTS, log_input=False), "raw-rate"),
    "divergence of softmax": (
        lambda out: F.kl_div(out.softmax(1), SOFT, reduction="batchmean"),
        "missing-log",
    ),
    "divergence of scores": (lambda out: F.kl_div(out, SOFT, reduction="batchmean"), "raw-scores"),
    "paths of softmax": (lambda out: ctc(out.softmax(-1)), "missing-log"),
    "paths of scores": (lambda out: ctc(out), "raw-scores"),
    "soft targets": (lambda out: F.cross_entropy(out.softmax(1), SOFT), "softmax-twice"),
}
GOOD = {
    "focal loss": lambda out: focal(out),
    "sigmoids side by side": lambda out: (out.sigmoid() * (1 - out).sigmoid() * VALUE).mean(),
    "log rate": lambda out: F.poisson_nll_loss(out, COUNTS),
    "log rate, limited": lambda out: F.poisson_nll_loss(out.clamp(-5, 5), COUNTS),
    "rate": lambda out: F.poisson_nll_loss(F.softplus(out), COUNTS, log_input=False),
    "log of softplus": lambda out: F.poisson_nll_loss(F.softplus(out).log(), COUNTS),
    "gaussian": lambda out: gaussian(out, out * 0.1),
    "variance": lambda out: F.gaussian_nll_loss(out, VALUE, F.softplus(out)),
    "variational": lambda out: divergence(out, out),
    "divergence": lambda out: F.kl_div(out.log_softmax(1), SOFT, reduction="batchmean"),
    "divergence of grids": lambda out: F.kl_div(
        out.view(4, 16).log_softmax(1).view(4, 4, 4),
        VALUE.view(4, 16).softmax(1).view(4, 4, 4),
        reduction="sum",
    ),
    "paths": lambda out: ctc(out.view(4, 4, 4).log_softmax(-1)),
    "soft targets": lambda out: F.cross_entropy(out, SOFT),
    "exponential of an error": lambda out: ((out - VALUE).abs().exp() - 1).mean(),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mismatch_is_named(name):
    make_loss, what = BAD[name]
    model = nn.Linear(5, 4)
    evidence = evidence_of(model, lambda: make_loss(model(X)))
    found = [id for question in QUESTIONS for id in confirmed_ids(question, evidence)]
    assert found == [f"loss-activation-mismatch/{what}"]


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_is_left_alone(name):
    model = nn.Linear(5, 4)
    evidence = evidence_of(model, lambda: GOOD[name](model(X)))
    assert not [id for question in QUESTIONS for id in confirmed_ids(question, evidence)]


class Recogniser(nn.Module):
    """Convolution and recurrence, time first behind them: (frames, batch, signs), as ctc_loss wants it."""

    def __init__(self):
        super().__init__()
        self.front, self.rnn = nn.Conv1d(5, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, sound):
        return self.out(self.rnn(self.front(sound).transpose(1, 2))[0]).transpose(0, 1)


def recognise(model, axis):
    lengths = torch.full((6,), 12), torch.full((6,), 2)
    scores = model(torch.randn(6, 5, 12)).log_softmax(axis)
    return F.ctc_loss(scores, torch.randint(1, 4, (6, 2)), *lengths)


def agree(model, axis):
    return F.kl_div(model(X).log_softmax(axis), SOFT, reduction="batchmean")


@pytest.mark.parametrize(
    "make, loss, right", [(Recogniser, recognise, 2), (lambda: nn.Linear(5, 4), agree, 1)]
)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_log_probabilities_along_another_axis(make, loss, right, axis):
    """They are log-probabilities, of the batch or of time: the axis is wrong, not what is given."""
    if axis > right:
        return
    model = make()
    said = does_the_output_fit_the_loss(evidence_of(model, lambda: loss(model, axis)))
    found = [v for v in said if v.id]
    assert [v.id for v in found] == ([] if axis == right else ["axis-or-shape-error/softmax-axis"])
    assert all("test_logarithms.py" in v.where and f"axis {axis}" in v.evidence[0] for v in found)
