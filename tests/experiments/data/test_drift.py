"""Batches changed in place that are views of the data; and copies, fresh batches, one pass, memories."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.data.stored import are_data_kept_as_they_were

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
    assert "test_drift.py" in verdicts[0].where


def test_parts_that_lie_elsewhere_in_each_pass():
    first = iter(range(0, 300, 7))

    def shifted(data, rows, model):
        at = next(first) % 24
        return noisy(data, slice(at, at + 8), model)

    assert ids(found(shifted), "problem") == {ID}


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


class Neighbours(nn.Module):
    """Each node and the sum of its neighbours; `copies`: in memory of its own."""

    def __init__(self, copies):
        super().__init__()
        self.out, self.copies = nn.Linear(5, 1), copies

    def forward(self, x, source, target):
        total = x.clone() if self.copies else x
        total.index_add_(0, target, x[source])
        return self.out(total / 4)


class Scaled(nn.Module):
    """A pixel's mean taken off in place; `copies`: by another tensor."""

    def __init__(self, copies):
        super().__init__()
        self.out, self.copies = nn.Conv1d(2, 1, 3), copies

    def forward(self, x):
        x = x.mul(0.9) if self.copies else x.mul_(0.9)
        return self.out(x)


def trained_on_one_tensor(model, give, validates=False):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss():
        if validates:
            with torch.no_grad():
                model(*give())
        return model(*give()).tanh().pow(2).mean()

    step = plain_step(model, optimizer, loss)
    return ids(examine(are_data_kept_as_they_were, model, optimizer, step, steps=8), "problem")


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_a_forward_that_changes_what_it_is_given(copies, validates):
    torch.manual_seed(1)
    nodes, (source, target) = torch.randn(30, 5), torch.randint(0, 30, (2, 60))
    graph = trained_on_one_tensor(Neighbours(copies), lambda: (nodes, source, target), validates)
    waves = torch.randn(8, 2, 12)
    series = trained_on_one_tensor(Scaled(copies), lambda: (waves,), validates)
    assert graph == series == (set() if copies else {ID})


def test_a_forward_that_changes_a_fresh_batch_or_one_that_is_filled_anew():
    torch.manual_seed(1)
    data, buffer = torch.randn(40, 2, 12), torch.zeros(8, 2, 12)
    assert not trained_on_one_tensor(Scaled(False), lambda: (data[torch.randint(0, 40, (8,))],))
    assert not trained_on_one_tensor(Scaled(False), lambda: (buffer.copy_(data[torch.randint(0, 40, (8,))]),))
    assert not trained_on_one_tensor(Scaled(False), lambda: (torch.randn(8, 2, 12),))
