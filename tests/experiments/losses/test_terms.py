"""Losses upside down, terms that are not weighed alike, micro-batches that do not add up; and their healthy twins."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from taped_trainings import evidence_of_step
from torch import nn
from torch.distributions import Normal

from gradproof.experiments.gradients.accumulation import do_micro_batches_add_up
from gradproof.experiments.losses.terms import is_the_loss_the_right_way_up
from gradproof.experiments.losses.weighing import are_terms_weighed_alike
from gradproof.tape.living import Living

X, Y, CLASS = torch.randn(20, 5), torch.randn(20, 3), torch.randint(0, 3, (20,))
YES = (Y > 0).float()
LOSSES = {
    "class": lambda out: F.cross_entropy(out, CLASS),
    "squares by hand": lambda out: ((out - Y) ** 2).mean(),
    "squares": lambda out: F.mse_loss(Y, out),
    "absolute": lambda out: (out - Y).abs().sum(),
    "picked": lambda out: -out.log_softmax(1).gather(1, CLASS[:, None]).mean(),
    "indexed": lambda out: -out.log_softmax(1)[torch.arange(20), CLASS].mean(),
    "yes or no": lambda out: F.binary_cross_entropy_with_logits(out, YES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_minus_sign(name):
    model = nn.Linear(5, 3)
    wrong = evidence_of(model, lambda: -LOSSES[name](model(X)))
    right = evidence_of(model, lambda: LOSSES[name](model(X)))
    assert confirmed_ids(is_the_loss_the_right_way_up, wrong) == ["loss-scale-or-sign/sign"]
    assert not confirmed_ids(is_the_loss_the_right_way_up, right)
    if name not in ("picked", "indexed"):
        assert excluded_families(is_the_loss_the_right_way_up, right) == ["loss-scale-or-sign"]


def test_maximised_on_purpose():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    evidence = evidence_of(model, lambda: -F.cross_entropy(model(X), CLASS), optimizer=optimizer)
    assert not confirmed_ids(is_the_loss_the_right_way_up, evidence)


@pytest.mark.parametrize("name", LOSSES)
def test_maximised_though_it_is_a_loss(name):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    facts = {"_optimizers_made": Living([(optimizer, "train.py:7")])}
    evidence = evidence_of(model, lambda: LOSSES[name](model(X)), optimizer=optimizer, facts=facts)
    (found,) = is_the_loss_the_right_way_up(evidence)
    assert (found.id, found.where) == ("optimizer-config/maximize", "train.py:7")


@pytest.mark.parametrize("sign, found", [(-1, ["optimizer-config/maximize"]), (1, [])])
def test_a_policy_that_is_maximised_beside_a_critic_that_is_not(sign, found):
    model = nn.ModuleDict({"policy": nn.Linear(5, 3), "value": nn.Linear(5, 1)})
    rewards = torch.randn(20)
    parameters = [{"params": model["policy"].parameters(), "maximize": True}]
    optimizer = torch.optim.SGD([*parameters, {"params": model["value"].parameters()}], lr=0.01)

    def loss():
        value = model["value"](X).squeeze(1)
        policy = torch.distributions.Categorical(logits=model["policy"](X))
        advantage = (rewards - value).detach()
        gain = (policy.log_prob(policy.sample()) * advantage).mean()
        return sign * gain + (value - rewards).square().mean()

    assert confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, loss, optimizer=optimizer)) == found


def test_a_generator_that_maximises_the_discriminators_loss():
    model = nn.Linear(5, 1)
    zeros = torch.zeros(20, 1)
    evidence = evidence_of(model, lambda: -F.binary_cross_entropy_with_logits(model(X), zeros))
    assert not confirmed_ids(is_the_loss_the_right_way_up, evidence)


def test_an_adversary_beside_the_loss_is_a_note():
    model = nn.Linear(5, 6)
    evidence = evidence_of(
        model, lambda: F.cross_entropy(model(X)[:, :3], CLASS) - 0.1 * F.mse_loss(model(X)[:, 3:], Y)
    )
    (said,) = [v for v in is_the_loss_the_right_way_up(evidence) if v.id]
    assert (said.level, said.confidence) == ("note", "possible")


def test_policy_gradient():
    model, rewards = nn.Linear(5, 3), torch.randn(20)

    def step(sign):
        policy = torch.distributions.Categorical(logits=model(X))
        return sign * (policy.log_prob(policy.sample()) * rewards).mean()

    wrong, right = (evidence_of(model, lambda s=s: step(s)) for s in (1, -1))
    found = list(is_the_loss_the_right_way_up(wrong))
    assert [(v.id, v.level) for v in found] == [("loss-scale-or-sign/policy-sign", "problem")]
    assert not confirmed_ids(is_the_loss_the_right_way_up, right)


@pytest.mark.parametrize("sign, found", [(1, ["loss-scale-or-sign/policy-sign"]), (-1, [])])
def test_a_policy_that_puts_out_probabilities_one_step_at_a_time(sign, found):
    model = nn.Linear(4, 3)

    def step():
        chosen = []
        for x in torch.randn(8, 4):
            policy = torch.distributions.Categorical(torch.softmax(model(x), dim=-1))
            chosen.append(policy.log_prob(policy.sample()))
        rewards = torch.randn(8)
        rewards = rewards - rewards.mean()
        return sign * (torch.stack(chosen) * rewards).mean()

    assert confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, step)) == found


def test_a_poor_episode_makes_its_actions_less_likely():
    model = nn.Linear(4, 3)

    def one_by_one():
        chosen = []
        for x in torch.randn(8, 4):
            policy = torch.distributions.Categorical(logits=model(x))
            chosen.append(policy.log_prob(policy.sample()))
        return 0.7 * torch.stack(chosen).sum()  # minus the return, which was -0.7

    def together():
        policy = torch.distributions.Categorical(logits=model(torch.randn(8, 4)))
        return 0.7 * policy.log_prob(policy.sample()).sum()

    for step in (one_by_one, together):
        assert not confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, step))


def test_a_policy_may_minimise_costs():
    model, tour_lengths = nn.Linear(5, 3), torch.rand(20)
    weight = torch.randn(20)

    def with_costs():
        policy = torch.distributions.Categorical(logits=model(X))
        excess = tour_lengths - tour_lengths.mean()
        return (policy.log_prob(policy.sample()) * excess).mean()

    def with_something():
        policy = torch.distributions.Categorical(logits=model(X))
        return (policy.log_prob(policy.sample()) * weight).mean()

    assert not confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, with_costs))
    found = list(is_the_loss_the_right_way_up(evidence_of(model, with_something)))
    assert [(v.level, v.confidence) for v in found] == [("warning", "possible")]


def test_a_gaussian_policy_is_left_alone():
    model, action, returns = nn.Linear(5, 3), torch.randn(20, 3), -torch.rand(20) - 1

    def step():
        log_prob = torch.distributions.Normal(model(X), 1.0).log_prob(action).sum(1)
        return -(log_prob * returns).mean()

    assert not confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, step))


def test_a_divergence_that_is_not_averaged():
    model = nn.Linear(5, 3)

    def step(divide):
        mu = model(X)
        error = F.mse_loss(mu, Y, reduction="sum") / len(X)
        return error + 0.5 * (mu.pow(2) - 1).sum() / (len(X) if divide else 1)

    wrong, right = (evidence_of(model, lambda d=d: step(d)) for d in (False, True))
    assert confirmed_ids(are_terms_weighed_alike, wrong) == ["loss-scale-or-sign/one-term-not-averaged"]
    assert not confirmed_ids(are_terms_weighed_alike, right)
    decay = evidence_of(
        model, lambda: F.mse_loss(model(X), Y) + 0.5 * sum(p.pow(2).sum() for p in model.parameters())
    )
    assert not confirmed_ids(are_terms_weighed_alike, decay)


@pytest.mark.parametrize(
    "divisor, ids",
    [(1, ["grad-accumulation-error/not-divided"]), (2, ["grad-accumulation-error/not-divided"]), (4, [])],
)
def test_micro_batches(divisor, ids):
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        for x, y in zip(X.split(5), CLASS.split(5), strict=True):
            (F.cross_entropy(model(x), y) / divisor).backward()
        optimizer.step()

    evidence = evidence_of_step(step, {"": model}, [optimizer], losses=[1.0])
    assert confirmed_ids(do_micro_batches_add_up, evidence) == ids


def test_terms_of_a_micro_batch_that_are_weighed_and_divided():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        for x, y in zip(X.split(5), CLASS.split(5), strict=True):
            loss = 7.2 * model(x).square().mean() + 0.2 * F.cross_entropy(model(x), y)
            (loss / 4).backward()
        optimizer.step()

    evidence = evidence_of_step(step, {"": model}, [optimizer], losses=[1.0])
    assert not confirmed_ids(do_micro_batches_add_up, evidence)


@pytest.mark.parametrize("added", [True, False])
def test_gradients_assigned_and_added(added):
    model = nn.Linear(5, 3)
    optimizer, parameters = torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters())

    def step():
        optimizer.zero_grad()
        for x, y in zip(X.split(5), CLASS.split(5), strict=True):
            found = torch.autograd.grad(F.cross_entropy(model(x), y) / 4, parameters)
            for parameter, gradient in zip(parameters, found, strict=True):
                old = parameter.grad if added else None
                parameter.grad = gradient if old is None else old + gradient
        optimizer.step()

    evidence = evidence_of_step(step, {"": model}, [optimizer], losses=[1.0])
    lost = [] if added else ["grad-accumulation-error/overwritten"]
    assert confirmed_ids(do_micro_batches_add_up, evidence) == lost


def test_a_closure_called_many_times_accumulates_nothing():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), CLASS)
        loss.backward()
        return loss

    evidence = evidence_of_step(lambda: optimizer.step(closure), {"": model}, [optimizer])
    assert not confirmed_ids(do_micro_batches_add_up, evidence)


@pytest.mark.parametrize("sign, found", [(1, ["loss-scale-or-sign/sign"]), (-1, [])])
def test_labels_that_are_drawn_in_the_step_are_labels(sign, found):
    model = nn.Linear(5, 3)

    def step():
        labels = torch.randint(0, 3, (20,))
        return sign * F.log_softmax(model(X), 1)[torch.arange(20), labels].mean()

    assert confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, step)) == found


RETURNS, OLD = torch.linspace(-1.0, 2.0, 20), torch.full((20,), -1.1)


def normal(out):
    """The log-density of Y, by hand, as old code has it."""
    return -0.5 * ((Y - out) / 0.5) ** 2 - 0.226


CHOICES = {  # a network's scores -> the loss, and whether it weighs what a policy chose
    "log of what was picked": (
        lambda out: -(out.softmax(1).gather(1, CLASS[:, None]).log().squeeze(1) * RETURNS).mean(),
        True,
    ),
    "twice weighed": (
        lambda out: (-0.5 * RETURNS * out.softmax(1)[torch.arange(20), CLASS].log() * RETURNS).mean(),
        True,
    ),
    "clipped ratio": (
        lambda out: (
            -torch.min(
                (out.log_softmax(1)[torch.arange(20), CLASS] - OLD).exp().clamp(0.8, 1.2) * RETURNS,
                (out.log_softmax(1)[torch.arange(20), CLASS] - OLD).exp() * RETURNS,
            ).mean()
        ),
        True,
    ),
    "one action at a time": (
        lambda out: sum(
            -torch.distributions.Categorical(logits=row).log_prob(action) * 0.9**n
            for n, (row, action) in enumerate(zip(out, CLASS, strict=True))
        ),
        True,
    ),
    "density of what was done": (lambda out: -(Normal(out, 0.5).log_prob(Y).sum(1) * RETURNS).mean(), True),
    "its ratio": (lambda out: -((normal(out).sum(1) - OLD).exp() * RETURNS).mean(), True),
    "squares that are weighed": (lambda out: (((out - Y) ** 2).sum(1) * RETURNS.abs()).mean(), False),
    "a likelihood": (lambda out: -Normal(out, 0.5).log_prob(Y).sum(1).mean(), False),
    "a likelihood under a mask": (lambda out: -(normal(out).sum(1) * (RETURNS > 0)).sum(), False),
    "labels": (lambda out: -0.5 * out.log_softmax(1).gather(1, CLASS[:, None]).mean(), False),
    "labels under a mask": (
        lambda out: -(out.log_softmax(1).gather(1, CLASS[:, None]).squeeze(1) * (RETURNS > 0)).sum(),
        False,
    ),
    "focal": (
        lambda out: (
            -(
                (1 - out.softmax(1).gather(1, CLASS[:, None])) ** 2
                * out.log_softmax(1).gather(1, CLASS[:, None])
            ).mean()
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_loss_that_weighs_choices_is_known_for_one(name):
    make_loss, weighs = CHOICES[name]
    model = nn.Linear(5, 3)
    evidence = evidence_of(model, lambda: make_loss(model(X)))
    list(is_the_loss_the_right_way_up(evidence))
    assert evidence.noted.get("policy_loss", False) is weighs


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("turned", [lambda a: -a, lambda a: -1.0 * a, lambda a: a * -0.5])
def test_a_minus_before_the_advantage(turned, sign):
    """Minimised is -advantage * ratio, as PPO is often written; with another minus it is upside down."""
    model = nn.Linear(5, 3)

    def loss():
        ratio = (model(X).log_softmax(1)[torch.arange(20), CLASS] - OLD).exp()
        advantage = RETURNS - 0.5
        return sign * (turned(advantage) * ratio).mean()

    found = confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, loss))
    assert found == ([] if sign > 0 else ["loss-scale-or-sign/policy-sign"])


GOALS = {  # what a value is compared with, and whether it is a return that changes with the network
    "the network's own": (lambda network, other: RETURNS + 0.9 * network(X).detach().max(1).values, True),
    "a second network's": (lambda network, other: RETURNS + 0.9 * other(X).max(1).values.detach(), True),
    "data": (lambda network, other: RETURNS + 0.9 * Y.max(1).values, False),
    "a teacher": (lambda network, other: other(X).max(1).values.detach(), False),
}


@pytest.mark.parametrize("name", GOALS)
def test_values_against_returns_are_known_for_such(name):
    make_goal, changes = GOALS[name]
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3).requires_grad_(False)])
    evidence = evidence_of(
        model, lambda: F.smooth_l1_loss(model[0](X).gather(1, CLASS[:, None]).squeeze(1), make_goal(*model))
    )
    list(is_the_loss_the_right_way_up(evidence))
    assert evidence.noted.get("policy_loss", False) is changes


class Actor(nn.Module):
    """A normal policy and a value, from one trunk or from two networks."""

    def __init__(self, shared):
        super().__init__()
        self.trunk = nn.Linear(5, 8) if shared else nn.Identity()
        self.mean, self.value = nn.Linear(8 if shared else 5, 3), nn.Linear(8 if shared else 5, 1)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        x = self.trunk(x).tanh()
        return Normal(self.mean(x), self.log_std.exp()), self.value(x).squeeze(1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("clipped", [True, False])
def test_a_policy_of_continuous_actions(shared, sign, clipped):
    """PPO and actor-critic with torch's own normal distribution; its value loss is the larger one by far."""
    model = Actor(shared)

    def loss():
        policy, value = model(X)
        advantage, chance = RETURNS - 0.5, policy.log_prob(Y).sum(-1)
        gain = chance * advantage
        if clipped:
            ratio = (chance - chance.detach()).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -sign * gain.mean() + 0.5 * F.mse_loss(value, 100 * RETURNS) - 0.01 * policy.entropy().mean()

    found = confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, loss))
    assert found == ([] if sign > 0 else ["loss-scale-or-sign/policy-sign"])


@pytest.mark.parametrize(("sign", "found"), [(1.0, []), (-1.0, ["loss-scale-or-sign/sign"])])
def test_answers_chosen_and_rejected(sign, found):
    """Of a pair one answer is to become less likely; a likelihood alone that falls is the wrong way round."""
    model, chosen, rejected = nn.Linear(5, 3), CLASS, (CLASS + 1) % 3

    def likelihood(answer):
        return model(X).log_softmax(-1).gather(-1, answer.unsqueeze(-1)).squeeze(-1)

    def preference():
        better, worse = likelihood(chosen), likelihood(rejected)
        return -F.logsigmoid((better - better.detach()) - (worse - worse.detach())).mean()

    def alone():
        return likelihood(chosen).mean()

    step = preference if sign > 0 else alone
    assert confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, step)) == found


class TwoDecoders(nn.Module):
    """The first hides from the second what the second is to tell from the data."""

    def __init__(self, recurrent=False):
        super().__init__()
        self.recurrent = recurrent
        self.encoder = nn.GRU(5, 5, batch_first=True) if recurrent else nn.Linear(5, 5)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def encode(self, x):
        return self.encoder(x.view(4, 5, 5))[0].reshape(20, 5) if self.recurrent else self.encoder(x).tanh()

    def forward(self, x):
        one = self.first(self.encode(x))
        return one, self.second(self.encode(x)), self.second(self.encode(one))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(
    "weights, ids",
    [
        ((0.5, -0.5), ["loss-scale-or-sign/terms-cancel"]),
        ((0.5, -0.3), []),
        ((0.5, 0.5), []),
        ((0.0, 0.0), []),
    ],
)
def test_terms_of_two_players_in_one_sum(weights, ids, recurrent):
    torch.manual_seed(0)
    model = TwoDecoders(recurrent)

    def make_loss():
        one, two, both = model(X)
        distance = nn.MSELoss(reduction="none")
        first = 0.5 * distance(one, X) + weights[0] * distance(both, X)
        second = 0.5 * distance(two, X) + weights[1] * distance(both, X)
        return (first + second).mean()

    assert confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, make_loss)) == ids


def test_a_term_that_is_reported_and_taken_off_again_is_none():
    """The value of one loss with the gradient of another."""
    model = nn.Linear(5, 5)

    def make_loss():
        out = model(X)
        return F.mse_loss(out, X) + F.l1_loss(out, X) - F.l1_loss(out, X).detach()

    assert not confirmed_ids(is_the_loss_the_right_way_up, evidence_of(model, make_loss))
