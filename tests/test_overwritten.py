"""Checkpoints that an initialisation writes over before the first step, and ones that are used, in part or changed."""

import pytest
import torch
from torch import nn

import gradproof


def fine_tune(directory, after_load):
    torch.manual_seed(0)
    pretrained = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)).state_dict()
    encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
    model = nn.Sequential(encoder, nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gradproof.watch(model, optimizer, out=directory, experiments=False):
        encoder.load_state_dict(pretrained)
        after_load(encoder)
        for _ in range(12):
            x = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [c for c in gradproof.diagnose(directory).causes if c.id == "weights-state-error/overwritten"]


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def shrink_and_perturb(encoder):
    with torch.no_grad():
        for p in encoder.parameters():
            p.mul_(0.6).add_(0.02 * torch.randn_like(p))


def test_initialised_after_the_load(tmp_path):
    found = fine_tune(tmp_path / "run", lambda encoder: encoder.apply(initialise))
    assert len(found) == 1 and found[0].level == "problem" and found[0].confidence == "proven"
    assert "none of its 2 matrices" in found[0].evidence[0] and "test_overwritten.py" in found[0].where


@pytest.mark.parametrize(
    "after_load",
    [lambda encoder: None, lambda encoder: initialise(encoder[2]), shrink_and_perturb],
    ids=["used", "last layer anew", "shrunk and perturbed"],
)
def test_loads_that_are_used(tmp_path, after_load):
    assert not fine_tune(tmp_path / "run", after_load)
