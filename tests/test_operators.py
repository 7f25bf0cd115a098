"""The kernels as torch.library operators: opcheck, and one graph under torch.compile."""

import pytest
import torch

from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.linear_cross_entropy import linear_cross_entropy

TARGETS = torch.tensor([1, 4, -100, 0])
NUMBERS = (-100, 0.1, 1e-3, 5.0)


def logits(requires_grad=True):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_(requires_grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_cross_entropy(reduction):
    mask = torch.tensor([True, True, True, False])
    torch.library.opcheck(
        torch.ops.gradproof.cross_entropy, (logits(), TARGETS, mask, torch.rand(5), *NUMBERS, reduction, True)
    )


def test_opcheck_in_place_and_scaling():
    arguments = (logits(False), TARGETS, None, None, *NUMBERS, "mean")
    torch.library.opcheck(torch.ops.gradproof.cross_entropy_, arguments)
    torch.library.opcheck(torch.ops.gradproof.scale_rows, (logits(False), torch.tensor(2.0)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_linear_cross_entropy(reduction):
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    arguments = (hidden, weight, TARGETS, None, None, *NUMBERS, reduction, False, True, True)
    torch.library.opcheck(torch.ops.gradproof.linear_cross_entropy, arguments)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_into_one_graph(in_place):
    def step(x):
        return cross_entropy(x * 2, TARGETS, label_smoothing=0.1, in_place=in_place)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    first, second = logits(), logits()
    loss, again = step(first), compiled(second)
    loss.backward()
    again.backward()
    assert torch.equal(loss, again) and torch.equal(first.grad, second.grad)


def test_linear_compiles_into_one_graph():
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))

    def gradients(function):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (3 * function(h, w, TARGETS)).backward()
        return h.grad, w.grad

    plain = gradients(linear_cross_entropy)
    compiled = gradients(torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_a_second_derivative_is_refused_not_wrong():
    x = logits()
    (dx,) = torch.autograd.grad(cross_entropy(x, TARGETS) * x.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.square().sum().backward()
