"""Class weights that grow with the frequency of the class, and ones that balance or prefer."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.weighing import are_terms_weighed_alike

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
