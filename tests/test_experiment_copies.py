"""Copies that lose values now and then, which no operation tells of, and copies that lose none."""

import pytest
import torch
from taped_trainings import examine, plain_step
from torch import nn

from gradproof.experiments.gradient import is_the_gradient_right

ID = "aliasing-or-inplace/lost-in-a-copy"


class Split(nn.Module):
    """Two halves, and a copy of the activations between them; `lost` says at which calls a part of it is lost."""

    def __init__(self, first, second, lost):
        super().__init__()
        self.first, self.second, self.lost, self.calls = first, second, lost, 0

    def forward(self, x):
        there = torch.empty_like(made := self.first(x))
        there.copy_(made)
        self.calls += 1
        if self.calls in self.lost:
            there.detach().numpy()[2:] = 5.0
        return self.second(there)


def linear(lost):
    return Split(nn.Linear(4, 8), nn.Linear(8, 1), lost), torch.randn(8, 4)


def convolutional(lost):
    second = nn.Sequential(nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    return Split(nn.Conv2d(1, 4, 3), second, lost), torch.randn(8, 1, 6, 6)


@pytest.mark.parametrize("make", [linear, convolutional])
@pytest.mark.parametrize("lost, seen", [((4, 6), True), ((), False), (range(1, 20), False)])
def test_what_is_lost_at_some_steps_is_placed_at_the_copy(make, lost, seen):
    torch.manual_seed(0)
    model, x = make(lost)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, lambda: model(x).square().mean())
    found = [v for v in examine(is_the_gradient_right, model, optimizer, step, steps=8) if v.id == ID]
    assert bool(found) == seen
    assert all("test_experiment_copies.py" in verdict.where for verdict in found)
