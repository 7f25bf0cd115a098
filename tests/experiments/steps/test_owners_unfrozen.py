"""A backbone that is unfrozen in mid-training, with and without a place in the optimizer."""

import pytest
import torch
from taped_trainings import examine, ids
from torch import nn

from gradproof.experiments.steps.owners import does_the_optimizer_hold_everything


def train(after_unfreezing, unfreezes=True, pretrains=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    first = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizers, taken = [first] if pretrains else [], iter(range(100))

    def step():
        number = next(taken)
        if number == (2 if pretrains else 0):
            model[0].requires_grad_(False)
            optimizers.append(torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2))
        if number == 5 and unfreezes:
            model[0].requires_grad_(True)
            after_unfreezing(model, optimizers)
        x = torch.randn(32, 6)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizers[-1].zero_grad()
        loss.backward()
        optimizers[-1].step()
        return loss.detach()

    return examine(does_the_optimizer_hold_everything, model, optimizers, step, steps=8)


def nothing(model, optimizers):
    pass


def add_group(model, optimizers):
    optimizers[-1].add_param_group({"params": list(model[0].parameters())})


def make_anew(model, optimizers):
    optimizers.append(torch.optim.Adam(model.parameters(), lr=1e-2))


@pytest.mark.parametrize("pretrains", [False, True])
def test_unfrozen_and_in_no_optimizer(pretrains):
    said = train(nothing, pretrains=pretrains)
    assert ids(said) == {"param-not-updated/unfrozen"} and said[0].where.startswith("0.weight")


@pytest.mark.parametrize("after", [add_group, make_anew])
def test_unfrozen_and_trained(after):
    assert not train(after)


def test_frozen_to_the_end():
    assert not train(nothing, unfreezes=False)
