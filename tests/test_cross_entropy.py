"""cross_entropy against the float64 reference: every option, shape, dtype, mask, extreme and backend."""

import math

import pytest
import torch

from gradproof.errors import UserError
from gradproof.kernels import cross_entropy as module
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.reference import reference_loss_and_gradient
from gradproof.numerics.difference import difference
from gradproof.numerics.formats import ulp

INF, NAN = math.inf, math.nan


@pytest.fixture
def device(loss_device):
    return loss_device


def make(n, v, *, std=3.0, seed=0, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, v, generator=g) * std).to(dtype).to(device)
    return logits, torch.randint(0, v, (n,), generator=g).to(device)


def run(logits, targets, *, dloss=None, **options):
    """Loss and gradient of cross_entropy, from a poisoned heap as far as that can be done."""
    poison = torch.full_like(logits, NAN)
    del poison
    x = logits.detach().clone().requires_grad_()
    loss = cross_entropy(x, targets, **options)
    loss.backward(dloss)
    return loss.detach(), x.grad


def assert_right(logits, targets, *, mask=None, weight=None, loss_error=1e-6, gradient_error=2e-6, **options):
    loss, dx = run(logits, targets, mask=mask, weight=weight, **options)
    asked = LossOptions(**{**options, "softcap": options.get("softcap") or 0.0})
    exact, _, dexact = reference_loss_and_gradient(logits, targets, mask, weight, asked)
    found = difference(
        loss, exact.to(loss.dtype), relative=loss_error, absolute=torch.finfo(torch.float32).tiny
    )
    assert found.ok, f"loss: {found}"
    assert dx.dtype == logits.dtype and loss.dtype in (torch.float32, torch.float64)
    largest = dexact.abs().amax(1, keepdim=True)
    allowed = gradient_error * largest
    if dx.dtype in (torch.bfloat16, torch.float16):
        allowed = allowed + ulp(dexact, dx.dtype)
    found = difference(dx, dexact, absolute=allowed)
    assert found.ok, f"gradient: {found}"


SIZES = (1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2004, 8191, 8193)


@pytest.mark.parametrize("v", SIZES)
def test_every_vocabulary_size(v, device):
    assert_right(*make(3, v, seed=v, device=device))


@pytest.mark.parametrize("v", [50257, 65535, 65536, 65537, 131072])
def test_large_vocabularies(v, device):
    assert_right(*make(2, v, seed=v, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"softcap": 15.0}])
def test_dtypes_and_options(dtype, options, device):
    assert_right(*make(5, 301, dtype=dtype, device=device), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_options_at_once(reduction, device):
    logits, targets = make(9, 77, device=device)
    g = torch.Generator().manual_seed(3)
    mask = (torch.rand(9, generator=g) > 0.4).to(device)
    weight = torch.rand(77, generator=g).to(device)
    targets[2] = -100
    options = {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 9.0, "reduction": reduction}
    assert_right(logits, targets, mask=mask, weight=weight, gradient_error=4e-6, **options)


def test_reduction_none_takes_a_gradient_for_each_position(device):
    logits, targets = make(6, 50, device=device)
    dloss = torch.arange(6.0, device=device)
    losses, dx = run(logits, targets, dloss=dloss, reduction="none")
    exact, _, dexact = reference_loss_and_gradient(logits, targets, None, None, LossOptions(reduction="none"))
    assert difference(losses, exact, relative=1e-6).ok
    assert difference(dx, dexact * dloss[:, None], absolute=1e-5).ok


@pytest.mark.parametrize("gap", [0.0, 5.0, 15.0, 20.0, 25.3, 30.7, 47.1, 61.9, 80.0])
@pytest.mark.parametrize("offset", [0.0, 0.3, -33.3, 52.1, 1e4])
def test_a_confident_target_keeps_its_loss_and_gradient(gap, offset, device):
    logits, targets = make(4, 34, std=0.1, device=device)
    logits += offset
    logits[torch.arange(4), targets] = logits.amax(1) + gap
    assert_right(logits, targets, reduction="sum")


@pytest.mark.parametrize(
    "row",
    [
        [1e4, -1e4, 0.0, 5.0],
        [-INF, -INF, 2.0, 1.0],
        [0.0, 0.0, 0.0, 0.0],
        [1e-40, -1e-42, 0.0, 1e-45],
        [3e38, -3e38, 0.0, 1.0],
        [1e7, 1e7 - 1, 1e7 - 2, -1e7],
        [-INF, 0.0, -INF, -INF],
        [-1e30, -1e30, -1e30, -2e30],
    ],
)
@pytest.mark.parametrize("target", [0, 1, 2, 3])
def test_extreme_logits(row, target, device):
    logits = torch.tensor([row], device=device)
    targets = torch.tensor([target], device=device)
    assert_right(logits, targets, loss_error=1e-6, gradient_error=2e-6)


@pytest.mark.parametrize("row", [[INF, 0.0], [NAN, 0.0], [-INF, -INF]])
def test_rows_without_a_softmax_are_nan_and_stay_alone(row, device):
    logits = torch.tensor([row, [1.0, 2.0]], device=device)
    loss, dx = run(logits, torch.tensor([0, 1], device=device), reduction="sum")
    assert loss.isnan() and dx[0].isnan().any() and dx[1].isfinite().all()
    masked = run(logits, torch.tensor([0, 1], device=device), mask=torch.tensor([False, True], device=device))
    assert masked[0].isfinite() and masked[1][0].tolist() == [0.0, 0.0]


def test_masked_positions_contribute_nothing(device):
    logits, targets = make(8, 40, device=device)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool, device=device)
    loss, dx = run(logits, targets, mask=mask)
    alone, dalone = run(logits[mask], targets[mask])
    assert difference(loss, alone, relative=1e-7).ok
    assert torch.equal(dx[~mask], torch.zeros_like(dx[~mask]))
    assert difference(dx[mask], dalone, relative=1e-6).ok
    by_index, dby_index = run(logits, torch.where(mask, targets, -100))
    assert torch.equal(loss, by_index) and torch.equal(dx, dby_index)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_masked_is_zero_and_so_is_nothing_at_all(reduction, device):
    logits, targets = make(3, 7, device=device)
    mask = torch.zeros(3, dtype=torch.bool, device=device)
    loss, dx = run(logits, targets, mask=mask, reduction=reduction)
    assert loss == 0 and torch.equal(dx, torch.zeros_like(dx))
    loss, dx = run(logits[:0], targets[:0], reduction=reduction)
    assert loss == 0 and dx.shape == (0, 7)


def test_strided_logits_are_read_where_they_lie(device):
    wide, _ = make(8, 130, device=device)
    targets = torch.randint(0, 65, (2, 3), device=device)
    for logits in (
        wide.view(2, 4, 130)[:, :-1, :65],
        wide.view(2, 4, 130)[:, 1:, 1:66],
        wide.view(2, 4, 130)[:, :-1, ::2],
        wide.t().contiguous().t().view(2, 4, 130)[:, 1:, :65],
    ):
        x = logits.detach().requires_grad_()
        loss = cross_entropy(x, targets)
        loss.backward()
        flat, dflat = run(logits.reshape(-1, 65), targets.reshape(-1))
        assert difference(loss, flat, relative=1e-6).ok
        assert difference(x.grad.reshape(-1, 65), dflat, relative=1e-6).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_uses_the_logits_memory(dtype, device):
    logits, targets = make(5, 66, dtype=dtype, device=device)
    loss, dx = run(logits, targets)
    memory = logits.clone().requires_grad_()
    twice = memory * 1.0
    seen = []
    twice.register_hook(lambda g: seen.append(g.data_ptr()))
    again = cross_entropy(twice, targets, in_place=True)
    again.backward()
    assert torch.equal(loss, again) and torch.equal(memory.grad, dx)
    assert seen == [twice.data_ptr()]
    with pytest.raises((UserError, RuntimeError)):
        again.backward()


def test_a_gradient_of_16_bits_over_its_own_float32_logits(device):
    """Each row's gradient lies in the first half of the memory of its logits, as linear_cross_entropy has it."""
    n, v, stride = 6, 3001, 3008
    logits, targets = make(n, v, device=device)
    memory = torch.zeros(n, stride, device=device)
    memory[:, :v] = logits
    gradient = memory.view(torch.bfloat16)[:, :v]
    one = torch.ones((), dtype=torch.float64, device=device)
    options = LossOptions(reduction="none")
    losses, _ = module.backend_of(memory).losses_and_gradient(
        memory[:, :v], targets, None, None, options, one, gradient
    )
    exact, _, dexact = reference_loss_and_gradient(logits, targets, None, None, options)
    assert difference(losses, exact.float(), relative=1e-6).ok
    allowed = 2e-6 * dexact.abs().amax(1, keepdim=True) + ulp(dexact, torch.bfloat16)
    assert difference(gradient, dexact, absolute=allowed).ok


def test_in_place_is_refused_where_the_logits_are_needed(device):
    hidden, targets = make(5, 66, device=device)
    logits = torch.tanh(hidden.requires_grad_())  # keeps its result for its backward
    loss = cross_entropy(logits, targets, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rows_of_the_gradient_sum_to_zero(device):
    _, dx = run(*make(16, 999, device=device))
    assert dx.double().sum(1).abs().max() <= 4 * 2**-24 * dx.abs().max()  # exp, factor, product, target


def test_incoming_gradient_other_than_one_and_a_second_backward(device):
    logits, targets = make(4, 30, device=device)
    _, once = run(logits, targets)
    x = logits.requires_grad_()
    loss = cross_entropy(x, targets)
    (3 * loss).backward(retain_graph=True)
    assert difference(x.grad, 3 * once, relative=1e-6).ok
    (2 * loss).backward()
    assert difference(x.grad, 5 * once, relative=1e-6).ok


def test_two_runs_agree_bit_for_bit(device):
    logits, targets = make(16, 1025, device=device)
    first, second = run(logits, targets), run(logits, targets)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_lse_comes_back_when_asked_for(device):
    logits, targets = make(4, 30, device=device)
    _, lse = cross_entropy(logits, targets, return_lse=True)
    assert difference(lse, torch.logsumexp(logits.double(), 1), relative=1e-6).ok


def test_agrees_with_torch_on_what_torch_has(device):
    logits, targets = make(7, 90, device=device)
    weight = torch.rand(90, generator=torch.Generator().manual_seed(1)).to(device)
    targets[3] = -100
    ours = run(logits, targets, weight=weight, label_smoothing=0.1)
    x = logits.double().requires_grad_()
    theirs = torch.nn.functional.cross_entropy(x, targets, weight=weight.double(), label_smoothing=0.1)
    theirs.backward()
    assert difference(ours[0], theirs, relative=1e-6).ok
    assert difference(ours[1], x.grad, absolute=1e-7).ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits are torch.int64"),
        ({"logits": torch.zeros(2, 4)}, r"targets must have shape \(2,\)"),
        ({"logits": torch.zeros(3, 0)}, "the last dimension is the vocabulary"),
        ({"targets": torch.zeros(3)}, "targets are torch.float32"),
        (
            {"targets": torch.tensor([0, 4, 9])},
            r"target 4 at position \(1,\) is not one of the 4 .*; 2 of 3",
        ),
        ({"targets": torch.tensor([0, -1, 0])}, r"target -1 at position \(1,\)"),
        ({"mask": torch.ones(4)}, "mask has shape"),
        ({"weight": torch.ones(5)}, "weight has shape"),
        ({"reduction": "median"}, "reduction is 'median'"),
        ({"label_smoothing": 2.0}, "label_smoothing is 2.0"),
        ({"softcap": -1.0}, "softcap is -1.0"),
    ],
)
def test_bad_input_is_named(change, says):
    arguments = {"logits": torch.zeros(3, 4), "targets": torch.zeros(3, dtype=torch.int64)} | change
    with pytest.raises(UserError, match=says):
        cross_entropy(arguments.pop("logits"), arguments.pop("targets"), **arguments)


def test_masked_targets_may_be_anything(device):
    targets = torch.tensor([0, 10**9, -7], device=device)
    mask = torch.tensor([True, False, False], device=device)
    loss, dx = run(torch.zeros(3, 4, device=device), targets, mask=mask)
    assert loss.item() == pytest.approx(math.log(4)) and not dx[1:].any()
