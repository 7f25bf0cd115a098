"""A LayerNorm written over the batch; the same over the features, a BatchNorm with statistics, a loss that centres."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.normalisation import does_normalisation_help


class Norm(nn.Module):
    def __init__(self, width, dim, statistics=False):
        super().__init__()
        self.dim = dim
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        if statistics:
            self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x):
        mean = x.mean(self.dim, keepdim=True)
        variance = x.var(self.dim, keepdim=True, unbiased=False)
        return self.gain * (x - mean) / torch.sqrt(variance + 1e-5) + self.shift


def said(dim, statistics=False):
    model = nn.Sequential(nn.Linear(6, 8), Norm(8, dim, statistics), nn.Linear(8, 1))
    x = torch.randn(16, 6)
    return confirmed_ids(does_normalisation_help, evidence_of(model, lambda: model(x).pow(2).mean()))


@pytest.mark.parametrize("dim, statistics, found", [(0, False, True), (-1, False, False), (0, True, False)])
def test_a_norm_over_the_batch(dim, statistics, found):
    assert said(dim, statistics) == (["normalization-error/over-the-batch"] if found else [])


def test_a_loss_may_centre_its_batch():
    model, x = nn.Linear(6, 4), torch.randn(16, 6)

    def loss():
        z = model(x)
        z = (z - z.mean(0)) / z.std(0)
        return (z.T @ z / 16 - torch.eye(4)).pow(2).sum()

    assert not confirmed_ids(does_normalisation_help, evidence_of(model, loss))
