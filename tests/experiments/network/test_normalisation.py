"""BatchNorm of two samples, statistics that never move, an ε above the variance; and norms that do their work."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.normalisation import does_normalisation_help
from gradproof.experiments.network.shapes import do_shapes_meet


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


@pytest.mark.parametrize(
    "momentum, spread, hasty", [(0.99, 1.0, True), (0.9, 1.0, True), (0.99, 0.0, False), (0.1, 1.0, False)]
)
def test_running_statistics_of_the_last_batch_alone(momentum, spread, hasty):
    """They are of one batch, which hurts where batches are not alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=momentum), nn.Linear(6, 1))

    def batch():
        return torch.randn(256, 6) + spread * torch.randn(6)

    for _ in range(20):
        model(batch())
    evidence = evidence_of(model, lambda: model(batch()).pow(2).mean(), step=20)
    found = confirmed_ids(does_normalisation_help, evidence)
    assert found == (["normalization-error/running-statistics-of-one-batch"] if hasty else [])


@pytest.mark.parametrize("norm, batch, alone", [(nn.BatchNorm2d, 1, True), (nn.InstanceNorm2d, 4, False)])
def test_one_sample_at_a_time_is_not_each_sample_by_itself(norm, batch, alone):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU())
    x = torch.randn(batch, 3, 9, 9)
    found = confirmed_ids(does_normalisation_help, evidence_of(model, lambda: model(x).pow(2).mean()))
    assert found == (["normalization-error/one-sample"] if alone else [])


class Rescaled(nn.Module):
    """What the layer puts out is brought to the size of its input, as one stage of a cascade does it."""

    def __init__(self, shrink, limit=None):
        super().__init__()
        self.layer, self.limit = nn.Linear(8, 8), limit
        nn.init.normal_(self.layer.weight, std=shrink)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        out = self.layer(x)
        factor = x.pow(2).mean(-1, keepdim=True).sqrt() / out.pow(2).mean(-1, keepdim=True).sqrt()
        return out * (factor if self.limit is None else factor.clamp(max=self.limit))


@pytest.mark.parametrize("shrink, limit, found", [(1e-6, None, True), (1e-6, 2.0, False), (0.3, None, False)])
def test_a_rescaling_without_a_limit(shrink, limit, found):
    model, x = Rescaled(shrink, limit), torch.randn(16, 8)
    evidence = evidence_of(model, lambda: (model(x) - x).pow(2).mean())
    said = list(does_normalisation_help(evidence))
    assert [v.id for v in said] == (["normalization-error/unbounded-rescale"] if found else [])
    assert all(v.if_troubled and "test_normalisation.py" in v.where for v in said)


@pytest.mark.parametrize("dim, found", [(0, True), (1, False)])
def test_vectors_brought_to_length_one_along_the_batch(dim, found):
    model, x = nn.Linear(8, 4), torch.randn(16, 8)

    def loss():
        z = nn.functional.normalize(model(x), dim=dim)
        return (z @ z.T).logsumexp(1).mean()

    ids = [v.id for v in do_shapes_meet(evidence_of(model, loss))]
    assert ids == (["axis-or-shape-error/normalised-over-the-batch"] if found else [])


def test_weights_may_be_normalised_along_any_axis():
    model, x = nn.Linear(16, 16), torch.randn(16, 16)

    def loss():
        return nn.functional.linear(x, nn.functional.normalize(model.weight, dim=0)).pow(2).mean()

    assert not list(do_shapes_meet(evidence_of(model, loss)))


@pytest.mark.parametrize("samples", [1, 4])
def test_batchnorm_of_one_image(samples):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 1))
    x = torch.randn(samples, 1, 8, 8)
    found = list(does_normalisation_help(evidence_of(model, lambda: model(x).pow(2).mean())))
    wanted = [("normalization-error/one-sample", "warning")] if samples == 1 else []
    assert [(v.id, v.level) for v in found] == wanted
