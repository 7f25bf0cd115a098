"""eval() left on, and dropout that keeps too little, against models whose modes are right or frozen on purpose."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.modes import is_it_in_train_mode


def network(p=0.2):
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 1))


def verdicts(model, experiment=is_it_in_train_mode):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x = torch.randn(12, 6)
    return examine(experiment, model, optimizer, plain_step(model, optimizer, lambda: model(x).pow(2).mean()))


def test_eval_left_on_is_confirmed_with_the_line_of_eval():
    model = network().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(12, 6)
    facts = {"eval_line": "train.py:7"}
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    found = examine(is_it_in_train_mode, model, optimizer, step, facts=facts)
    assert ids(found) == {"train-eval-mode-error/eval-left-on"} and "train.py:7" in found[0].where


def test_part_left_in_eval_mode_is_named():
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(1, 1)})
    model["body"].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(12, 6)
    step = plain_step(model, optimizer, lambda: model["head"](model["body"](x)).pow(2).mean())
    found = examine(is_it_in_train_mode, model, optimizer, step)
    assert found[0].where == "body"


def frozen_norms():
    model = network()
    model[1].eval()
    return model


def frozen_body():
    model = network()
    model[:4].eval().requires_grad_(False)
    for module in model[:4]:
        module.eval()
    return model


@pytest.mark.parametrize(
    "make",
    [network, frozen_norms, frozen_body, lambda: nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 1)).eval()],
)
def test_right_modes_are_silent(make):
    assert not ids(verdicts(make()))


def test_dropout_that_keeps_a_tenth():
    found = verdicts(network(0.9), is_it_in_train_mode)
    assert ids(found, "problem") == {"train-eval-mode-error/keep-probability"} and "3" in found[0].where


def test_usual_dropout_is_silent():
    assert not ids(verdicts(network(0.5), is_it_in_train_mode))


def test_a_body_that_was_trained_and_then_frozen():
    """Its gradients and its first optimizer are still there; only the new head is trained."""
    body, x = network(), torch.randn(12, 6)
    first = torch.optim.SGD(body.parameters(), lr=0.01)
    plain_step(body, first, lambda: body(x).pow(2).mean())()
    body.requires_grad_(False).eval()
    model = nn.ModuleDict({"body": body, "head": nn.Linear(1, 1)})
    second = torch.optim.SGD(model["head"].parameters(), lr=0.01)
    step = plain_step(model["head"], second, lambda: model["head"](body(x)).pow(2).mean())
    assert not ids(examine(is_it_in_train_mode, model, [first, second], step))
