"""Copies that lose values now and then, which no operation tells of, and copies that lose none."""

import pytest
import torch
from taped_trainings import examine, plain_step
from torch import nn

from gradproof.experiments.gradients.gradient import is_the_gradient_right

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
    assert all("test_copies.py" in verdict.where for verdict in found)


class Behind(Split):
    """What is lost is what an operation made of the copy: it has read all that was copied."""

    def forward(self, x):
        read = self.first(x).clone().tanh()
        self.calls += 1
        if self.calls in self.lost:
            read.detach().numpy()[2:] = 5.0
        return self.second(read)


def test_a_copy_that_was_read_as_it_was_made_has_lost_nothing():
    torch.manual_seed(0)
    model, x = Behind(nn.Linear(4, 8), nn.Linear(8, 1), (4, 6)), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, lambda: model(x).square().mean())
    assert not [v for v in examine(is_the_gradient_right, model, optimizer, step, steps=8) if v.id == ID]


class Speech(nn.Module):
    """Scores for CTC, and a copy of them; `stained` are the calls before which the heap is left full of numbers."""

    def __init__(self, stained):
        super().__init__()
        self.scores, self.stained, self.calls = nn.Linear(4, 5), stained, 0

    def forward(self, x, script, frames, signs):
        scores = self.scores(x).log_softmax(-1).clone()
        self.calls += 1
        if self.calls in self.stained:
            [torch.full((len(frames), len(x), 2 * script.shape[1] + 1), 3e4) for _ in range(8)]
        return nn.functional.ctc_loss(scores, script, frames, signs)


def test_what_ctc_leaves_unwritten_behind_short_sequences_was_not_lost():
    torch.manual_seed(0)
    model, x, script = Speech((4, 6)), torch.randn(60, 8, 4), torch.randint(1, 5, (8, 6))
    frames, signs = torch.full((8,), 30), torch.arange(8) % 3 + 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, lambda: model(x, script, frames, signs))
    found = examine(is_the_gradient_right, model, optimizer, step, steps=8)
    assert {v.verdict for v in found} == {"excluded"}, found
