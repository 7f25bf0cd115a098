"""linear_cross_entropy against the float64 formula and against cross_entropy, slab by slab."""

import pytest
import torch

from gradproof.errors import UserError
from gradproof.kernels import linear_cross_entropy as module
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.linear_by_columns import columns_of_a_slab
from gradproof.kernels.linear_cross_entropy import Slabs, linear_cross_entropy, slabs_of_16_bits
from gradproof.numerics.difference import difference


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


SLABS = [(1, 1, "logits"), (3, 7, "apart"), (1000, 1000, "logits"), (6, 6, "logits"), (4, 9, "dweight")]


@pytest.fixture(params=SLABS, ids=str)
def rows_in_a_slab(request, monkeypatch):
    """Slabs of few rows, the gradients of 16 bits wherever they can lie."""
    rows, gradient_rows, where = request.param

    def choose(n, v, weight, dhidden, dweight):
        same = weight.element_size() >= 4 or dhidden is dweight is None
        nowhere = where == "dweight" and (dweight is None or dweight.numel() < gradient_rows * len(weight))
        place = "logits" if same else "apart" if nowhere else where
        count = rows if place == "logits" else gradient_rows
        return Slabs(max(1, min(rows, n)), max(1, min(count, n)), place)

    monkeypatch.setattr(module, "_choose_slabs", choose)


def make(n=20, d=16, v=53, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, d, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=g) / 2).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (n,), generator=g).to(device)


def exact(hidden, weight, targets, dloss=None, class_weight=None, least_memory=False, **options):
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = cross_entropy(h @ w.T, targets, weight=class_weight, **options)
    loss.backward(dloss)
    return loss.detach(), h.grad, w.grad


def assert_right(hidden, weight, targets, dloss=None, allowed=1e-6, loss_allowed=1e-6, **options):
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    loss.backward(dloss)
    loss_exact, dh, dw = exact(hidden, weight, targets, None if dloss is None else dloss.double(), **options)
    assert difference(loss, loss_exact, relative=loss_allowed).ok
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


def test_gradients_to_come_lend_their_memory_to_logits(device, monkeypatch):
    """One row of logits, and 128 more wherever 256 rows of gradients are still to come."""
    lent, real = [], module._lend
    monkeypatch.setattr(module, "_choose_slabs", lambda *_: Slabs(1, 450, "apart"))
    monkeypatch.setattr(module, "_lend", lambda *a: lent.append(len(real(*a))) or real(*a))
    data = make(n=450, d=8, v=64, dtype=torch.bfloat16, device=device)
    assert_right(*data, allowed=torch.finfo(torch.bfloat16).eps)
    assert lent[0] == 128 and lent[-1] == 1


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
    over = slabs_of_16_bits(MANY, 4 * v, SLAB, 0, 0, SLAB // 4)
    assert over.where == "logits" and over.rows == over.gradient_rows
    assert 0.7 * SLAB <= over.rows * v * 4 + SLAB // 4 <= SLAB
    lent = slabs_of_16_bits(MANY, 4 * v, SLAB, 8192, 0, 8192 * v * 4)
    assert lent.where == "dweight" and lent.gradient_rows == 8192 and 0.7 * SLAB <= lent.rows * v * 4 <= SLAB


def test_gradients_that_all_fit_beside_a_few_logits_are_kept():
    kept = slabs_of_16_bits(2048, 4 * 50304, SLAB, 0, 0, SLAB)
    assert kept.where == "apart" and kept.gradient_rows >= 2048
    assert 50304 * (4 * kept.rows + 2 * kept.gradient_rows) <= SLAB


def test_all_gradients_are_kept_where_a_float32_sum_would_take_more_memory():
    total = 4 * 128256 * 4096
    assert slabs_of_16_bits(8192, 4 * 128256, SLAB, 4096, 8192, total) == Slabs(1024, 8192, "apart")
    assert slabs_of_16_bits(8193, 4 * 128256, SLAB, 4096, 8192, total) == Slabs(1024, 4096, "dweight")


def test_a_row_longer_than_a_slab_is_a_slab():
    assert slabs_of_16_bits(MANY, 4 * 10**9, SLAB, 0, 0, 0) == Slabs(1, 1, "logits")


@pytest.mark.parametrize(("n", "d"), [(8192, 4096), (4096, 2304), (16384, 1024)])
def test_a_slab_of_columns_is_bounded_and_not_small(n, d):
    columns = columns_of_a_slab(n, d, SLAB)
    assert columns % 64 == 0 and 0.95 * SLAB <= 6 * n * (columns + 64) + 4 * n * d <= 63 / 64 * SLAB


@pytest.fixture
def columns(monkeypatch):
    """Slabs of 64 columns, and how often they were taken."""
    taken = []
    monkeypatch.setattr(module, "SLAB_BYTES", 1)
    real = module.by_columns
    monkeypatch.setattr(module, "by_columns", lambda *a: taken.append(1) or real(*a))
    return taken


@pytest.mark.parametrize("v", [53, 64, 400])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"z_loss": 1e-3}])
def test_the_least_memory_gives_the_same(options, v, device, columns):
    data = make(n=50, v=v, dtype=torch.bfloat16, device=device)
    assert_right(*data, allowed=torch.finfo(torch.bfloat16).eps, least_memory=True, **options)
    assert columns


def test_the_least_memory_with_masks_weights_and_every_position_its_own_gradient(device, columns):
    hidden, weight, targets = make(n=50, v=200, dtype=torch.bfloat16, device=device)
    targets[4] = 7
    weights = torch.linspace(0.5, 2, 200, device=device)
    options = {"mask": torch.arange(50, device=device) % 3 > 0, "class_weight": weights, "ignore_index": 7}
    allowed = torch.finfo(torch.bfloat16).eps
    assert_right(hidden, weight, targets.int(), allowed=allowed, least_memory=True, **options)
    dloss = torch.linspace(-1, 2, 50, device=device)
    hidden.grad = weight.grad = None
    assert_right(hidden, weight, targets, dloss, allowed, reduction="none", least_memory=True, **options)
    assert len(columns) == 2


def test_the_least_memory_keeps_a_confident_target_and_its_rest(device, columns):
    hidden, weight, _ = make(n=4, d=64, v=300, dtype=torch.bfloat16, device=device)
    targets = torch.tensor([3, 100, 200, 299], device=device)
    with torch.no_grad():
        hidden.copy_(weight[targets] * torch.tensor([[1.0], [2], [4], [8]], device=device))
    allowed = torch.finfo(torch.bfloat16).eps
    tight = 1e-5  # the loss is 1e-5, of logits up to 50: so much is what a float32 product rounds
    assert_right(hidden, weight, targets, None, allowed, tight, reduction="sum", least_memory=True)


def test_where_slabs_of_rows_need_no_more_they_are_taken(device, monkeypatch):
    monkeypatch.setattr(module, "by_columns", None)
    for dtype in (torch.bfloat16, torch.float32):
        linear_cross_entropy(*make(dtype=dtype, device=device), least_memory=True).backward()


def test_bad_input_is_named():
    hidden, weight, targets = make()
    with pytest.raises(UserError, match="goes with neither label_smoothing nor softcap"):
        linear_cross_entropy(hidden, weight, targets, softcap=30.0, least_memory=True)
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
