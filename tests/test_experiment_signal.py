"""Signals that explode or die along blocks and along time, against stacks and recurrences that keep their size."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.signal import where_does_the_signal_go


class Stack(nn.Module):
    def __init__(self, gain, depth=10, activation=torch.tanh):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(depth)])
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain)
        self.activation = activation

    def forward(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class Recurrent(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.cell = nn.Linear(8, 8, bias=False)
        nn.init.orthogonal_(self.cell.weight, gain)

    def forward(self, x):
        state = x
        for _ in range(20):
            state = self.cell(state)
        return state


def verdicts(model):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(16, 8)
    step = plain_step(model, optimizer, lambda: model(x).mean())
    return examine(where_does_the_signal_go, model, optimizer, step, steps=1)


@pytest.mark.parametrize(
    "model, what",
    [
        (Stack(4.0, activation=torch.relu), "exploding-signal/depth"),
        (Stack(0.3, activation=torch.sigmoid), "vanishing-signal/depth"),
        (Recurrent(2.0), "exploding-signal/time"),
        (Recurrent(0.4), "vanishing-signal/time"),
    ],
)
def test_growth_and_decay_are_named(model, what):
    found = verdicts(model)
    assert ids(found) == {what}
    assert found[0].where.startswith("cell" if "time" in what else "layers")


class Micro(nn.Module):
    """The same layer for eight batches one after another is no recurrence."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([self.layer(x * 10**-k) for k in range(8)])


@pytest.mark.parametrize("model", [Stack(1.0), Recurrent(1.0), Micro()])
def test_signals_that_keep_their_size_are_silent(model):
    assert not verdicts(model)


class Cell(nn.Module):
    """A recurrence of two weights: one for what comes in, one for what comes back."""

    def __init__(self, gain):
        super().__init__()
        self.wx, self.wh = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        nn.init.orthogonal_(self.wh.weight, gain)

    def forward(self, x, state):
        return self.wx(x) + self.wh(state)


class TwoWeights(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.cell = Cell(gain)

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(20):
            state = self.cell(x, state)
        return state


@pytest.mark.parametrize("gain", [3.0, 0.2])
def test_of_a_recurrence_the_weight_that_comes_back_is_named(gain):
    assert verdicts(TwoWeights(gain))[0].where == "cell.wh"


def test_a_validation_before_the_step_is_not_taken_for_it():
    torch.manual_seed(0)
    model = Stack(4.0, activation=torch.relu)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(16, 8)
    train = plain_step(model, optimizer, lambda: model(x).mean())

    def step():
        with torch.no_grad():
            model(x)
        return train()

    (found,) = examine(where_does_the_signal_go, model, optimizer, step, steps=1)
    assert "its gradient from" in found.evidence[0]


class Named(nn.Module):
    """Layers that are numbered in their names, not in a list."""

    def __init__(self, gain):
        super().__init__()
        for k in range(1, 9):
            setattr(self, f"fc{k}", nn.Linear(8, 8, bias=False))
            nn.init.orthogonal_(getattr(self, f"fc{k}").weight, gain)

    def forward(self, x):
        for k in range(1, 9):
            x = getattr(self, f"fc{k}")(x).relu()
        return x


class Heads(nn.Module):
    """Numbered, but beside each other: what one of them makes reaches no other."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])
        for k, head in enumerate(self.heads):
            nn.init.orthogonal_(head.weight, 10.0**k)

    def forward(self, x):
        return torch.stack([head(x) for head in self.heads])


def test_layers_numbered_by_name_and_at_the_top_of_a_sequential():
    assert ids(verdicts(Named(5.0))) == {"exploding-signal/depth"}
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8, bias=False), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 5.0)
    assert ids(verdicts(nn.Sequential(*layers))) == {"exploding-signal/depth"}


def test_modules_beside_each_other_are_no_chain():
    assert not verdicts(Heads())
