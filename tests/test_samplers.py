"""Samplers whose weights draw the frequent classes more often, or are not for samples; and weights that are meant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

import gradproof

FAMILY = "data-order-or-sampling"
INVERTED = f"{FAMILY}/rare-classes-drawn-less"
SHARES = torch.tensor([0.6, 0.25, 0.1, 0.05])


class Table(Dataset):
    """Keeps labels as a list; no sample may be read to find them."""

    def __init__(self, x, y):
        self.x, self.labels, self.reads = x, y.tolist(), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads += 1
        return self.x[i], self.labels[i]


def table(shares=SHARES, samples=400):
    torch.manual_seed(0)
    y = torch.multinomial(shares, samples, replacement=True)
    return torch.randn(samples, 6) + F.one_hot(y, 6), y


def train(path, make_loader):
    with gradproof.watch(nn.Linear(1, 1), out=path / "run"):
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(make_loader()):
            if number == 12:
                break
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {c.id: c for c in gradproof.diagnose(path / "run").causes if c.family == FAMILY}


def loader(data, weights, **how):
    return DataLoader(data, batch_size=20, sampler=WeightedRandomSampler(weights, 400, **how))


def counts_of(y):
    return torch.bincount(y).float()


def test_frequencies_in_place_of_their_inverses(tmp_path):
    def make():
        x, y = table()
        class_weights = counts_of(y) / len(y)
        return loader(TensorDataset(x, y), class_weights[y])

    cause = train(tmp_path, make)[INVERTED]
    assert cause.level == "problem" and cause.where.startswith("test_samplers.py:")


def test_the_line_that_computes_the_weights_is_named(tmp_path):
    def make():
        x, y = table()
        weights = counts_of(y)[y]
        sampler = WeightedRandomSampler(weights, 400)
        return DataLoader(TensorDataset(x, y), batch_sampler=BatchSampler(sampler, 20, False))

    first = make.__code__.co_firstlineno
    where = train(tmp_path, make)[INVERTED].where
    assert where.startswith(f"test_samplers.py:{first + 3}") and f"test_samplers.py:{first + 2}" in where


def test_two_classes_in_a_list(tmp_path):
    x, y = table(torch.tensor([0.9, 0.1]))
    data = Subset(Table(x, y), range(50, 400))
    found = train(tmp_path, lambda: loader(data, counts_of(y)[y[50:]].tolist()))
    assert found[INVERTED].level == "problem"
    assert data.dataset.reads == 13 * 20  # by the loader alone


def test_the_inverses_beside_other_classes(tmp_path):
    x, y = table()
    wrong = (1 / counts_of(y)).flip(0)
    assert INVERTED in train(tmp_path, lambda: loader(TensorDataset(x, y), wrong[y]))
    wrong = (1 / counts_of(y))[[1, 2, 3, 0]]
    assert INVERTED in train(tmp_path, lambda: loader(TensorDataset(x, y), wrong[y]))


def test_weights_for_classes(tmp_path):
    x, y = table()
    cause = train(tmp_path, lambda: loader(TensorDataset(x, y), 1 / counts_of(y)))
    assert cause[f"{FAMILY}/weights-of-classes"].level == "problem"


@pytest.mark.parametrize(
    "weigh",
    [
        lambda y: 1 / counts_of(y)[y],
        lambda y: counts_of(y)[y] ** -0.5,  # half way
        lambda y: 1 - counts_of(y)[y] / len(y),
        lambda y: torch.ones(len(y)),
        lambda y: torch.rand(len(y)),  # how difficult each sample is
        lambda y: counts_of(y)[y] * (0.5 + torch.rand(len(y))),
        lambda y: torch.tensor([1.0, 2.0, 1.0, 0.5])[y],  # somebody's own choice
    ],
)
def test_weights_that_are_meant_are_silent(tmp_path, weigh):
    x, y = table()
    assert not train(tmp_path, lambda: loader(TensorDataset(x, y), weigh(y)))


def test_even_classes_are_silent(tmp_path):
    x, y = table(torch.ones(4))
    assert not train(tmp_path, lambda: loader(TensorDataset(x, y), counts_of(y)[y]))
