"""linear_cross_entropy against the float64 formula and against cross_entropy, slab by slab."""

import pytest
import torch

from gradproof.errors import UserError
from gradproof.kernels import linear_cross_entropy as module
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.linear_cross_entropy import linear_cross_entropy, slab_rows
from gradproof.numerics.difference import difference


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[1, 7, 1000])
def rows_in_a_slab(request, monkeypatch):
    monkeypatch.setattr(module, "slab_rows", lambda v, dtype, want_gradient: request.param)


def make(n=20, d=16, v=53, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, d, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=g) / 2).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), generator=g).to(device)


def exact(hidden, weight, targets, dloss=None, class_weight=None, **options):
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = cross_entropy(h @ w.T, targets, weight=class_weight, **options)
    loss.backward(dloss)
    return loss.detach(), h.grad, w.grad


def assert_right(hidden, weight, targets, dloss=None, allowed=1e-6, **options):
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    loss.backward(dloss)
    loss_exact, dh, dw = exact(hidden, weight, targets, None if dloss is None else dloss.double(), **options)
    assert difference(loss, loss_exact, relative=1e-6).ok
    for got, want in ((hidden.grad, dh), (weight.grad, dw)):
        found = difference(got, want, absolute=allowed * want.abs().max())
        assert found.ok, str(found)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_slabs_add_up(options, device, rows_in_a_slab):
    assert_right(*make(device=device), **options)


def test_all_options_in_slabs(device, rows_in_a_slab):
    hidden, weight, targets = make(device=device)
    mask = torch.arange(20, device=device) % 3 > 0
    targets[4] = -100
    class_weight = torch.linspace(0.5, 2, 53, device=device)
    assert_right(hidden, weight, targets, mask=mask, class_weight=class_weight, softcap=4.0, allowed=2e-6)


def test_reduction_none_gets_its_gradients_in_backward(device, rows_in_a_slab):
    dloss = torch.linspace(-1, 2, 20, device=device)
    assert_right(*make(device=device), dloss=dloss, reduction="none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_float32_logits_and_sums(dtype, device, rows_in_a_slab):
    # what is left is the rounding of dlogits and of the result: two half steps
    assert_right(*make(n=200, dtype=dtype, device=device), allowed=torch.finfo(dtype).eps)


def test_float16_does_not_underflow_with_many_positions(device):
    hidden, weight, targets = make(n=4096, v=999, dtype=torch.float16, device=device)
    linear_cross_entropy(hidden, weight, targets).backward()
    _, dh, _ = exact(hidden, weight, targets)
    found = difference(hidden.grad, dh, absolute=2e-3 * dh.abs().max() + 6e-8)
    assert found.ok, str(found)


def test_leading_dimensions_and_scaled_and_second_backward(device):
    hidden, weight, targets = make(device=device)
    shaped = hidden.detach().view(4, 5, 16).requires_grad_()
    loss, lse = linear_cross_entropy(shaped, weight, targets.view(4, 5), return_lse=True)
    assert lse.shape == (4, 5)
    (2 * loss).backward(retain_graph=True)
    (1 * loss).backward()
    _, dh, dw = exact(hidden, weight, targets)
    assert difference(shaped.grad.view(20, 16), 3 * dh, absolute=1e-6).ok
    assert difference(weight.grad, 3 * dw, absolute=1e-6).ok


def test_only_the_gradients_that_are_wanted(device):
    hidden, weight, targets = make(device=device)
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    assert hidden.grad is not None
    linear_cross_entropy(hidden.detach(), weight, targets).backward()
    assert difference(weight.grad, exact(hidden, weight, targets)[2], absolute=1e-6).ok
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).grad_fn is None


def test_empty_batch_and_all_masked(device):
    hidden, weight, targets = make(device=device)
    loss = linear_cross_entropy(hidden[:0], weight, targets[:0])
    loss.backward()
    assert loss == 0 and not weight.grad.any()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0 and not hidden.grad.any()


def test_a_slab_is_bounded():
    for v in (50257, 128256, 262144):
        for dtype, size in ((torch.bfloat16, 6), (torch.float32, 4), (torch.float64, 8)):
            assert 0.7 * 2**29 <= slab_rows(v, dtype, True) * v * size <= 2**29
    assert slab_rows(10**9, torch.float32, True) == 1


def test_bad_input_is_named():
    hidden, weight, targets = make()
    with pytest.raises(UserError, match=r"they must be \(..., D\) and \(V, D\)"):
        linear_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(UserError, match="they must have one dtype"):
        linear_cross_entropy(hidden.double(), weight, targets)
    with pytest.raises(UserError, match=r"target 53 at position \(2,\)"):
        linear_cross_entropy(hidden, weight, targets.index_fill(0, torch.tensor([2]), 53))
