"""The noise that a stock nn.RReLU draws into a buffer of its own is no memory that nobody wrote."""

import pytest
import tape_faults
import torch
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.gradients.gradient import is_the_gradient_right


def found_of(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 1))
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    evidence = evidence_of(model, lambda: (model(x) - y).square().mean())
    return confirmed_ids(is_the_gradient_right, evidence)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_stock_rrelu_is_no_false_alarm(inplace, training):
    assert found_of(nn.RReLU(inplace=inplace).train(training)) == []


def test_a_buffer_that_is_not_written_whole_is_named():
    assert found_of(tape_faults.Apply(tape_faults.GeluTailUnwritten)) == ["aliasing-or-inplace/never-written"]
