"""BatchNorm of two samples, statistics that never move, an ε above the variance; and norms that do their work."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.normalisation import does_normalisation_help


def verdicts(norm, batch=16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(batch, 6)
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    return examine(does_normalisation_help, model, optimizer, step)


@pytest.mark.parametrize(
    "norm, batch, what",
    [
        (nn.BatchNorm1d(8, momentum=0.0), 16, "running-statistics-never-move"),
        (nn.BatchNorm1d(8), 2, "tiny-batch"),
        (nn.LayerNorm(8, eps=1e3), 16, "eps"),
        (nn.BatchNorm1d(8, eps=10.0), 16, "eps"),
    ],
)
def test_norms_that_hurt(norm, batch, what):
    found = verdicts(norm, batch)
    assert ids(found) == {f"normalization-error/{what}"} and found[0].where.startswith("1")


@pytest.mark.parametrize(
    "norm, batch", [(nn.BatchNorm1d(8), 16), (nn.LayerNorm(8), 2), (nn.LayerNorm(8, eps=1e-3), 16)]
)
def test_norms_that_help_are_silent(norm, batch):
    assert not verdicts(norm, batch)


@pytest.mark.parametrize(
    "momentum, scale, lags", [(0.001, 5.0, True), (0.001, 1.0, False), (0.1, 5.0, False)]
)
def test_running_statistics_that_lag(momentum, scale, lags):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 1))
    x = scale * torch.randn(64, 6)
    for _ in range(150):
        model(x)
    evidence = evidence_of(model, lambda: model(x).pow(2).mean(), step=150)
    found = confirmed_ids(does_normalisation_help, evidence)
    assert found == (["normalization-error/running-statistics-lag"] if lags else [])
