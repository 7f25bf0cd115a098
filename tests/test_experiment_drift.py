"""Batches changed in place that are views of the data; and copies, fresh batches, one pass, memories."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.stored import are_data_kept_as_they_were

ID = "aliasing-or-inplace/stored-data-changed"


def found(make_input, steps=10):
    """Ten steps over data of 4 batches; `make_input(data, rows, model)` is what a step feeds in."""
    torch.manual_seed(0)
    model, data = nn.Linear(5, 1), torch.randn(32, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = {"step": -1}

    def loss():
        state["step"] += 1
        first = state["step"] % 4 * 8
        return model(make_input(data, slice(first, first + 8), model)).pow(2).mean()

    step = plain_step(model, optimizer, loss)
    return examine(are_data_kept_as_they_were, model, optimizer, step, steps=steps)


def noisy(data, rows, model):
    x = data[rows]
    x += 0.1 * torch.randn(x.shape)
    return x


def overwritten(data, rows, model):
    data[rows] = torch.randn(8, 5)
    return data[rows]


def normalised(data, rows, model):
    return data[rows].sub_(data.mean()).div_(data.std())


@pytest.mark.parametrize("make_input", [noisy, normalised])
def test_views_changed_in_place(make_input):
    verdicts = found(make_input)
    assert ids(verdicts, "problem") == {ID}
    assert "test_experiment_drift.py" in verdicts[0].where


def test_one_pass_over_the_data_is_silent():
    assert not found(noisy, steps=4)


def remembered(data, rows, model):
    data[rows].mul_(0.9).add_(model(data[rows]).detach())
    return data[rows]


@pytest.mark.parametrize(
    "make_input",
    [
        overwritten,
        remembered,
        lambda data, rows, model: data[rows] + 0.1 * torch.randn(8, 5),
        lambda data, rows, model: data[rows].clone().add_(0.1),
        lambda data, rows, model: torch.randn(32, 5)[rows].add_(0.1),
        lambda data, rows, model: data[torch.arange(32)[rows]].add_(0.1),
    ],
)
def test_copies_buffers_and_memories_are_silent(make_input):
    assert not found(make_input)
