"""Layers that return how much they stretch space: measured, against what they say."""

import math

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.losses.logarithms import are_logarithms_where_they_are_wanted
from gradproof.instruments.volume import find_stretches

X = torch.randn(12, 4)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([0.5, -0.2, 0.9, 0.1]))

    def forward(self, x):
        return x * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    """Half of the features are scaled and shifted by what is made of the other half."""

    def __init__(self, slip=""):
        super().__init__()
        self.net, self.slip = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4)), slip

    def forward(self, x):
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        said = {"sign": -s.sum(1), "mean": s.mean(1), "": s.sum(1)}[self.slip]
        return torch.cat([b * s.exp() + t, a], 1), said


class Gate(nn.Module):
    """Returns a number for each sample that is none of this kind: what it costs to be open."""

    def __init__(self):
        super().__init__()
        self.open = nn.Linear(4, 4)

    def forward(self, x):
        gate = self.open(x).sigmoid()
        return x * gate, gate.mean(1)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, said = layer(x)
            total = total + said
        return x, total


def density(model, way=1.0):
    def loss():
        z, stretched = model(X)
        return (0.5 * z.square().sum(1) + 2 * math.log(2 * math.pi) - way * stretched).mean()

    return evidence_of(model, loss)


def test_a_scale_stretches_by_what_it_says():
    (stretch,) = find_stretches(density(Scale()))
    assert stretch.sign == 1 and stretch.measured.tolist() == pytest.approx([1.3] * len(X), rel=1e-5)


@pytest.mark.parametrize(
    ("layers", "way", "kind"),
    [
        ((Coupling(), Scale(), Coupling()), 1.0, ""),
        ((Coupling("sign"),), -1.0, ""),  # told as that of the inverse, and added
        ((Gate(), nn.Identity()), 1.0, ""),
        ((Scale(), Coupling("sign")), 1.0, "Coupling"),
        ((Coupling(), Scale()), -1.0, "Scale"),
        ((Scale(), Coupling("mean")), 1.0, "Coupling"),
    ],
)
def test_what_a_flow_adds_up(layers, way, kind):
    model = Stack(*layers) if not isinstance(layers[-1], nn.Identity) else layers[0]
    evidence = density(model, way)
    assert confirmed_ids(are_logarithms_where_they_are_wanted, evidence) == (
        ["loss-scale-or-sign/log-determinant"] if kind else []
    )
    if kind:
        (found,) = are_logarithms_where_they_are_wanted(evidence)
        assert found.evidence[0].startswith(f"{kind} returns") and "test_volume.py" in found.where
