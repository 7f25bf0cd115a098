"""Residuals and penalties made of derivatives, with a graph and without; derivatives that are meant to carry none."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.gradients.cuts import is_a_path_cut
from gradproof.experiments.gradients.gradient import is_the_gradient_right


def network(inputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))


def slope(u, x, graph):
    return torch.autograd.grad(u.sum(), x, retain_graph=True, create_graph=graph)[0]  # here


@pytest.mark.parametrize("graph", [True, False])
def test_residual_beside_boundary_values(graph):
    model, boundary = network(), torch.rand(8, 2)

    def loss():
        x = torch.rand(16, 2, requires_grad=True)
        first = slope(model(x), x, graph)
        return (first[:, 0] + 0.7 * first[:, 1]).square().mean() + 20 * model(boundary).square().mean()

    found = [v for v in is_a_path_cut(evidence_of(model, loss)) if v.id]
    assert [v.id for v in found] == ([] if graph else ["detached-graph/derivative"])
    if found:
        number = int(found[0].where.rpartition(":")[2])
        assert Path(__file__).read_text().splitlines()[number - 1].endswith("# here")


@pytest.mark.parametrize("graph", [True, False])
def test_decay_that_names_the_value_itself(graph):
    model = network(1)

    def loss():
        t = torch.rand(16, 1, requires_grad=True)
        u = model(t)
        return (slope(u, t, graph) + 2 * u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()

    found = confirmed_ids(is_a_path_cut, evidence_of(model, loss))
    assert found == ([] if graph else ["detached-graph/derivative"])


@pytest.mark.parametrize("graph", [True, False])
def test_penalty_on_a_critics_gradient(graph):
    model = nn.ModuleDict({"critic": network(), "generator": nn.Linear(3, 2)})
    real = torch.randn(8, 2)
    optimizer = torch.optim.SGD(model["critic"].parameters(), lr=0.01)

    def loss():
        fake = model["generator"](torch.randn(8, 3)).detach()
        between = (0.5 * real + 0.5 * fake).requires_grad_()
        penalty = (slope(model["critic"](between), between, graph).norm(dim=1) - 1).square().mean()
        return model["critic"](fake).mean() - model["critic"](real).mean() + 10 * penalty

    found = confirmed_ids(is_a_path_cut, evidence_of(model, loss, optimizer=optimizer))
    assert found == ([] if graph else ["detached-graph/derivative"])


def test_derivatives_that_are_not_learned_from():
    """An adversarial input, a sample by Langevin's steps, weights of terms by the size of their gradients, saliency."""
    model, x, y = network(), torch.randn(8, 2), torch.randn(8, 1)

    def adversarial():
        near = x.clone().requires_grad_()
        moved = near + 0.1 * slope(model(near), near, False).sign()
        return F.mse_loss(model(moved.detach()), y) + F.mse_loss(model(x + (moved - x).detach()), y)

    def sampled():
        found = torch.randn(8, 2)
        for _ in range(3):
            found = found.detach().requires_grad_()
            found = found - 0.1 * slope(model(found), found, False) + 0.01 * torch.randn(8, 2)
        return model(x).mean() - model(found.detach()).mean()

    def weighed():
        first, second = F.mse_loss(model(x), y), model(x).abs().mean()
        sizes = [
            torch.autograd.grad(t, model[0].weight, retain_graph=True)[0].norm() for t in (first, second)
        ]
        return first * (sizes[1] / sizes[0]) + second

    def salient():
        seen = x.clone().requires_grad_()
        weight = slope(model(seen), seen, False).abs().sum(1, keepdim=True)
        return (weight * (model(x) - y).square()).mean()

    for loss in (adversarial, sampled, weighed, salient):
        assert not confirmed_ids(is_a_path_cut, evidence_of(model, loss)), loss.__name__


def test_one_step_towards_a_task_without_second_derivatives():
    """First-order MAML: what was learned from a task goes through the network again."""
    model, x, y = nn.Linear(2, 1), torch.randn(8, 2), torch.randn(8, 1)

    def loss():
        weights = [model.weight, model.bias]
        inner = torch.autograd.grad(F.mse_loss(F.linear(x, *weights), y), weights)
        return F.mse_loss(F.linear(x, *(w - 0.1 * g for w, g in zip(weights, inner, strict=True))), y)

    assert not confirmed_ids(is_a_path_cut, evidence_of(model, loss))


def test_a_gradient_that_another_network_learns_to_foretell():
    model = nn.ModuleDict({"energy": network(), "score": nn.Linear(2, 2)})
    x = torch.randn(8, 2)

    def loss():
        seen = x.clone().requires_grad_()
        energy = model["energy"](seen)
        return (model["score"](x) - slope(energy, seen, False)).square().mean() + energy.square().mean()

    assert not confirmed_ids(is_a_path_cut, evidence_of(model, loss))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def test_what_comes_through_a_reversal_is_not_said_to_agree_with_float64():
    model = nn.ModuleDict({"shared": nn.Linear(4, 4), "task": nn.Linear(4, 1), "domain": nn.Linear(4, 1)})

    def step():
        h = model["shared"](torch.randn(8, 4))
        return model["task"](h).square().mean() + model["domain"](Reversed.apply(h)).square().mean()

    (said,) = is_the_gradient_right(evidence_of(model, step))
    assert said.verdict == "excluded" and "what comes through Reversed" in said.reason
    assert float(said.reason.split("float64 to ")[1].split(",")[0]) < 1e-4
