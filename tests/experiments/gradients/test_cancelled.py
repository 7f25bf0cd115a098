"""Ratios of a probability to itself, with gradient on both sides; and the same with a constant below."""

from pathlib import Path

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn
from torch.distributions import Categorical, Normal

from gradproof.experiments.gradients.stop_gradients import does_gradient_reach_what_it_must_not


def verdicts(make_loss, model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return examine(
        does_gradient_reach_what_it_must_not,
        model,
        optimizer,
        plain_step(model, optimizer, make_loss),
        steps=2,
    )


def policy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(16, 4), torch.randn(16), torch.randint(0, 3, (16,))


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_ratio_of_log_probabilities(stopped, passes):
    model, seen, advantage, action = policy()

    def loss():
        now = Categorical(logits=model(seen))
        then = Categorical(logits=model(seen)) if passes == 2 else now
        old = then.log_prob(action)
        old = old.detach() if stopped else old
        ratio = (now.log_prob(action) - old).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    found = verdicts(loss, model)
    assert ids(found) == (set() if stopped else {"missing-stop-gradient/ratio"})
    if found:  # where the old one is made
        number = int(found[0].where.rpartition(":")[2])
        assert "old = then.log_prob" in Path(__file__).read_text().splitlines()[number - 1]


@pytest.mark.parametrize("stopped", [False, True])
def test_quotient_of_one_thing(stopped):
    model, seen, advantage, action = policy()

    def loss():
        chosen = model(seen).softmax(-1).gather(1, action[:, None]).squeeze(1)
        return -(chosen / (chosen.detach() if stopped else chosen) * advantage).mean()

    assert ids(verdicts(loss, model)) == (set() if stopped else {"missing-stop-gradient/ratio"})


def test_log_probabilities_summed_over_actions():
    model, seen, advantage, _ = policy()
    action = torch.randn(16, 3)

    def loss():
        now = Normal(model(seen), 1.0)
        old = now.log_prob(action)
        return -((now.log_prob(action) - old).sum(-1).exp() * advantage).mean()

    assert ids(verdicts(loss, model)) == {"missing-stop-gradient/ratio"}


def test_two_networks_that_begin_as_one():
    """Equal before the first step, and not one function: the gradient goes to both."""
    model, seen, advantage, action = policy()
    both = nn.ModuleList([model, policy()[0]])

    def loss():
        now, then = (Categorical(logits=net(seen)).log_prob(action) for net in both)
        return -((now - then).exp() * advantage).mean()

    assert not ids(verdicts(loss, both))


def test_what_a_number_is_made_of_itself():
    """A softmax over one class, a penalty beyond a limit: one operand is made of the other."""
    model, seen, advantage, _ = policy()

    def loss():
        scores = model(seen)[:, :1]
        weight = (scores - scores.max(dim=1, keepdim=True).values).exp()
        beyond = (scores - scores.clamp(-50, 50)).exp()
        return ((weight / weight.sum(1, keepdim=True) + beyond) * scores * advantage[:, None]).mean()

    assert not ids(verdicts(loss, model))
