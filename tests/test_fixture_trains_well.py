"""The fixture `trains_well`: silent on a healthy step, and names what was planted in a sick one."""

import pytest
import torch
from taped_trainings import plain_step
from test_ask import wrong_sgd
from test_examination import HalfTanh
from torch import nn
from torch.nn import functional as F


def training(after=lambda scores: scores, optimizer=None, scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        model[2].weight.mul_(scale)
    x, labels = torch.randn(24, 4), torch.arange(24) % 3
    made = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, made, lambda: F.cross_entropy(after(model(x)), labels))
    return step, model, made


def test_a_healthy_training_passes(trains_well):
    run = trains_well(*training())
    assert (run / "specimens" / "step-00000002").is_dir()


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("gradients", {"after": HalfTanh.apply}, "derivative of the loss: No"),
        ("independence", {"after": lambda scores: scores - scores.mean(0)}, "hear each other"),
        ("update", {"optimizer": wrong_sgd}, "rule says: No"),
        (
            "movement",
            {"optimizer": lambda m: torch.optim.SGD(m[:1].parameters(), lr=0.1)},
            "2.bias, 2.weight",
        ),
        ("start", {"scale": 300.0}, "that of a guess: "),
    ],
)
def test_what_is_planted_is_named(trains_well, name, options, words):
    with pytest.raises(pytest.fail.Exception) as failed:
        trains_well(*training(**options))
    assert words in str(failed.value)


def averaged():
    """One prediction for the whole batch: nobody can say who hears whom."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = plain_step(model, optimizer, lambda: F.mse_loss(model(x).mean(0), torch.zeros(3)))
    return step, model, optimizer


def test_what_cannot_be_asked_has_not_passed(trains_well):
    with pytest.raises(pytest.fail.Exception, match=r"cannot be told.*but=\['independence'\]"):
        trains_well(*averaged())


def test_what_cannot_be_asked_can_be_left_out(trains_well):
    trains_well(*averaged(), but=["independence"])


def test_what_need_not_hold_is_not_asked(trains_well):
    trains_well(*training(after=HalfTanh.apply), but=["gradients"])


def test_an_expectation_that_does_not_exist(trains_well):
    with pytest.raises(ValueError, match="there is no expectation"):
        trains_well(*training(), but=["luck"])
