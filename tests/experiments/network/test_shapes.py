"""A column against a row in the loss is found; pairs that are meant are not."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.shapes import do_shapes_meet

X, Y = torch.randn(12, 5), torch.randn(12)
LOSSES = {
    "by hand": lambda p, y: ((p - y) ** 2).mean(),
    "mse": F.mse_loss,
    "smooth": F.smooth_l1_loss,
    "weighted": lambda p, y: (p * y).mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_column_against_a_row(loss):
    model = nn.Linear(5, 1)
    evidence = evidence_of(model, lambda: LOSSES[loss](model(X), Y))
    (verdict,) = do_shapes_meet(evidence)
    assert verdict.id == "axis-or-shape-error/broadcast-into-the-loss"
    assert "12" in verdict.evidence[0] and "test_shapes.py" in verdict.where


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_shapes_are_well(loss):
    model = nn.Linear(5, 1)
    assert not confirmed_ids(do_shapes_meet, evidence_of(model, lambda: LOSSES[loss](model(X).squeeze(1), Y)))


def test_all_pairs_on_purpose():
    model = nn.Linear(5, 1)

    def ranking():
        s = model(X).squeeze(1)
        return F.softplus(s[:, None] - s[None, :]).mean() + F.softplus(s[:, None] - s).mean()

    def quantiles():
        q = nn.functional.pad(model(X), (0, 11))
        return (Y.expand(12, 12)[:, None, :] - q[:, :, None]).abs().mean()

    def distances():
        z = model(X)
        squares = z.pow(2).sum(1, keepdim=True)
        return (squares + squares.squeeze(1) - 2 * z @ z.T).exp().neg().mean()

    for make_loss in (ranking, quantiles, distances):
        assert not confirmed_ids(do_shapes_meet, evidence_of(model, make_loss))


def test_two_predictions_of_one_sample_that_meet_all_others():
    """A residual of derivatives, a column less a row; and two heads of which one was squeezed."""
    model, heads, points = (
        nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
        nn.Linear(5, 2),
        torch.rand(12, 2),
    )

    def residual(second):
        at = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), at, create_graph=True)
        return (slope[:, 1:2] - 0.1 * second(bend)).pow(2).mean()

    def of_heads(squeeze):
        score, value = heads(X).split(1, 1)
        return (score - value.squeeze(squeeze)).pow(2).mean()

    wrong = ["axis-or-shape-error/broadcast-into-the-loss"]
    assert confirmed_ids(do_shapes_meet, evidence_of(model, lambda: residual(lambda b: b[:, 0]))) == wrong
    assert confirmed_ids(do_shapes_meet, evidence_of(model, lambda: residual(lambda b: b[:, :1]))) == []
    assert confirmed_ids(do_shapes_meet, evidence_of(heads, lambda: of_heads(1))) == wrong
    assert confirmed_ids(do_shapes_meet, evidence_of(heads, lambda: of_heads(0))) == []


@pytest.mark.parametrize("axis, ids", [(0, ["axis-or-shape-error/over-the-batch"]), (1, [])])
def test_a_mixture_summed_over_the_batch(axis, ids):
    model, x = nn.Linear(3, 5), torch.randn(16, 3)
    evidence = evidence_of(model, lambda: -model(x).logsumexp(axis).mean())
    assert confirmed_ids(do_shapes_meet, evidence) == ids


def test_all_pairs_may_be_summed_both_ways():
    model, x = nn.Linear(3, 4), torch.randn(16, 3)

    def loss():
        pairs = model(x) @ model(x).T
        return pairs.logsumexp(0).mean() + pairs.logsumexp(1).mean()

    assert not confirmed_ids(do_shapes_meet, evidence_of(model, loss))
