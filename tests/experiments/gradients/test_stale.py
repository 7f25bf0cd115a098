"""Gradients of an earlier step: of two players with clipped weights, only those that are stepped have to be clean."""

import pytest
import torch
from taped_trainings import evidence_of_step
from torch import nn

import gradproof
from gradproof.experiments.gradients.gradient import is_the_gradient_right


def train_critic(cleared, by_hand=False):
    """A WGAN: the critic's weights are clipped when the generator's turn has begun."""
    torch.manual_seed(0)
    models = {"G": nn.Linear(3, 2), "D": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))}
    G, D = models["G"], models["D"]
    of_G, of_D = (torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values())

    def judging():
        if cleared:
            of_D.zero_grad()
        (D(G(torch.randn(12, 3)).detach()).mean() - D(torch.randn(12, 2) + 3).mean()).backward()
        if by_hand:
            with torch.no_grad():
                for p in D.parameters():
                    p -= 0.01 * p.grad
        else:
            of_D.step()

    def making():
        with torch.no_grad():
            for p in D.parameters():
                p.clamp_(-0.1, 0.1)
        of_G.zero_grad()
        (-D(G(torch.randn(12, 3))).mean()).backward()
        of_G.step()

    said = []
    for step in (judging, making) * 2:
        said += is_the_gradient_right(evidence_of_step(step, models, [of_G, of_D], losses=[1.0]))
    return [v.id for v in said if v.id]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_critic_is_clean_when_it_is_stepped(by_hand):
    assert train_critic(cleared=False, by_hand=by_hand) == ["zero-grad-error/stale"]
    assert train_critic(cleared=True, by_hand=by_hand) == []


def test_a_layer_that_came_late_and_no_optimizer_has(tmp_path):
    """Nothing clears its gradients, and nothing uses them: it is not trained, and that is what is wrong."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)), torch.randn(16, 5)
    optimizer = torch.optim.Adam(model.parameters())
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for step in range(8):
            if step == 3:
                model.requires_grad_(False)
                model[1] = nn.Linear(8, 3)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    causes = [cause.id for cause in gradproof.diagnose(tmp_path / "run").causes]
    assert causes[0] == "param-not-updated/replaced" and "zero-grad-error/stale" not in causes
