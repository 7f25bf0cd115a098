"""A rate at which a tenth of it learns the same batch better, and rates that suit; training itself stays untouched."""

import pytest
import torch
from experiment_steps import evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.steps.one_batch import can_it_learn_this_batch


def classify(lr, optimizer=torch.optim.AdamW, scheduler=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 4))
    made = optimizer(model.parameters(), lr=lr)
    if scheduler:
        torch.optim.lr_scheduler.ConstantLR(made, factor=1.0)
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    train = plain_step(model, made, lambda: nn.functional.cross_entropy(model(x), y))
    return examine(can_it_learn_this_batch, model, made, train, steps=3), model


@pytest.mark.parametrize(
    ("rate", "optimizer"), [(1.0, torch.optim.AdamW), (10.0, torch.optim.SGD)], ids=["AdamW", "SGD"]
)
def test_a_tenth_learns_better(rate, optimizer):
    said, _ = classify(rate, optimizer)
    assert ids(said) == {"lr-too-high/tenth-learns-better"}
    assert (
        said[0].level == "problem"
        and said[0].numbers == {"lr_factor": 0.1}
        and f"{rate:.1e}" in said[0].evidence[0]
    )


@pytest.mark.parametrize(
    ("rate", "optimizer"),
    [(1e-3, torch.optim.AdamW), (1e-2, torch.optim.AdamW), (0.3, torch.optim.SGD), (1e-6, torch.optim.SGD)],
)
def test_rates_that_suit_and_rates_too_low(rate, optimizer):
    said, _ = classify(rate, optimizer)
    assert {v.about for v in said} == {"lr-too-high/tenth-learns-better"}


def test_the_training_goes_on_as_if_nobody_had_looked(monkeypatch):
    _, looked_at = classify(1.0, scheduler=True)  # a scheduler ties the optimizer's step to the optimizer
    monkeypatch.setattr("gradproof.experiments.steps.one_batch.FEWEST", 10**6)  # nobody looks
    _, alone = classify(1.0, scheduler=True)
    for one, other in zip(looked_at.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("noise", "began", "verdict"),
    [(0.1, 10.0, "undecided"), (3.0, 10.0, "confirmed"), (0.1, None, "undecided")],
)
def test_near_the_end_a_lower_rate_fits_any_one_batch_better(noise, began, verdict):
    """Of a loss that has come down, or whose beginning is not known."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 1), torch.randn(32, 64)
    y = model(x).detach() + noise * torch.randn(32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3 * noise)
    losses, step = ([began] * 40, 40) if began else ([noise**2] * 40, 9000)
    evidence = evidence_of(
        model, lambda: nn.functional.mse_loss(model(x), y), step, optimizer=optimizer, losses=losses
    )
    assert [v.verdict for v in can_it_learn_this_batch(evidence)] == [verdict]


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_a_loss_that_moves_with_what_no_gradient_follows_says_nothing_about_the_rate(cut):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    x, y = torch.randn(64, 16), torch.randn(64)

    def loss():
        value, score = model(x).unbind(1)
        advantage = y - (value.detach() if cut else value)
        return 0.1 * (y - value).square().mean() + (torch.sigmoid(score) * advantage).square().mean()

    said = examine(can_it_learn_this_batch, model, optimizer, plain_step(model, optimizer, loss), steps=3)
    assert {v.verdict for v in said} == ({"undecided"} if cut else {"confirmed"})
