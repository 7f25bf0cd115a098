"""Single values normalised by themselves, and normalisations of several values, which are left alone."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.normalisation import does_normalisation_help


class OwnNorm(nn.Module):
    """A layer norm by hand, over one axis."""

    def __init__(self, axis, scale=True):
        super().__init__()
        self.axis, self.scale = axis, scale

    def forward(self, x):
        difference = x - x.mean(self.axis, keepdim=True)
        variance = x.var(self.axis, keepdim=True, unbiased=False)
        return difference / (variance + 1e-5).sqrt() if self.scale else difference


class Around(nn.Module):
    """A way around a module."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def verdicts(*middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), *middle, nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randn(6, 3, 8, 8), torch.randint(0, 2, (6,))
    evidence = evidence_of(model, lambda: nn.functional.cross_entropy(model(x), y))
    return list(does_normalisation_help(evidence))


@pytest.mark.parametrize("norm", [nn.GroupNorm(8, 8), nn.LayerNorm([1, 1]), nn.LayerNorm(1), OwnNorm(-1)])
def test_single_values_are_named_with_what_they_cut_off(norm):
    (found,) = verdicts(norm)
    assert found.id == "normalization-error/one-value" and not found.if_troubled
    assert "0.weight reach the loss through it only" in found.evidence[1]


def test_inputs_normalised_one_by_one():
    model = nn.Sequential(nn.LayerNorm(1), nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    x, y = torch.randn(16, 1), torch.randn(16, 1)
    (found,) = does_normalisation_help(evidence_of(model, lambda: (model(x) - y).pow(2).mean()))
    assert found.evidence[1].startswith("the inputs reach")


def test_with_a_way_around_it_matters_in_trouble_only():
    (found,) = verdicts(Around(nn.GroupNorm(8, 8)))
    assert found.if_troubled


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(4, 8), nn.LayerNorm([8, 1, 1]), OwnNorm(1), OwnNorm(-1, scale=False)]
)
def test_several_values_or_no_normalisation_are_left_alone(norm):
    assert not verdicts(norm)


def test_instances_are_normalised_over_their_positions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    )
    x = torch.randn(6, 3, 8, 8)
    assert not confirmed_ids(does_normalisation_help, evidence_of(model, lambda: model(x).pow(2).mean()))
