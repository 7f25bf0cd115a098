"""Targets whose gaps are filled with a number that is learned; and masks, pictures, counts, one-hot rows."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.losses.positions import which_positions_count

ID = "loss-mask-error/missing-entries-count"


def found(target, masked=None, mask_of=None, steps=1):
    torch.manual_seed(0)
    model, x = nn.Linear(6, target.shape[1]), torch.randn(len(target), 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss():
        if masked is None and mask_of is None:
            return F.mse_loss(model(x), target)
        mask = (target != masked if mask_of is None else mask_of(target)).float()
        return ((model(x) - target) ** 2 * mask).sum() / mask.sum()

    step = plain_step(model, optimizer, loss)
    return examine(which_positions_count, model, optimizer, step, steps=steps)


def ratings(filled):
    torch.manual_seed(1)
    known = (3 + torch.randn(40, 30)).clamp(1, 5)
    return torch.where(torch.rand(40, 30) < 0.2, known + 0.01 * torch.rand(40, 30), torch.tensor(filled))


def test_ratings_with_zeros_for_none():
    verdicts = found(ratings(0.0))
    assert ids(verdicts, "warning") == {ID} and verdicts[0].confidence == "likely"
    assert not found(ratings(0.0), masked=0.0)


def test_a_number_that_nobody_measures():
    assert ids(found(ratings(-999.0)), "problem") == {ID}
    assert not found(ratings(-999.0), masked=-999.0)


def stars(filled=0.0):
    return ratings(-1.0).round().where(ratings(-1.0) > 0, torch.tensor(filled))


def test_few_grades_with_zeros_for_none():
    verdicts = found(stars())
    assert ids(verdicts, "warning") == {ID} and verdicts[0].confidence == "likely"
    assert not found(stars(), masked=0.0)


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda y: y >= 0,
        lambda y: y != -1,
        lambda y: ~y.isnan(),
        lambda y: ~(y < 0),
    ],
)
def test_a_mask_that_leaves_nothing_out(mask_of):
    verdicts = found(stars(), mask_of=mask_of, steps=3)
    assert [v.level for v in verdicts] == ["warning", "warning", "problem"]
    assert "leaves none out" in " ".join(verdicts[-1].evidence)
    assert not found(stars(), mask_of=lambda y: y > 0, steps=3)


@pytest.mark.parametrize("both", [False, True])
def test_a_mask_that_selects_everything(both):
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 30), torch.randn(40, 6), stars()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss():
        known = y >= 0
        if both:
            return F.mse_loss(model(x)[known], y[known])
        return (model(x) - y)[known].square().mean()

    verdicts = examine(which_positions_count, model, optimizer, plain_step(model, optimizer, loss), steps=3)
    assert ids(verdicts, "problem") == {ID}


def test_a_mask_that_has_left_something_out_is_no_problem():
    y = stars()
    states = iter([y, y, torch.where(torch.rand_like(y) < 0.1, -1.0, y), y, y, y, y])
    torch.manual_seed(0)
    model, x = nn.Linear(6, 30), torch.randn(40, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss():
        target = next(states)
        known = target >= 0
        return ((model(x) - target) ** 2 * known).sum() / known.sum()

    verdicts = examine(which_positions_count, model, optimizer, plain_step(model, optimizer, loss), steps=7)
    assert not ids(verdicts, "problem")


@pytest.mark.parametrize(
    "target",
    [
        torch.randn(40, 30),
        torch.randn(40, 30).relu(),  # comes near its zeros
        F.one_hot(torch.arange(40) % 30, 30).float(),
        torch.poisson(torch.full((40, 30), 0.7)),
        (torch.rand(40, 30) < 0.3).float(),
        torch.rand(40, 30) * (torch.rand(40, 30) < 0.3),  # sparse, of all sizes
        torch.randn(40, 30) * (torch.rand(40, 30) < 0.3),  # silence between signs
        torch.poisson(torch.full((40, 30), 0.7)) / 4,
        torch.randint(0, 3, (40, 30)).float(),
        (torch.randint(0, 256, (40, 30)) * (torch.rand(40, 30) < 0.5)) / 255,  # a picture's bytes
        torch.randint(0, 6, (40, 30)).float(),  # grades from 0 on, all as frequent
    ],
)
def test_other_targets_are_silent(target):
    assert not found(target)


def test_the_largest_of_a_few_distances_is_the_most_common():
    torch.manual_seed(2)
    distances = torch.tensor([1.0, 2, 3, 4, 5, 6])[
        torch.multinomial(torch.tensor([1.0, 3, 4, 8, 3, 9]), 1200, True)
    ]
    assert not found(distances.reshape(40, 30))
    assert ids(found(distances.reshape(40, 30) % 6), "warning") == {ID}


@pytest.mark.parametrize("learned", [True, False])
def test_returns_of_one_where_a_goal_was_reached(learned):
    """r + γ V(s') is r where an episode ends; the same numbers as data look like a filling."""
    torch.manual_seed(0)
    model, critic = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)
    x, done = torch.randn(200, 6), (torch.rand(200, 1) < 0.3).float()
    goal = done + (1 - done) * 0.9 * critic(x).sigmoid().clamp(max=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss():
        later = done + (1 - done) * 0.9 * critic(x).sigmoid().clamp(max=0.8) if learned else goal
        return F.mse_loss(model(x), later.detach())

    verdicts = examine(which_positions_count, model, optimizer, plain_step(model, optimizer, loss))
    assert ids(verdicts, "warning") == (set() if learned else {ID})
