"""Optimizers that take a tenth off the weights at every step, and decays that suit."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.steps.meaning import does_the_optimizer_do_what_was_meant


class Shrinking(torch.optim.Optimizer):
    """Decoupled decay by hand; `by_rate` as AdamW has it, without as it is often written."""

    def __init__(self, parameters, by_rate, lr=0.01, decay=0.1):
        super().__init__(parameters, {"lr": lr, "weight_decay": decay})
        self.by_rate = by_rate

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1.0 - group["weight_decay"] * (group["lr"] if self.by_rate else 1.0))
                p.add_(p.grad, alpha=-group["lr"])


def train(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = make(model.parameters())

    def loss():
        x = torch.randn(32, 6)
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    step = plain_step(model, optimizer, loss)
    return examine(does_the_optimizer_do_what_was_meant, model, optimizer, step, steps=4)


def test_a_decay_that_forgets_the_learning_rate():
    said = train(lambda parameters: Shrinking(parameters, by_rate=False))
    assert ids(said) == {"optimizer-config/shrinks"}
    assert "10 %" in said[-1].evidence[0] and "test_meaning_decay.py" in said[-1].where


@pytest.mark.parametrize("by_rate, lr", [(False, 1e-6), (False, 1e-2), (True, 1e-6)])
def test_a_decay_that_stays_when_the_rate_has_fallen(by_rate, lr):
    """0.03 % a step is nothing beside steps of a hundredth, and all there is beside steps of a millionth."""
    said = train(lambda parameters: Shrinking(parameters, by_rate, lr, 3e-4))
    if by_rate or lr > 1e-3:
        assert not ids(said)
        assert any("times what it adds" in v.reason for v in said if v.verdict == "excluded")
    else:
        assert ids(said) == {"optimizer-config/shrinks"} and said[-1].if_troubled
        assert "0.03 %" in said[-1].evidence[0] and "2300 such steps" in said[-1].evidence[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: Shrinking(parameters, by_rate=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(
            parameters, lr=0.3, weight_decay=0.1
        ),  # the rate is what is wrong
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=5e-4, momentum=0.9),
    ],
)
def test_decays_that_suit(make):
    assert not ids(train(make))


class Spare(nn.Module):
    """With a layer that is never called: Adam neither steps nor decays it, and a tape knows nothing of its values."""

    def __init__(self):
        super().__init__()
        self.a, self.spare, self.b = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("decay, expected", [(1e-5, set()), (30.0, {"optimizer-config/decay-share"})])
def test_a_layer_that_is_never_called_is_no_matrix_that_decays(decay, expected):
    torch.manual_seed(0)
    model = Spare()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)

    def loss():
        x = torch.randn(32, 6)
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    step = plain_step(model, optimizer, loss)
    said = examine(does_the_optimizer_do_what_was_meant, model, optimizer, step, steps=4)
    assert said and ids(said) == expected
