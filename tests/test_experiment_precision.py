"""Updates and averages that bfloat16 swallows, gradients that float16 flushes to zero; float32 loses neither."""

import copy

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.nonfinite import where_was_it_born
from gradproof.experiments.precision import is_it_precision


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.parametrize("dtype, lost", [(torch.bfloat16, True), (torch.float32, False)])
def test_small_steps_of_half_precision_weights(dtype, lost):
    model = network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    x = torch.randn(16, 8).to(dtype)
    found = examine(
        is_it_precision, model, optimizer, plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    )
    assert ids(found) == ({"low-precision-error/lost-updates"} if lost else set())


@pytest.mark.parametrize("dtype, lost", [(torch.bfloat16, True), (torch.float32, False)])
def test_average_kept_in_half_precision(dtype, lost):
    model = network()
    average = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(16, 8)
    train = plain_step(model, optimizer, lambda: model(x).pow(2).mean())

    def step():
        loss = train()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.add_((fast - slow).to(dtype), alpha=1e-3)
        return loss

    found = examine(is_it_precision, model, optimizer, step)
    assert ids(found) == ({"low-precision-error/lost-updates"} if lost else set())
    assert not lost or "test_experiment_precision.py" in found[-1].where


@pytest.mark.parametrize("scale, lost", [(1e-7, True), (1.0, False)])
def test_gradients_below_the_smallest_float16(scale, lost):
    model = network().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(16, 8).half()
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean() * scale)
    assert ("low-precision-error/underflow" in ids(examine(is_it_precision, model, optimizer, step))) == lost


@pytest.mark.parametrize("dtype, bad", [(torch.float16, True), (torch.float32, False)])
def test_adam_divides_by_an_epsilon_that_half_precision_rounds_to_zero(dtype, bad):
    model = network().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = (1e-4 * torch.randn(16, 8)).to(dtype)
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    found = examine(where_was_it_born, model, optimizer, step, steps=1)
    assert ids(found) == ({"low-precision-error/optimizer-in-half"} if bad else set())
