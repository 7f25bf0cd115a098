"""Class weights that grow with the frequency, and ones that balance or prefer; terms that drown others."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.losses.weighing import are_terms_weighed_alike
from gradproof.instruments.weights import Term

SHARES = torch.tensor([0.8, 0.15, 0.05])


def train(weight, shares=SHARES):
    torch.manual_seed(0)
    model = nn.Linear(6, len(shares))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.CrossEntropyLoss(weight=weight)

    def loss():
        return criterion(model(torch.randn(256, 6)), torch.multinomial(shares, 256, replacement=True))

    train = plain_step(model, optimizer, loss)
    return examine(are_terms_weighed_alike, model, optimizer, train, steps=3)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_weights_that_grow_with_the_frequency(power):
    said = train(SHARES**power / (SHARES**power).mean())
    assert ids(said) == {"loss-scale-or-sign/class-weights"} and said[-1].level == "problem"


@pytest.mark.parametrize(
    "weight",
    [
        SHARES**-0.5,
        1 / SHARES,
        torch.ones(3),
        torch.tensor([1.0, 4.0, 1.0]),
        torch.tensor([1.2, 1.1, 1.0]),
        None,
    ],
)
def test_weights_that_balance_or_prefer(weight):
    assert not train(weight)


def test_of_two_classes_the_frequent_one_may_matter():
    said = train(torch.tensor([2.0, 1.0]), torch.tensor([0.9, 0.1]))
    assert ids(said, "problem") == set() and ids(said, "warning") == {"loss-scale-or-sign/class-weights"}


def tag(make_weight, shares=(0.02, 0.05, 0.1, 0.2)):
    torch.manual_seed(0)
    shares = torch.tensor(shares)
    model = nn.Linear(6, len(shares))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.BCEWithLogitsLoss(pos_weight=make_weight(shares))

    def loss():
        return criterion(model(torch.randn(256, 6)), (torch.rand(256, len(shares)) < shares).float())

    return examine(are_terms_weighed_alike, model, optimizer, plain_step(model, optimizer, loss), steps=3)


def test_a_rare_yes_that_weighs_less():
    said = tag(lambda shares: shares / (1 - shares))
    assert ids(said) == {"loss-scale-or-sign/class-weights"} and said[-1].level == "problem"
    assert {found.level for found in tag(lambda shares: shares / (1 - shares), (0.1,))} == {"warning"}


@pytest.mark.parametrize(
    "make_weight",
    [
        lambda shares: (1 - shares) / shares,
        lambda shares: ((1 - shares) / shares).sqrt(),
        torch.ones_like,
        lambda shares: torch.full_like(shares, 0.5),
    ],
)
def test_a_yes_that_is_balanced_or_meant(make_weight):
    assert not tag(make_weight)


class Autoencoder(nn.Module):
    """Blurs of 64 entries through a code of 4: by two matrices, or by a convolution and a recurrence."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.encode = nn.Linear(64, 8) if kind == "matrices" else nn.Conv1d(1, 8, 64)
        self.decode = nn.Linear(4, 64) if kind == "matrices" else nn.GRU(4, 64, batch_first=True)

    def forward(self, x):
        mean, log_variance = self.encode(x if self.kind == "matrices" else x[:, None]).view(-1, 8).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        out = self.decode(code if self.kind == "matrices" else code[:, None])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return (out if self.kind == "matrices" else 2 * out[0][:, 0]), divergence


@pytest.mark.parametrize("kind", ["matrices", "recurrence"])
@pytest.mark.parametrize("weigh", ["drowned", "summed", "small weight", "early"])
def test_a_divergence_that_drowns_a_comparison(kind, weigh):
    torch.manual_seed(0)
    patterns, model = torch.rand(4, 64).round(), Autoencoder(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draw = lambda: torch.rand(32, 4).softmax(1).pow(2) @ patterns  # noqa: E731

    def loss():
        x = draw()
        made, divergence = model(x)
        error = nn.functional.mse_loss(made, x, reduction="sum" if weigh == "summed" else "mean")
        if weigh == "summed":
            return error / 32 + divergence
        return error + (1e-3 if weigh == "small weight" else 1) * divergence

    for _ in range(0 if weigh == "early" else 300):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    evidence = evidence_of(model, loss, step=1 if weigh == "early" else 316, optimizer=optimizer)
    found = confirmed_ids(are_terms_weighed_alike, evidence)
    assert found == (["loss-scale-or-sign/one-term-drowns"] if weigh == "drowned" else [])


@pytest.mark.parametrize("batch", [8, 93, 99, 105, 1000])
def test_a_sum_that_is_divided_by_the_batch_is_an_average_of_any_size(batch):
    """1 / (1 / 93) is a little less than 93."""
    term = lambda factor: Term(None, (batch, 3), False, [1.0, factor])  # noqa: E731
    assert term(1 / batch).is_averaged_over(batch) and term(-1 / (4 * batch)).is_averaged_over(batch)
    assert not any(term(f).is_averaged_over(batch) for f in (2 / batch, 1 / (batch + 1), 0.0, 1.0))
