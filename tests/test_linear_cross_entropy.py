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


@pytest.fixture(params=[(1, 1, False), (3, 7, False), (1000, 1000, False), (4, 9, True)], ids=str)
def rows_in_a_slab(request, monkeypatch):
    """Rows of logits, rows of their gradient, and whether those lie in the memory of dweight."""
    monkeypatch.setattr(module, "slab_rows", lambda *_: request.param)


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
    # what is left are half steps: dlogits, the product, and for fp16 the division that comes after it
    half_steps = 3 if dtype == torch.float16 else 2
    allowed = half_steps * torch.finfo(dtype).eps / 2
    assert_right(*make(n=200, dtype=dtype, device=device), allowed=allowed)


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


SLAB = 2**29
MANY = 10**6  # rows


@pytest.mark.parametrize("v", [50304, 128256, 262144])
def test_a_slab_is_bounded_and_not_small(v):
    rows, same, borrowed = slab_rows(MANY, 4 * v, SLAB, True, 10**6, 0)
    assert rows == same and not borrowed and 0.7 * SLAB <= rows * v * 4 <= SLAB
    rows, gradient_rows, borrowed = slab_rows(MANY, 4 * v, SLAB, False, 0, 0)
    assert not borrowed and 0.7 * SLAB <= v * (4 * rows + 2 * gradient_rows) <= SLAB
    rows, gradient_rows, borrowed = slab_rows(MANY, 4 * v, SLAB, False, 8192, 0)
    assert borrowed and gradient_rows == 8192 and rows * v * 4 <= SLAB


def test_all_gradients_are_kept_where_a_float32_sum_would_take_more_memory():
    assert slab_rows(8192, 4 * 128256, SLAB, False, 4096, 2 * 4096) == (1024, 8192, False)
    assert slab_rows(8193, 4 * 128256, SLAB, False, 4096, 2 * 4096) == (1024, 4096, True)


def test_a_row_longer_than_a_slab_is_a_slab():
    assert slab_rows(MANY, 4 * 10**9, SLAB, True, 0, 0) == (1, 1, False)
    assert slab_rows(MANY, 4 * 10**9, SLAB, False, 0, 0) == (1, 1, False)


def test_bad_input_is_named():
    hidden, weight, targets = make()
    with pytest.raises(UserError, match=r"they must be \(..., D\) and \(V, D\)"):
        linear_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(UserError, match="they must have one dtype"):
        linear_cross_entropy(hidden.double(), weight, targets)
    with pytest.raises(UserError, match=r"target 53 at position \(2,\)"):
        linear_cross_entropy(hidden, weight, targets.index_fill(0, torch.tensor([2]), 53))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_weight_changes_nothing(dtype, rows_in_a_slab, monkeypatch):
    """On a GPU odd vocabularies are padded with rows of zeros; here they are, too."""
    monkeypatch.setattr(module, "_padded", lambda weight: torch.nn.functional.pad(weight, (0, 0, 0, 11)))
    assert_right(*make(dtype=dtype), allowed=1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
    hidden, weight, targets = make(dtype=dtype)
    linear_cross_entropy(hidden[:0], weight, targets[:0]).backward()
    assert not weight.grad.any()
