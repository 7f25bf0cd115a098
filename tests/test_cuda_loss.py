"""The CUDA cross-entropy: its plan for any row on any machine, its results on a GPU that has clusters."""

from threading import Thread

import pytest
import torch

from gradproof.kernels import cuda_loss, torch_loss, triton_loss
from gradproof.kernels.cross_entropy import cross_entropy
from gradproof.kernels.cuda_loss import BLOCK_BYTES, plan_row
from gradproof.kernels.loss_options import LossOptions, valid_positions
from gradproof.kernels.reference import reference_loss_and_gradient
from gradproof.numerics.difference import difference

has_clusters = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
on_gpu = pytest.mark.skipif(not has_clusters, reason="needs a GPU with clusters of CTAs (Hopper, Blackwell)")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_plan_holds_the_whole_row_within_the_limits_of_the_gpu(size, aligned):
    for v in (2048, 4099, 32000, 50257, 65536, 100352, 128256, 151936, 200064, 262144, 300001, 500000):
        plan = plan_row(v, size, aligned)
        row = v * size + (0 if aligned else 16)
        assert plan.cluster * plan.blocks * BLOCK_BYTES >= row
        assert plan.cluster <= 16 and plan.threads <= 1024 and plan.threads % 32 == 0
        assert plan.ctas * (plan.shared_bytes + 2048) <= 228 * 1024
        assert plan.blocks <= plan.threads  # of a warp at most 32: it keeps a bit for each


def test_a_row_too_long_for_shared_memory_has_no_plan():
    assert plan_row(1_000_000, 4, True) is None


def make(n, v, dtype, seed=0):
    g = torch.Generator("cuda").manual_seed(seed + v)
    logits = (torch.randn(n, v, generator=g, device="cuda") * 3).to(dtype)
    targets = torch.randint(0, v, (n,), generator=g, device="cuda")
    targets[::5] = -100
    return logits, targets


def assert_right(logits, targets, mask=None, options=None, scale=1.0, out=None, stride=None):
    options = options or LossOptions(reduction="none")
    out = logits.dtype if out is None else out
    gradient = torch.full(logits.shape, torch.nan, dtype=out, device="cuda")
    if stride is not None:
        gradient = torch.full((len(logits), stride), torch.nan, dtype=out, device="cuda")[
            :, : logits.shape[1]
        ]
    assert cuda_loss.find_plan(logits, gradient, None, options) is not None
    times = torch.tensor(scale, dtype=torch.float64, device="cuda")
    losses, lses = triton_loss.losses_and_gradient(logits, targets, mask, None, options, times, gradient)
    exact, lse, dexact = reference_loss_and_gradient(logits, targets, mask, None, options)
    assert difference(losses, exact, relative=1e-6).ok
    valid = valid_positions(targets, mask, options.ignore_index)
    assert difference(lses, torch.where(valid, lse, 0), relative=1e-6, absolute=1e-6).ok
    largest = dexact.abs().amax(1, keepdim=True)
    digits = 2e-6 if out == torch.float32 else torch.finfo(out).eps
    allowed = abs(scale) * largest * digits + torch.finfo(out).tiny
    assert ((gradient.double() - scale * dexact).abs() <= allowed).all()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v", [4096, 32000, 50257, 65537, 128256, 151936, 262144])
def test_against_the_reference(dtype, v):
    assert_right(*make(7, v, dtype))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("v", [4099, 32000, 50257, 128256, 128257, 262144])
def test_a_cluster_that_does_several_rows_some_of_them_masked(v, dtype):
    n = 3000 if v < 10000 else 700
    logits, targets = make(n, v, dtype)
    mask = torch.arange(n, device="cuda") % 3 > 0
    mask[300:350] = False
    assert_right(logits, targets.int(), mask)


@on_gpu
@pytest.mark.parametrize("scale", [-0.25, 0.0, 3e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_scale_and_z_loss(scale, dtype):
    logits, targets = make(9, 50257, dtype)
    assert_right(logits, targets, options=LossOptions(reduction="none", z_loss=1e-3), scale=scale)


@on_gpu
def test_float32_logits_with_gradients_of_16_bits():
    logits, targets = make(600, 50257, torch.float32)
    padded = torch.zeros(600, 50304, device="cuda")
    padded[:, :50257] = logits
    assert_right(padded[:, :50257], targets, out=torch.bfloat16, stride=50304)


@on_gpu
def test_confident_targets_keep_their_digits():
    logits, targets = make(6, 128256, torch.float32)
    targets = targets.clamp_min(0)
    logits[torch.arange(6), targets] = torch.tensor([20.0, 30, 40, 50, 60, 80], device="cuda")
    assert_right(logits, targets)


@on_gpu
@pytest.mark.parametrize("size", [100.0, 5e3, 6.5e4, 3e5, 1e30, 4e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_any_size(dtype, size):
    """Up to differences that times log2(e) are beyond float32."""
    logits, targets = make(16, 32008, torch.float32)
    most = min(3e38, torch.finfo(dtype).max)
    assert_right((logits / 3 * size).clamp(-most, most).to(dtype), targets)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinities_and_nan_as_the_other_backends_have_them(dtype):
    logits, targets = make(8, 50257, dtype)
    targets = targets.clamp_min(0)
    logits[0, :40000] = -torch.inf
    logits[1] = -torch.inf
    logits[2] = -torch.inf
    logits[2, targets[2]] = 1.0
    logits[3, 17] = torch.inf
    logits[4, 50256] = torch.nan
    logits[5, targets[5]] = torch.nan
    logits[6, targets[6]] = -torch.inf
    one = torch.ones((), dtype=torch.float64)
    results = []
    for backend, device in ((triton_loss, "cuda"), (torch_loss, "cpu")):
        gradient = torch.empty(logits.shape, dtype=dtype, device=device)
        losses, _ = backend.losses_and_gradient(
            logits.to(device), targets.to(device), None, None, LossOptions(), one.to(device), gradient
        )
        results.append((losses.cpu(), gradient.cpu().float()))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-5, equal_nan=True)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-2, atol=1e-6, equal_nan=True)


@on_gpu
def test_in_place_and_twice_the_same_bits():
    logits, targets = make(1024, 128256, torch.bfloat16)
    one = torch.ones((), dtype=torch.float64, device="cuda")
    apart = torch.empty_like(logits)
    first, _ = triton_loss.losses_and_gradient(logits, targets, None, None, LossOptions(), one, apart)
    second, _ = triton_loss.losses_and_gradient(logits, targets, None, None, LossOptions(), one, logits)
    assert torch.equal(first, second) and torch.equal(apart, logits)


@on_gpu
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("v", [4096, 50257, 128256])
@pytest.mark.parametrize("n", [1, 3, 700])
def test_the_loss_in_three_launches(n, v, reduction):
    """Each launch waits for what the one before it leaves: stale memory would be seen."""
    logits, targets = make(n, v, torch.bfloat16)
    mask = torch.arange(n, device="cuda") % 4 != 1
    options = LossOptions(reduction=reduction)
    exact, lse, dexact = reference_loss_and_gradient(logits, targets, mask, None, options)
    for _ in range(3):
        gradient = torch.full_like(logits, torch.nan)
        torch.full((n,), torch.nan, device="cuda")  # what the next allocation finds
        loss, lses = cuda_loss.reduced_loss(logits, targets, mask, None, options, gradient)
        assert difference(loss, exact, relative=1e-6).ok
        valid = valid_positions(targets, mask, options.ignore_index)
        assert difference(lses, torch.where(valid, lse, 0), relative=1e-6, absolute=1e-6).ok
        allowed = dexact.abs().amax(1, keepdim=True) * 2**-8 + 1e-37
        assert ((gradient.double() - dexact).abs() <= allowed).all()


@on_gpu
@pytest.mark.parametrize("v", [32000, 50257])
def test_a_cuda_graph_replays_it_with_other_logits(v):
    logits, targets = make(500, v, torch.bfloat16)
    gradient = torch.empty_like(logits)

    def step(into):
        return cuda_loss.reduced_loss(logits, targets, None, None, LossOptions(), into)[0]

    step(gradient)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(gradient)
    for seed in (1, 2):
        logits.copy_(make(500, v, torch.bfloat16, seed)[0])
        gradient.fill_(torch.nan)
        graph.replay()
        again = torch.full_like(gradient, torch.nan)
        assert torch.equal(step(again), loss) and torch.equal(again, gradient)


@on_gpu
def test_no_position_at_all_counts():
    logits, _ = make(40, 50257, torch.float32)
    gradient = torch.full_like(logits, torch.nan)
    targets = torch.full((40,), -100, device="cuda")
    loss, lses = cuda_loss.reduced_loss(logits, targets, None, None, LossOptions(), gradient)
    assert loss == 0 and not lses.any() and not gradient.any()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, -2.5])
def test_a_gradient_is_scaled_entry_by_entry(dtype, scale):
    gradient = torch.randn(33, 1000, device="cuda").to(dtype)
    expected = (gradient.float() * scale).to(dtype)
    assert cuda_loss.scale_entries(gradient, torch.tensor(scale, device="cuda"))
    assert torch.equal(gradient, expected)


@on_gpu
def test_a_thread_that_has_not_used_the_gpu_yet():
    logits, targets = make(5, 50257, torch.bfloat16)
    found = []
    work = Thread(target=lambda: found.append(cross_entropy(logits, targets)))
    work.start()
    work.join()
    assert torch.equal(found[0], cross_entropy(logits, targets))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_than_the_current_device():
    logits, targets = (t.to("cuda:1") for t in make(5, 50257, torch.float32))
    loss = cross_entropy(logits.requires_grad_(), targets)
    loss.backward()
    assert loss.device == logits.device and torch.isfinite(logits.grad).all()
