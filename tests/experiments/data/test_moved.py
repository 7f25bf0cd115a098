"""Data that are others than before where the loss leaps; leaps of a loss and changes of the data that are none."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from torch import nn

from gradproof.experiments.data.scale import are_numbers_of_a_fitting_size, have_the_data_moved

ID = "input-or-target-scale/moved"

DRAW = torch.Generator().manual_seed(0)
CALM = [
    0.09 * float(torch.randn(16, generator=DRAW).square().mean()) for _ in range(200)
]  # of the noise below


def one_step(
    memory, number, change_x=lambda x: x, change_y=lambda y: y, weight=0.3, question=have_the_data_moved
):
    """What is said of one step of a model that knows its task but for some noise."""
    draw = torch.Generator().manual_seed(number)
    model = nn.Linear(6, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    x = 3 + 2 * torch.randn(16, 6, generator=draw)
    y = 0.3 * x.sum(1, keepdim=True) + 0.3 * torch.randn(16, 1, generator=draw)
    x, y = change_x(x), change_y(y)
    loss = lambda: F.mse_loss(model(x), y)  # noqa: E731
    found = question(evidence_of(model, loss, step=100 * number, memory=memory, losses=CALM))
    return found if question is have_the_data_moved else list(found)


def steps(calm=10, **last):
    memory = {}
    said = [one_step(memory, number) for number in range(calm)]
    return [*said, one_step(memory, calm, **last)]


MOVED = {
    "another unit": {"change_x": lambda x: 10 * x},
    "some numbers overflow": {"change_x": lambda x: torch.where(x > 5, x - 43, x)},
    "a constant is added": {"change_x": lambda x: x + 6},
    "the targets": {"change_y": lambda y: 20 * y},
    "nothing but zeros": {"change_x": torch.zeros_like},
}
STAYS = {
    "the loss leaps, the data do not": {"weight": 3.0},
    "the data change, the loss does not mind": {"change_x": lambda x: 10 * x, "weight": 0.03},
    "too little is known": {"change_x": lambda x: 10 * x, "calm": 4},
    "the labels belong to others": {"change_y": lambda y: y.roll(1, 0)},
    "nothing": {},
}


@pytest.mark.parametrize("what", MOVED)
def test_data_that_moved_where_the_loss_leaps(what):
    *before, found = steps(**MOVED[what])
    assert not any(before) and found.id == ID and (found.verdict, found.level) == ("confirmed", "warning")
    assert (
        "at the 10 steps recorded before it was" in found.evidence[0]
        and "the loss leaps with it" in found.evidence[1]
    )


@pytest.mark.parametrize("what", STAYS)
def test_data_that_stay_or_a_loss_that_does(what):
    *before, found = steps(**STAYS[what])
    assert not any(before) and (found is None or found.verdict == "excluded")


def test_a_leap_is_not_remembered_as_usual():
    """Steps in trouble follow each other: the first of them must not tell what the second is held against."""
    memory = {}
    for number in range(12):
        change = MOVED["another unit"] if number >= 9 else {}
        found = one_step(memory, number, **change)
        assert (found is not None and found.id == ID) == (number >= 9)


def test_the_question_says_it():
    memory = {}
    for number in range(10):
        one_step(memory, number, question=are_numbers_of_a_fitting_size)
    said = one_step(memory, 10, lambda x: x + 6, question=are_numbers_of_a_fitting_size)
    assert [verdict.id for verdict in said if verdict.verdict == "confirmed"] == [ID]


@pytest.mark.parametrize("whose", ["given", "of another network", "its own, with gradient"])
def test_what_a_network_says_is_no_data(whose):
    """A target with a network's word in it moves as that network learns; either side may be read as the target."""
    model, other, memory, found = nn.Linear(6, 1), nn.Linear(6, 1), {}, None
    for number in range(11):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(number))
        word = torch.full((16, 1), -40.0 if number == 10 else 0.0)
        for each in (model, other):
            nn.init.constant_(each.weight, 0.03)
            nn.init.constant_(each.bias, float(word.mean()) if each is other or whose[0] == "i" else 0.0)
        told = {
            "given": lambda x=x, word=word: F.mse_loss(model(x), word),
            "of another network": lambda x=x: F.mse_loss(model(x), 0.1 + 0.9 * other(x.flip(0)).detach()),
            "its own, with gradient": lambda x=x: F.mse_loss(0.1 + 0.5 * model(x.flip(0)), model(x)),
        }
        step = evidence_of(model, told[whose], step=100 * number, memory=memory, losses=CALM)
        assert (step.loss > 1) == (number == 10)
        found = have_the_data_moved(step)
    assert (found is not None and found.id == ID) == (whose == "given")
