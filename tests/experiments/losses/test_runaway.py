"""Learned weights of a loss's terms with the wrong sign and the right one; a temperature, a single number to learn."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.losses.runaway import does_the_loss_run_away


class TwoTasks(nn.Module):
    def __init__(self, sign):
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 3)
        self.log_var, self.sign = nn.Parameter(torch.zeros(2)), sign

    def forward(self, x, y, label):
        losses = nn.functional.mse_loss(self.a(x), y), nn.functional.cross_entropy(self.b(x), label)
        return sum(
            (self.sign * s).exp() * loss + 0.5 * s for s, loss in zip(self.log_var, losses, strict=True)
        )


class Tempered(nn.Module):
    """As CLIP has it: a scale that is learned, and bounded below by what the loss can be."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = nn.Linear(4, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x, y, label):
        return nn.functional.cross_entropy(self.scale.exp() * self.head(x), label)


class OneNumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, x, y, label):
        return nn.functional.mse_loss(self.mean.expand(32, 1), y)


def verdicts(model):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, 4), torch.randn(32, 1), torch.randint(0, 3, (32,))
    step = plain_step(model, optimizer, lambda: model(*batch))
    return examine(does_the_loss_run_away, model, optimizer, step, steps=1)


def test_weights_that_run_away():
    (found,) = verdicts(TwoTasks(1.0))
    assert found.id == "loss-scale-or-sign/weight-runs-away" and "log_var" in found.evidence[0]


@pytest.mark.parametrize("model", [TwoTasks(-1.0), Tempered(), OneNumber()])
def test_weights_that_have_a_best_value(model):
    assert not ids(verdicts(model))
