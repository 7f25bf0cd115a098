"""An entropy bonus with the wrong sign, with the right one, and an entropy that is minimised without a policy."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn
from torch.distributions import Categorical

from gradproof.experiments.losses.terms import is_the_loss_the_right_way_up


def verdicts(make_loss):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, returns = torch.randn(16, 4), torch.randn(16)
    step = plain_step(model, optimizer, lambda: make_loss(model(seen), returns))
    return ids(examine(is_the_loss_the_right_way_up, model, optimizer, step, steps=1))


def by_distribution(logits, returns, sign):
    policy = Categorical(logits=logits)
    action = policy.sample()
    return -(policy.log_prob(action) * returns).mean() + sign * 0.1 * policy.entropy().mean()


def by_hand(logits, returns, sign):
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    chosen = log_p.gather(1, torch.multinomial(p.detach(), 1)).squeeze(1)
    entropy = -(p * log_p).sum(-1)
    return -(chosen * returns).mean() + sign * 0.1 * entropy.mean()


@pytest.mark.parametrize("loss", [by_distribution, by_hand])
@pytest.mark.parametrize("sign, found", [(1, {"loss-scale-or-sign/entropy-sign"}), (-1, set())])
def test_the_sign_of_an_entropy_bonus(loss, sign, found):
    assert verdicts(lambda logits, returns: loss(logits, returns, sign)) == found


def test_an_entropy_that_is_to_be_small():
    """Unlabelled samples that are to be decided: no policy is asked."""
    assert not verdicts(lambda logits, returns: Categorical(logits=logits).entropy().mean())
