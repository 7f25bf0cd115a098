"""Target networks whose soft update gives a local name another tensor, and updates that are written back."""

import copy

import pytest
import torch
from taped_trainings import examine, ids
from torch import nn

from gradproof.experiments.averages import does_the_average_follow


def train(update, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        x = torch.randn(32, 6)
        with torch.no_grad():
            wanted = x.sum(1, keepdim=True) + 0.5 * target(x)
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            update(model, target)
        return loss.detach()

    return examine(does_the_average_follow, model, optimizer, step, steps=steps)


def rebinds(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t = 0.05 * p + 0.95 * t


def copies(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t.copy_(0.05 * p + 0.95 * t)


def new_data(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t.data = 0.05 * p.data + 0.95 * t.data


def lerps(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t.lerp_(p, 0.05)


def nothing(model, target):
    """A reference that is meant to stay."""


def test_an_average_that_is_thrown_away():
    said = train(rebinds)
    assert ids(said) == {"weights-state-error/average-thrown-away"}
    assert "4 tensors" in said[-1].evidence[0] and "0.95" in said[-1].evidence[0]
    assert "test_experiment_averages_kept.py" in said[-1].where


@pytest.mark.parametrize("update", [copies, new_data, lerps, nothing])
def test_averages_that_are_kept_and_references(update):
    assert not ids(train(update))
