"""Target networks whose soft update gives a local name another tensor, and updates that are written back."""

import copy

import pytest
import torch
from taped_trainings import examine, ids
from torch import nn

from gradproof.experiments.steps.averages import does_the_average_follow


def train(update, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        x = torch.randn(32, 6)
        with torch.no_grad():
            wanted = x.sum(1, keepdim=True) + 0.5 * target(x)
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            update(model, target)
        return loss.detach()

    return examine(does_the_average_follow, model, optimizer, step, steps=steps)


def rebinds(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t = 0.05 * p + 0.95 * t


def copies(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t.copy_(0.05 * p + 0.95 * t)


def new_data(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t.data = 0.05 * p.data + 0.95 * t.data


def lerps(model, target):
    for p, t in zip(model.parameters(), target.parameters(), strict=True):
        t.lerp_(p, 0.05)


def nothing(model, target):
    """A reference that is meant to stay."""


def test_an_average_that_is_thrown_away():
    said = train(rebinds)
    assert ids(said) == {"weights-state-error/average-thrown-away"}
    assert "4 tensors" in said[-1].evidence[0] and "0.95" in said[-1].evidence[0]
    assert "test_averages_kept.py" in said[-1].where


@pytest.mark.parametrize("update", [copies, new_data, lerps, nothing])
def test_averages_that_are_kept_and_references(update):
    assert not ids(train(update))


def shadow_of(model):
    """What is often taken for a copy: the tensors of a state_dict are the weights."""
    return dict(model.state_dict())


def in_place(model, shadow):
    for k, v in model.state_dict().items():
        shadow[k].mul_(0.95).add_(v, alpha=0.05)


def by_lerp(model, shadow):
    for k, v in model.state_dict().items():
        shadow[k].lerp_(v, 0.05)


def train_with_a_dict(make, update, kind=nn.LSTM):
    torch.manual_seed(0)
    model = kind(6, 6)
    shadow = make(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step():
        x = torch.randn(32, 6)
        out = model(x)
        loss = (out[0] if isinstance(out, tuple) else out).sub(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            update(model, shadow)
        return loss.detach()

    return examine(does_the_average_follow, model, optimizer, step, steps=3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.Linear])
@pytest.mark.parametrize("update", [in_place, by_lerp])
def test_an_average_in_the_memory_of_the_weights(update, kind):
    said = train_with_a_dict(shadow_of, update, kind)
    assert ids(said) == {"aliasing-or-inplace/average-of-itself"}
    assert said[-1].confidence == "proven" and "test_averages_kept.py" in said[-1].where
    assert ("0.9975" in said[-1].evidence[0]) is (update is in_place)


def copied(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def decays(model, _):
    for p in model.parameters():
        p.mul_(0.999)


def decays_by_a_sum(model, _):
    for p in model.parameters():
        p.add_(p, alpha=-0.001)


def shrinks_and_perturbs(model, _):
    for p in model.parameters():
        p.mul_(0.9).add_(torch.randn_like(p), alpha=0.1)


@pytest.mark.parametrize("update", [in_place, by_lerp, decays, decays_by_a_sum, shrinks_and_perturbs])
def test_copies_and_what_changes_weights_on_purpose(update):
    assert not ids(train_with_a_dict(copied, update))


@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 16), lambda: nn.GRU(8, 8)])
@pytest.mark.parametrize("way", ["lerp", "in two steps"])
@pytest.mark.parametrize(
    "dtype, decay, moves, lost",
    [
        (torch.bfloat16, 0.998, True, True),
        (torch.bfloat16, 0.998, False, False),  # who never leaves the average needs no digits
        (torch.bfloat16, 0.5, True, False),
        (torch.float32, 0.998, True, False),
    ],
)
def test_an_average_in_half_precision_that_the_weights_have_left(make, way, dtype, decay, moves, lost):
    torch.manual_seed(0)
    model = make()
    average = {name: p.detach().clone().to(dtype) for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if moves else 1e-7)

    def step():
        with torch.no_grad():
            fast = [p.detach().to(dtype) if way == "lerp" else p.detach() for p in model.parameters()]
            for s, f in zip(average.values(), fast, strict=True):
                s.lerp_(f, 1 - decay) if way == "lerp" else s.mul_(decay).add_(f, alpha=1 - decay)
        x = torch.randn(8, 4, model.in_features if isinstance(model, nn.Linear) else 8)
        out = model(x)
        loss = ((out[0] if isinstance(out, tuple) else out) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = examine(does_the_average_follow, model, optimizer, step, steps=6)
    assert ids(found) == ({"low-precision-error/lost-updates"} if lost else set())
