"""A learned variance with the wrong sign; likelihoods with a bound, critics, and policies that fall for a while."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn
from torch.distributions import Normal

from gradproof.experiments.losses.runaway import does_the_loss_run_away

X, Y = torch.randn(32, 4), torch.randn(32, 2)
FALLING = [2.0, 1.5, 1.0, -5.0, -9.0, -14.0]


def network(outputs=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))


def by_log_variance(out, sign):
    mean, s = out.chunk(2, dim=-1)
    weighed = (mean - Y).square() * torch.exp(-s)
    return (weighed + sign * s).mean()  # here


def by_columns(out, sign):
    error, s = out[:, :2] - Y, out[:, 2:]
    return (torch.exp(sign * -s) * error.square() + s).mean()


def by_softplus(out, sign):
    mean, variance = out[:, :2], F.softplus(out[:, 2:]) + 1e-3
    return ((mean - Y).square() / variance + sign * variance.log()).mean()


def said(model, loss, losses=FALLING, **kwargs):
    return confirmed_ids(does_the_loss_run_away, evidence_of(model, loss, losses=losses, **kwargs))


@pytest.mark.parametrize("loss", [by_log_variance, by_columns, by_softplus])
@pytest.mark.parametrize("sign, found", [(-1, ["loss-scale-or-sign/unbounded"]), (1, [])])
def test_the_sign_of_the_variance(loss, sign, found):
    model = network()
    assert said(model, lambda: loss(model(X), sign)) == found


def test_it_is_named_where_it_is_added():
    model = network()
    evidence = evidence_of(model, lambda: by_log_variance(model(X), -1), losses=FALLING)
    (found,) = does_the_loss_run_away(evidence)
    number = int(found.where.rpartition(":")[2])
    assert Path(__file__).read_text().splitlines()[number - 1].endswith("# here")


def test_a_loss_that_does_not_run_down_is_left_alone():
    model = network()
    assert not said(model, lambda: by_log_variance(model(X), -1), losses=[2.0] * 6)


def test_likelihoods_that_are_bounded():
    model = network()

    def gaussian():
        mean, s = model(X).chunk(2, dim=-1)
        return -Normal(mean, s.exp()).log_prob(Y).mean()

    def maximised():
        mean, s = model(X).chunk(2, dim=-1)
        return F.gaussian_nll_loss(mean, Y, s.exp())

    assert not said(model, gaussian) and not said(model, maximised)


def test_critics_may_fall_without_end():
    """Real less generated, apart or in one batch, beside a term that compares with data."""
    model, fake = network(3), torch.randn(32, 4)

    def apart():
        real, made = model(X), model(fake)
        return made[:, :1].mean() - real[:, :1].mean() + F.mse_loss(real[:, 1:], Y)

    def at_once():
        both = model(torch.cat([X, fake]))
        return both[32:, :1].mean() - both[:32, :1].mean() + (both[:32, 1:] - Y).square().mean()

    assert not said(model, apart) and not said(model, at_once)


def test_a_generator_is_judged_by_a_critic_that_rests():
    model = nn.ModuleDict({"generator": nn.Linear(4, 2), "critic": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model["generator"].parameters(), lr=0.01)

    def loss():
        made = model["generator"](X)
        return -model["critic"](made).mean() + 0.1 * (made - Y).square().mean()

    assert not said(model, loss, optimizer=optimizer)


def test_a_gaussian_policy_whose_actions_were_all_bad():
    model, gained = network(), -torch.rand(32, 1)

    def loss():
        mean, s = model(X).chunk(2, dim=-1)
        return -(Normal(mean, s.exp()).log_prob(Y) * gained).mean() - 0.01 * s.mean()

    assert not said(model, loss)
