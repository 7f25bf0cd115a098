"""Gradients of an earlier step: of two players with clipped weights, only those that are stepped have to be clean."""

import pytest
import torch
from torch import nn

from gradproof.experiments.evidence import Evidence
from gradproof.experiments.gradient import is_the_gradient_right
from gradproof.tape.record import record


def train_critic(cleared, by_hand=False):
    """A WGAN: the critic's weights are clipped when the generator's turn has begun."""
    torch.manual_seed(0)
    models = {"G": nn.Linear(3, 2), "D": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))}
    G, D = models["G"], models["D"]
    names = {p: f"{m}.{n}" for m, model in models.items() for n, p in model.named_parameters()}
    of_G, of_D = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values())
    said = []
    for _ in range(2):
        with record(names) as judging:
            if cleared:
                of_D.zero_grad()
            (D(G(torch.randn(12, 3)).detach()).mean() - D(torch.randn(12, 2) + 3).mean()).backward()
            if by_hand:
                with torch.no_grad():
                    for p in D.parameters():
                        p -= 0.01 * p.grad
            else:
                of_D.step()
        with record(names) as making:
            with torch.no_grad():
                for p in D.parameters():
                    p.clamp_(-0.1, 0.1)
            of_G.zero_grad()
            (-D(G(torch.randn(12, 3))).mean()).backward()
            of_G.step()
        for tape in (judging, making):
            assert not tape.broken
            said += is_the_gradient_right(Evidence(tape, 1, models, [of_G, of_D], [1.0]))
    return [v.id for v in said if v.id]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_critic_is_clean_when_it_is_stepped(by_hand):
    assert train_critic(cleared=False, by_hand=by_hand) == ["zero-grad-error/stale"]
    assert train_critic(cleared=True, by_hand=by_hand) == []
