"""Decay that outweighs the loss, rates on the wrong layers, layers frozen in between, copies meant to be tied."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.steps.averages import does_the_average_follow
from gradproof.experiments.steps.meaning import does_the_optimizer_do_what_was_meant
from gradproof.experiments.steps.owners import does_the_optimizer_hold_everything

HOLDS = does_the_optimizer_hold_everything


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def verdicts(model, optimizer, facts=None, batch=None, experiment=does_the_optimizer_do_what_was_meant):
    x = torch.randn(16, 4) if batch is None else batch
    step = plain_step(model, optimizer, lambda: (model(x) - x.sum(1, keepdim=True)).square().mean())
    return examine(experiment, model, optimizer, step, facts=facts)


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


@pytest.mark.parametrize("body, head, found", [(1e-2, 1e-4, True), (1e-4, 1e-2, False), (1e-2, 5e-3, False)])
def test_rates_of_body_and_head(body, head, found):
    model = network()
    groups = [{"params": model[:4].parameters(), "lr": body}, {"params": model[4].parameters(), "lr": head}]
    said = verdicts(model, torch.optim.SGD(groups))
    assert (ids(said) == {"optimizer-config/groups-swapped"}) == found and (found or not ids(said))


def test_of_two_optimizers_only_the_one_at_work_is_asked():
    model, before = network(), network()
    groups = [{"params": model[:4].parameters(), "lr": 0.3}, {"params": model[4].parameters(), "lr": 1e-5}]
    pretraining, tuning = torch.optim.SGD(before.parameters(), lr=0.1), torch.optim.SGD(groups)
    x = torch.randn(16, 4)
    step = plain_step(model, tuning, lambda: (model(x) - x.sum(1, keepdim=True)).square().mean())
    (found, *_) = examine(does_the_optimizer_do_what_was_meant, model, [pretraining, tuning], step)
    assert found.id == "optimizer-config/groups-swapped" and not found.if_troubled


@pytest.mark.parametrize("layer, found", [(2, True), (0, False), (4, False), (None, False)])
def test_a_layer_frozen_between_trained_ones(layer, found):
    model = network()
    if layer is not None:
        model[layer].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    said = verdicts(model, torch.optim.SGD(trained, lr=0.01), experiment=HOLDS)
    assert ids(said) == ({"param-not-updated/frozen"} if found else set())
    assert all(v.level == "warning" and v.if_troubled for v in said)
    loaded = {"loads": [{"fitting": 6}]}
    assert not verdicts(model, torch.optim.SGD(trained, lr=0.01), facts=loaded, experiment=HOLDS)


def test_a_layer_that_was_trained_before_it_was_frozen():
    model = network()
    before = torch.optim.SGD(model.parameters(), lr=0.01)
    model[2].requires_grad_(False)
    after = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(16, 4)
    step = plain_step(model, after, lambda: model(x).square().mean())
    assert not examine(HOLDS, model, [before, after], step)


class Language(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        if tied == "by copy":
            self.head.weight.data = self.embed.weight.data.clone()
        elif tied == "shared":
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embed(tokens))))


@pytest.mark.parametrize("tied, found", [("by copy", True), ("shared", False), ("not at all", False)])
def test_weights_that_were_tied_by_a_copy(tied, found):
    model, tokens = Language(tied), torch.arange(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = plain_step(model, optimizer, lambda: nn.functional.cross_entropy(model(tokens), tokens.roll(1)))
    said = examine(does_the_average_follow, model, optimizer, step)
    assert ids(said) == ({"weights-state-error/untied"} if found else set())
