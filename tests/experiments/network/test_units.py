"""Units that never answer and predictions stuck at a clamp, against networks that are merely sparse or clipped."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.units import are_predictions_stuck, do_units_respond


class Net(nn.Module):
    def __init__(self, activation, bias=0.0, gain=1.0, end=None):
        super().__init__()
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 1)
        nn.init.constant_(self.first.bias, bias)
        self.first.weight.data *= gain
        self.activation, self.end = activation, end

    def forward(self, x):
        out = self.last(self.activation(self.first(x))).squeeze(-1)
        return self.end(out) if self.end else out


def verdicts(model, experiment=do_units_respond, scale=1.0):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 5)
    y = scale * x.sum(1)
    return examine(
        experiment, model, optimizer, plain_step(model, optimizer, lambda: F.mse_loss(model(x), y))
    )


@pytest.mark.parametrize("activation", [F.relu, torch.relu, nn.ReLU(inplace=True), F.relu_])
def test_rectifier_that_is_always_zero(activation):
    found = verdicts(Net(activation, bias=-8))
    assert ids(found) == {"dead-activation/units"} and not found[0].if_troubled


@pytest.mark.parametrize("activation", [torch.sigmoid, torch.tanh])
def test_squashers_at_their_flat_ends(activation):
    assert ids(verdicts(Net(activation, bias=12))) == {"dead-activation/saturated"}


@pytest.mark.parametrize("activation", [F.relu, torch.tanh, F.gelu])
def test_units_that_answer_are_excluded(activation):
    found = verdicts(Net(activation))
    assert {v.verdict for v in found} == (set() if activation is F.gelu else {"excluded"})


def test_predictions_at_the_limit_of_a_clamp():
    model = Net(F.relu, end=lambda out: out.clamp(0, 1))
    found = verdicts(model, are_predictions_stuck, scale=3.0)
    assert ids(found) == {"dead-activation/clamped-output"} and "test_units.py" in found[0].where


def test_clamp_that_is_never_reached_is_excluded():
    found = verdicts(Net(F.relu, end=lambda out: out.clamp(-50, 50)), are_predictions_stuck)
    assert {v.verdict for v in found} == {"excluded"} and "at most 0 %" in found[0].reason
