"""Averages too slow for their run, in all the ways they are written; and teachers, warm-ups and fitting decays."""

import copy

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradproof
from gradproof.experiments.steps.averages import does_the_average_follow

ID = "weights-state-error/average-too-slow"


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def lerp(slow, fast, decay):
    slow.lerp_(fast, 1 - decay)


def in_two_steps(slow, fast, decay):
    slow.mul_(decay).add_(fast, alpha=1 - decay)


def copied(slow, fast, decay):
    slow.copy_(decay * slow + (1 - decay) * fast)


@pytest.mark.parametrize("way", [lerp, in_two_steps, copied])
def test_the_decay_is_read_from_the_operations(way):
    model, x, memory = net(), torch.randn(8, 4), {}
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = plain_step(model, optimizer, lambda: model(x).pow(2).mean())

    def step():
        loss = train()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                way(slow, fast, 0.99)
        return loss

    examine(does_the_average_follow, model, optimizer, step, steps=2, memory=memory)
    facts = memory["noted"]["average"]
    assert facts["tensors"] == 4 and facts["module"] and not facts["in_training"]
    assert [decay for _, decay in facts["decays"]] == pytest.approx([0.99, 0.99])


def train(tmp_path, decay, teaches=False, evaluates=True, averaged=None):
    torch.manual_seed(0)
    model = net()
    average = copy.deepcopy(model).requires_grad_(False) if averaged is None else averaged(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(64, 4)
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for number in range(60):
            loss = F.mse_loss(model(x), x[:, :1] - x[:, 1:2])
            if teaches:
                with torch.no_grad():
                    taught = average(x)
                loss = loss + F.mse_loss(model(x), taught)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            now = decay(number) if callable(decay) else decay
            if averaged is not None:
                average.update_parameters(model)
            else:
                with torch.no_grad():
                    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                        slow.mul_(now).add_(fast, alpha=1 - now)
            if evaluates == "often" and number % 6 == 1:  # also in steps that are taped
                with torch.no_grad():
                    average(x)
        if evaluates:
            with torch.no_grad():
                average(x)
    return {c.id: c.level for c in gradproof.diagnose(tmp_path / "run").causes}


def test_an_average_too_slow_for_its_run(tmp_path):
    assert train(tmp_path, 0.9999, evaluates="often").get(ID) == "problem"


def test_torchs_own_averaged_model(tmp_path):
    def averaged(model):
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9999))

    assert train(tmp_path, 0.9999, averaged=averaged).get(ID) == "problem"


@pytest.mark.parametrize(
    "how",
    [
        {"decay": 0.9},
        {"decay": lambda number: min(0.9999, (1 + number) / (10 + number))},
        {"decay": 0.9999, "teaches": True},
        {"decay": 0.9999, "evaluates": False},
    ],
)
def test_fitting_averages_teachers_and_unused_ones_are_no_problem(tmp_path, how):
    assert train(tmp_path, **how).get(ID) in (None, "note")


@pytest.mark.parametrize(
    "rebinds, decay, level", [(True, 0.9999, "warning"), (False, 0.9999, "warning"), (True, 0.9, None)]
)
def test_an_average_kept_in_a_dict(tmp_path, rebinds, decay, level):
    torch.manual_seed(0)
    model, x = net(), torch.randn(64, 4)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(60):
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1] - x[:, 1:2]).backward()
            optimizer.step()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if rebinds:
                        average[name] = decay * average[name] + (1 - decay) * p
                    else:
                        average[name].lerp_(p, 1 - decay)
    found = {c.id: c.level for c in gradproof.diagnose(tmp_path / "run").causes}
    assert found.get(ID) == level  # nobody sees who uses the dict: a warning


def averaged_verdicts(model, x, follow):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = plain_step(model, optimizer, lambda: model(x).pow(2).mean())

    def step():
        loss = train()
        follow()
        return loss

    return examine(does_the_average_follow, model, optimizer, step, steps=5)


@pytest.mark.parametrize("right", [True, False])
def test_average_with_a_wrong_formula(right):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    average, x = copy.deepcopy(model), torch.randn(16, 4)

    def follow():
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9 if right else 0.1).add_(fast, alpha=0.1)

    found = averaged_verdicts(model, x, follow)
    assert ids(found) == (set() if right else {"weights-state-error/average"})


def test_average_that_begins_at_zero_is_silent():
    model = nn.Linear(4, 1)
    average, x = copy.deepcopy(model), torch.randn(16, 4)
    for parameter in average.parameters():
        nn.init.zeros_(parameter)

    def follow():
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.2)

    assert not ids(averaged_verdicts(model, x, follow))
