"""Decay that outweighs the loss, and that has worn the weights away."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.steps.meaning import does_the_optimizer_do_what_was_meant


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def verdicts(model, optimizer):
    x = torch.randn(16, 4)
    step = plain_step(model, optimizer, lambda: (model(x) - x.sum(1, keepdim=True)).square().mean())
    return examine(does_the_optimizer_do_what_was_meant, model, optimizer, step)


@pytest.mark.parametrize("decay, found", [(50.0, {"optimizer-config/decay-share"}), (1e-2, set())])
def test_decay_that_pulls_harder_than_the_loss(decay, found):
    model = network()
    assert ids(verdicts(model, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay))) == found
    model = network()
    apart = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)  # not part of the gradient
    assert "optimizer-config/decay-share" not in ids(verdicts(model, apart))


def ranked(optimizer_of, steps):
    """Users and items by rank, of which a batch looks up few; asked at the first step and after some."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(200, 8), nn.Embedding(300, 8)])
    for table in model:
        nn.init.normal_(table.weight, std=0.1)
    optimizer, memory = optimizer_of(model.parameters()), {}

    def loss():
        user, (good, bad) = torch.randint(0, 200, (16,)), torch.randint(0, 300, (2, 16))
        users, better, worse = model[0](user), model[1](good), model[1](bad)
        return -nn.functional.logsigmoid((users * (better - worse)).sum(1)).mean()

    step = plain_step(model, optimizer, loss)
    said = examine(does_the_optimizer_do_what_was_meant, model, optimizer, step, steps=1, memory=memory)
    for _ in range(steps):
        step()
    return ids(
        [*said, *examine(does_the_optimizer_do_what_was_meant, model, optimizer, step, 1, memory=memory)]
    )


def test_decay_that_has_worn_the_weights_away():
    adam = lambda parameters: torch.optim.Adam(parameters, lr=5e-3, weight_decay=1e-2)  # noqa: E731
    apart = lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, weight_decay=1e-2)  # noqa: E731
    assert "optimizer-config/worn-away" in ranked(adam, steps=300)
    assert not ranked(apart, steps=300)


def test_weights_that_are_lost_are_no_matter_of_decay():
    model = network()
    nn.init.constant_(model[0].weight, float("nan"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-4)
    assert "optimizer-config/decay-share" not in ids(verdicts(model, optimizer))
