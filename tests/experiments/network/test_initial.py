"""Symmetric and oversized beginnings, and the zeros that are put at the end of a network on purpose."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.initial import are_units_all_the_same, where_does_it_start


def classifier(change=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    if change:
        change(model)
    return model


def verdicts(model, experiment):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(32, 6), torch.randint(0, 4, (32,))
    step = plain_step(model, optimizer, lambda: F.cross_entropy(model(x), y))
    return examine(experiment, model, optimizer, step)


def zeros(model):
    for parameter in model.parameters():
        nn.init.zeros_(parameter)


def constant(model):
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)


def last_zero(model):
    nn.init.zeros_(model[4].weight)


@pytest.mark.parametrize("change", [zeros, constant])
def test_units_that_are_all_the_same(change):
    found = verdicts(classifier(change), are_units_all_the_same)
    assert ids(found) == {"bad-init/symmetric"} and found[0].where in ("0", "2")


@pytest.mark.parametrize("change", [None, last_zero])
def test_random_units_and_a_last_layer_of_zeros_are_excluded(change):
    found = verdicts(classifier(change), are_units_all_the_same)
    assert {v.verdict for v in found} == {"excluded"} and "3 matrices" in found[0].reason


def test_factors_of_zero_in_two_embeddings():
    tables = nn.ModuleDict({"user": nn.Embedding(9, 4, sparse=True), "item": nn.Embedding(9, 4, sparse=True)})
    for table in tables.values():
        nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    row, wanted = torch.arange(9), torch.randn(9)
    step = plain_step(
        tables,
        optimizer,
        lambda: F.mse_loss((tables["user"](row) * tables["item"](row)).sum(1), wanted),
    )
    found = examine(are_units_all_the_same, tables, optimizer, step)
    assert ids(found) == {"bad-init/symmetric"} and found[0].where == "user"


def test_last_layer_too_large_is_named():
    found = verdicts(classifier(lambda m: nn.init.normal_(m[4].weight, std=20)), where_does_it_start)
    assert (
        ids(found) == {"bad-init/too-large", "bad-init/loss-at-start"}
        and found[0].where == "4"
        and not found[0].if_troubled
    )


def test_usual_sizes_are_silent():
    assert not verdicts(classifier(), where_does_it_start)


class Ensemble(nn.Module):
    """Four members at once: each sums over its 48 inputs, not over all weights of a member."""

    def __init__(self, size=1.0):
        super().__init__()
        self.first = nn.Parameter(size * torch.randn(4, 6, 48) / 6**0.5)
        self.second = nn.Parameter(torch.randn(4, 48, 48) / 48**0.5)
        self.last = nn.Linear(48, 4)

    def forward(self, x):
        hidden = torch.bmm(x.expand(4, -1, -1), self.first).relu()
        return self.last(torch.bmm(hidden, self.second).relu().mean(0))


@pytest.mark.parametrize("size, found", [(8.0, {"bad-init/too-large"}), (1.0, set())])
def test_weights_of_an_ensemble(size, found):
    torch.manual_seed(0)
    said = verdicts(Ensemble(size), where_does_it_start)
    assert ids(said) == found and all("first" in v.evidence[0] for v in said)


@pytest.mark.parametrize("std, level", [(1.0, "problem"), (0.1, None)])
def test_squashers_that_begin_at_their_limit(std, level):
    """Of a regression whose first loss is no larger than others: hardly any gradient comes through."""
    torch.manual_seed(0)
    sizes = [(6, 128), (128, 128), (128, 128)]
    layers = [layer for pair in sizes for layer in (nn.Linear(*pair), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(128, 1))
    for layer in model[:-1:2]:
        nn.init.normal_(layer.weight, std=std)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(32, 6)
    step = plain_step(model, optimizer, lambda: F.mse_loss(model(x), x[:, :1]))
    found = [v for v in examine(where_does_it_start, model, optimizer, step) if v.id == "bad-init/too-large"]
    assert [(v.level, v.if_troubled) for v in found][:1] == ([(level, False)] if level else [])
