"""Steps that overshoot, that crawl, and of a fitting length; gradients that are right and one that is not."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.gradients.gradient import is_the_gradient_right
from gradproof.experiments.steps.step_length import Probe, is_the_step_too_long_or_short, straight_until


def regression(
    lr, steps=6, optimizer=torch.optim.SGD, experiment=is_the_step_too_long_or_short, layer=nn.Identity
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), layer(), nn.Linear(16, 1))
    taken = optimizer(model.parameters(), lr=lr)

    def loss():
        x = torch.randn(32, 8)
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    return examine(experiment, model, taken, plain_step(model, taken, loss), steps=steps)


def test_steps_that_overshoot():
    found = [v for v in regression(3.0) if v.verdict == "confirmed"]
    assert {v.id for v in found} == {"lr-too-high/overshoot"}
    assert found[-1].numbers["rise"] > 0.02 and found[-1].numbers["lr_factor"] <= 0.5


def test_steps_of_a_fitting_length():
    said = regression(0.05)
    assert not ids(said)
    assert {v.family for v in said if v.verdict == "excluded"} == {"lr-too-high"}


def test_steps_that_crawl_from_first_to_last_need_no_other_trouble():
    said = [v for v in regression(1e-6, steps=24) if v.id == "lr-too-low/tiny-steps"]
    assert said[0].if_troubled and not said[-1].if_troubled
    assert "followed further" in said[-1].evidence[0]


def test_a_rate_that_crawls_only_at_first_is_warming_up():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(64, 8)
    train = plain_step(model, optimizer, lambda: nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))
    taken = iter(range(30))

    def step():
        optimizer.param_groups[0]["lr"] = 1e-6 if next(taken) < 3 else 0.02
        return train()

    said = examine(is_the_step_too_long_or_short, model, optimizer, step, steps=26)
    assert all(v.if_troubled for v in said if v.id == "lr-too-low/tiny-steps")


@pytest.mark.parametrize("turns", [True, False])
def test_of_players_that_take_turns_no_loss_has_to_fall(turns):
    """The same two optimizers, one after the other, on one loss: that crawls."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-5) for m in (judge, maker)]
    taken, wants = iter(range(60)), nn.functional.binary_cross_entropy_with_logits

    def step():
        judges = not turns or next(taken) % 2 == 0
        fakes, answer = maker(torch.rand(32, 1)), torch.zeros(32, 1)
        real = wants(judge(4 + torch.randn(32, 1)), answer + 1)
        if not turns:
            loss = real + wants(judge(fakes), answer)
        else:
            loss = real + wants(judge(fakes.detach()), answer) if judges else wants(judge(fakes), answer + 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers if not turns else [optimizers[not judges]]:
            optimizer.step()
        return loss.detach()

    said = examine(is_the_step_too_long_or_short, nn.ModuleList([maker, judge]), optimizers, step, steps=30)
    crawling = [v for v in said if v.id == "lr-too-low/tiny-steps"]
    assert crawling and any(not v.if_troubled for v in crawling) is not turns


def test_an_objective_without_a_floor_falls_straight_and_proves_nothing():
    assert straight_until(1.0, {10.0: 0.999, 100.0: 0.99, 1000.0: 0.9}) == 1000
    assert straight_until(1.0, {10.0: 0.99, 100.0: 0.9, 1000.0: 1.5}) == 100
    assert straight_until(1.0, {10.0: 0.99, 100.0: -0.1, 1000.0: -10.0}) == 0
    assert straight_until(1.0, {10.0: 0.95, 100.0: 0.94, 1000.0: 0.93}) == 0


@pytest.mark.parametrize("lr, crawls", [(1e-4, True), (1e-2, False)])
def test_a_slow_rate_that_gets_there_is_no_crawl(lr, crawls):
    """A table of scores from zero on: a hundred times the step is better, and yet it is on its way."""
    torch.manual_seed(0)
    scores = nn.Embedding(9, 9)
    nn.init.zeros_(scores.weight)
    optimizer = torch.optim.SGD(scores.parameters(), lr=lr)

    def loss():
        tokens = torch.randint(0, 9, (64,))
        return nn.functional.cross_entropy(scores(tokens), (2 * tokens) % 9)

    train = plain_step(scores, optimizer, loss)
    said = examine(is_the_step_too_long_or_short, scores, optimizer, train, steps=60)
    crawling = [v for v in said if v.id == "lr-too-low/tiny-steps" and not v.if_troubled]
    assert any(v.level == "problem" and v.confidence == "proven" for v in crawling) is crawls


@pytest.mark.parametrize("dip, overshoots", [(3e-4, True), (3e-6, False)])
def test_a_dip_that_rounding_could_make_is_none(dip, overshoots):
    """Momentum may go up from the start: then the loss is least at a step of no length, but for rounding."""
    losses = {1e-5: 1 - dip, 1e-3: 1.0001, 0.01: 1.001, 0.1: 1.01, 0.5: 1.05, 1.0: 1.1, 2.0: 1.2}
    assert Probe(3, 1.0, losses).overshoots is overshoots


class HalfBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


class Wrong(nn.Module):
    def forward(self, x):
        return HalfBackward.apply(x)


def test_a_backward_that_is_not_the_derivative():
    said = regression(0.01, steps=1, experiment=is_the_gradient_right, layer=Wrong)
    (found,) = [v for v in said if v.verdict == "confirmed"]
    assert found.family == "wrong-gradient" and found.where


def test_a_right_gradient():
    said = regression(0.01, steps=1, experiment=is_the_gradient_right)
    assert {(v.verdict, v.family) for v in said} == {("excluded", "wrong-gradient")}


def test_a_loss_that_varies_at_every_length_is_no_matter_of_the_rate():
    """Through a decoder that multiplies small changes, each length of the step is as good as any other."""
    torch.manual_seed(0)
    model, decoder = nn.Linear(4, 4), nn.RNN(4, 32, batch_first=True).requires_grad_(False)
    decoder.weight_hh_l0.data = 4 * torch.linalg.qr(torch.randn(32, 32))[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss():
        x = torch.randn(16, 100, 4)
        return 100 * (decoder(model(x))[0] - decoder(x)[0]).square().mean()

    said = examine(
        is_the_step_too_long_or_short, model, optimizer, plain_step(model, optimizer, loss), steps=6
    )
    assert not ids(said) and any("none is right" in v.reason for v in said if v.verdict == "undecided")
