"""An overflow at the end of a growth, one that an operation makes of ordinary numbers, a NaN of a step nobody saw."""

import pytest
import torch
from taped_trainings import evidence_of_step, examine, ids, plain_step
from torch import nn

from gradproof.experiments.numbers.nonfinite import where_was_it_born


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


def after_an_unseen_step(optimizer, distance, unseen, before=0.7, dtype=torch.float32):
    """What is said of the step after one that was not taped, in which `unseen` went on with the weights."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    made = optimizer(model.parameters())
    x = torch.randn(16, 4, dtype=dtype)
    step = plain_step(model, made, lambda: distance(model(x), model(x.flip(0))).mean())
    step()
    unseen(model)
    evidence = evidence_of_step(step, {"": model}, [made], number=9, losses=[0.9, 0.8, 0.8, before])
    return list(where_was_it_born(evidence))


def adam(parameters, eps=1e-8):
    return torch.optim.Adam(parameters, lr=1e-3, eps=eps)


def lost(model):
    with torch.no_grad():
        model.weight.fill_(float("nan"))


def root(a, b):
    return (a - b).square().sum(-1).sqrt()


def test_a_nan_of_a_backward_that_was_not_taped():
    (said,) = after_an_unseen_step(adam, root, lost)
    assert said.id == "backward-nonfinite/not-taped" and said.confidence == "likely"
    assert "test_nonfinite.py" in said.where and "sqrt at" in said.evidence[1]
    assert "--until 8" in said.fix  # the step before, whose gradients nobody saw


@pytest.mark.parametrize(
    "changed",
    [
        {"before": float("nan")},  # the loss was lost already: forward or backward, nobody knows
        {"before": 1e6},  # it had run away
        {"optimizer": lambda parameters: adam(parameters, eps=0.0)},  # 0 / 0 in the update
        {"dtype": torch.bfloat16},  # an update may overflow
    ],
)
def test_weights_that_were_lost_in_another_way_accuse_no_backward(changed):
    (said,) = after_an_unseen_step(**{"optimizer": adam, "distance": root, "unseen": lost, **changed})
    assert said.verdict == "undecided"


def test_after_a_good_step_nothing_is_said():
    assert not after_an_unseen_step(adam, lambda a, b: (a - b).abs().sum(-1), lambda model: None)
