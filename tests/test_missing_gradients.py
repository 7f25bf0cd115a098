"""Gradients that are not there, come late or go away: the watching goes on, and measures what there is."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from gradproof.diagnosis.symptoms import never_changed
from gradproof.probes.pace import Pace
from gradproof.probes.schedule import EVERYTHING, LIGHT
from gradproof.probes.watch import watch
from gradproof.record.run import open_run


def open_whole(path, steps):
    """A run in which watching did not end early."""
    run = open_run(path)
    assert run.info["failure"] is None and len(run) == steps
    return run


class TwoOutputs(nn.Module):
    """As a recurrent layer on a GPU: one operation, two outputs, of which the loss uses one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return torch.split(self.layer(x), 4, dim=1)


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_the_loss_does_not_use_has_no_gradient(used, tmp_path):
    torch.manual_seed(0)
    model = TwoOutputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, out=tmp_path / "run", schedule="all every step", experiments=False):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(6, 4))[used].square().mean().backward()
            optimizer.step()
    run = open_whole(tmp_path / "run", 4)
    measured = {name for name in run.table("output_gradient", "norm").names if "layer" not in name}
    assert len(measured) == 1 and len(run.table("output", "norm").names) == 3


@pytest.mark.parametrize("heads, level", [(30, "note"), (2, "warning")])
def test_a_head_that_was_not_drawn_yet_is_no_accusation(heads, level, tmp_path):
    """A head for each time, of which a step draws one; of two that are drawn by turns, the third is never used."""
    model = nn.ModuleDict(
        {"body": nn.Linear(4, 4), "heads": nn.ModuleList(nn.Linear(4, 1) for _ in range(heads + 1))}
    )
    optimizer = torch.optim.Adam(model.parameters())
    with watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for number in range(25):
            optimizer.zero_grad()
            head = model["heads"][1 + number % heads]
            head(model["body"](torch.randn(6, 4))).square().mean().backward()
            optimizer.step()
    [found] = never_changed(open_whole(tmp_path / "run", 25))
    assert (found.name, found.level) == ("no_gradient", level) and found.where == "heads.0.weight"


def critic_training(path, penalty, steps=5):
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.GroupNorm(2, 8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    with watch(critic, optimizer, out=path, schedule="all every step", experiments=False):
        for _ in range(steps):
            x = torch.randn(6, 4, requires_grad=True)
            (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            optimizer.zero_grad(set_to_none=True)
            loss = (gradient.norm(dim=1) - 1).square().mean()
            (loss if penalty else loss + critic(x).mean()).backward()
            optimizer.step()


@pytest.mark.parametrize("penalty", [True, False], ids=["penalty only", "with its critic"])
def test_a_gradient_penalty_leaves_layers_without_gradient(penalty, tmp_path):
    critic_training(tmp_path / "run", penalty)
    run = open_whole(tmp_path / "run", 5)
    assert np.isfinite(run.steps["grad_norm"]).all() and (run.steps["grad_norm"] > 0).all()


class Flaky(nn.Parameter):
    """A gradient that another thread takes away and brings back: to gradproof, every second look finds none."""

    looks = 0

    @property
    def grad(self):
        if "gradproof" in sys._getframe(1).f_code.co_filename:
            Flaky.looks += 1
        return torch.ones(4) if Flaky.looks % 2 == 0 else None

    @grad.setter
    def grad(self, value):
        pass


@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("depth", ["all", "light"])
def test_a_gradient_may_be_gone_at_the_next_look(looks, depth, tmp_path):
    model = nn.Linear(4, 1)
    model.flaky = Flaky(torch.zeros(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    with watch(model, optimizer, out=tmp_path / "run", schedule=f"{depth} every step", experiments=False):
        for _ in range(6):
            model(torch.randn(3, 4)).sum().backward()
            Flaky.looks = looks
            optimizer.step()
    open_whole(tmp_path / "run", 6)


def test_gradients_that_appear_and_disappear_from_step_to_step(tmp_path, monkeypatch):
    """What has a gradient changes at each step; where a gradient is bad, weights are not held against an old copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(Pace, "_choose_depth", lambda self, number, *_: EVERYTHING if number < 2 else LIGHT)
    with watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for step in range(8):
            optimizer.zero_grad(set_to_none=True)
            model[step % 3](torch.ones(2, 4)).sum().backward()
            if step == 5:  # looked at closely from here on, but only after the weights could have been copied
                model[2].weight.grad[0, 0] = float("nan")
            optimizer.step()
            if step == 6:
                model[0].weight.grad = None
    run = open_whole(tmp_path / "run", 8)
    updates = run.table("update", "norm")
    assert set(updates.steps) == {0, 1}, "only those steps were to be measured whole"


def test_backward_from_an_edge_of_the_graph(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).sum()
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.ones(()))
            optimizer.step()
    assert (open_whole(tmp_path / "run", 3).steps["grad_norm"] > 0).all()
