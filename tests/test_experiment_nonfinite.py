"""An overflow at the end of a growth, and one that an operation makes of ordinary numbers."""

import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.nonfinite import where_was_it_born


def train(lr, last):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(64, 8)
    step = plain_step(model, optimizer, lambda: last(model(x) - x))
    return examine(where_was_it_born, model, optimizer, step, steps=6)


def test_weights_that_grew_until_a_product_overflowed():
    said = train(1e8, lambda error: error.square().sum())
    assert ids(said, "note") == {"forward-nonfinite/pow"}
    assert ids(said, "problem") == {"lr-too-high/diverged"}
    assert "after" in next(v for v in said if v.family == "lr-too-high").evidence[0]


def test_an_operation_that_overflows_by_itself():
    said = train(1e-3, lambda error: (100 * error.abs()).exp().mean())
    assert ids(said, "problem") == {"forward-nonfinite/exp"}


def test_numbers_that_stay_finite():
    assert not train(1e-3, lambda error: error.square().mean())
