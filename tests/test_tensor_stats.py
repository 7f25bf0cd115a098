"""tensor_stats against Python's own exact sums, over every kind of tensor a model can have."""

import math

import numpy as np
import pytest
import torch

from gradproof.errors import UserError
from gradproof.kernels.tensor_stats import (
    CHUNK,
    COLUMNS,
    SMALL,
    exponent_histogram,
    look_closely,
    tensor_stats,
)

NAN, INF = math.nan, math.inf
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_hand(tensor, tiny):
    """The row that COLUMNS promises, by Python floats."""
    numbers = tensor.double().flatten().tolist()
    finite = [x for x in numbers if math.isfinite(x)]
    sizes = [abs(x) for x in finite]
    return [
        len(numbers),
        sum(map(math.isnan, numbers)),
        sum(map(math.isinf, numbers)),
        numbers.count(0.0),
        sum(0 < x < tiny for x in sizes),
        min(finite, default=0.0),
        max(finite, default=0.0),
        max(sizes, default=0.0),
        math.fsum(finite),
        math.fsum(x * x for x in finite),
        *(sum(x > limit for x in sizes) for limit in (65504.0, 3.3895313892515355e38, 448.0)),
    ]


def assert_row_is_right(row, tensor, tiny):
    expected = by_hand(tensor, tiny)
    magnitudes = math.fsum(abs(x) for x in tensor.double().flatten().tolist() if math.isfinite(x))
    for name, got, want in zip(COLUMNS, row.tolist(), expected, strict=True):
        allowed = {"sum": 1e-7 * magnitudes, "sumsq": 1e-7 * want}.get(name, 0.0)
        assert abs(got - want) <= allowed, (name, got, want)


SPECIAL = {
    "one": [1.5],
    "all nan": [NAN] * 5,
    "nan and inf": [NAN, INF, -INF, -2.0, 3.0],
    "zeros": [0.0, -0.0, 1.0, -1.0],
    "subnormal": [1e-40, -1e-45, 1.2e-38, 0.0, 1.0],
    "too small to square": [1e-25, -2e-25, 3e-30],
    "too large to square": [1e30, -3e30, 1e-3],
    "over": [449.0, 65505.0, 3.4e38, -1e5, 448.0, 65504.0],
}


@pytest.mark.parametrize("size", [1, SMALL // 7, SMALL + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_at_every_size(name, size):
    numbers = SPECIAL[name]
    x = torch.tensor(numbers).repeat(-(-size // len(numbers)))[: max(size, len(numbers))]
    assert_row_is_right(tensor_stats([x])[0], x, 1.1754943508222875e-38)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, SMALL + 5])
def test_dtypes_have_their_own_subnormals(dtype, size):
    tiny = torch.finfo(dtype).tiny
    x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    x[3:5] = torch.tensor([tiny / 2, tiny])
    x = x.to(dtype)
    assert_row_is_right(tensor_stats([x])[0], x, tiny)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_a_mix_of_tensors_keeps_its_order():
    torch.manual_seed(0)
    wide = torch.randn(60, 70)
    index = torch.tensor([[0, 2]])
    mixed = [
        torch.randn(3, 4),
        torch.empty(0),
        wide.t(),
        wide[:, ::2],
        torch.randn(1).expand(9),
        torch.arange(-3, 9),
        torch.tensor([True, False]),
        torch.randn(3, 4),
        torch.randn(5, dtype=torch.complex64),
        torch.sparse_coo_tensor(index, torch.tensor([1.0, -2.0]), (4,), check_invariants=False),
        torch.tensor(2.5, requires_grad=True),
    ]
    rows = tensor_stats(mixed)
    dense = [t.detach() for t in mixed]
    dense[8] = torch.view_as_real(mixed[8])
    dense[9] = torch.tensor([1.0, -2.0])
    for row, tensor in zip(rows, dense, strict=True):
        assert_row_is_right(row, tensor, 1.1754943508222875e-38)


def test_a_local_shard_stands_for_its_dtensor():
    class Sharded(torch.Tensor):
        def to_local(self):
            return torch.ones(3)

    assert tensor_stats([torch.zeros(9).as_subclass(Sharded)])[0, :4].tolist() == [3, 0, 0, 0]


def test_sums_stay_accurate_where_sequential_float32_does_not():
    x = torch.full((3_000_000,), 0.1)
    row = dict(zip(COLUMNS, tensor_stats([x])[0].tolist(), strict=True))
    exact = 3_000_000 * x[0].item() ** 2
    assert abs(row["sumsq"] / exact - 1) <= 1e-7
    assert abs(row["sum"] / (3_000_000 * x[0].item()) - 1) <= 1e-7


def test_one_nan_is_counted_wherever_it_is():
    for place in (0, CHUNK - 1, CHUNK, 2 * CHUNK):
        x = torch.ones(2 * CHUNK + 1)
        x[place] = NAN
        assert tensor_stats([x])[0, 1:3].tolist() == [1, 0]


def test_nothing_and_two_devices():
    assert tensor_stats([]).shape == (0, len(COLUMNS))
    with pytest.raises(UserError, match="one device"):
        tensor_stats([torch.ones(1), torch.ones(1, device="meta")])


def test_the_close_look_is_the_same_definition():
    rows = torch.tensor([[1.0, NAN, 0.0, 1e-40], [INF, INF, INF, -INF]])
    for row, tensor in zip(look_closely(rows), rows, strict=True):
        assert_row_is_right(row, tensor, 1.1754943508222875e-38)


def test_exponent_histogram_bins_by_power_of_two():
    counts = exponent_histogram(torch.tensor([1.0, 1.5, -2.0, 0.0, 1e-40, INF, NAN]))
    assert {b: n for b, n in enumerate(counts.tolist()) if n} == {127: 2, 128: 1, 0: 2, 255: 2}
    assert exponent_histogram(torch.ones(100_001), sample=1000).sum() <= 1000
    assert exponent_histogram(torch.empty(0)).sum() == 0


@pytest.fixture(params=["cpu", "triton"])
def stats(request):
    """tensor_stats of the CPU, and of the GPU: on it, or in Triton's interpreter."""
    if request.param == "cpu":
        yield tensor_stats
        return
    kernel = pytest.importorskip("gradproof.kernels.triton_stats")
    with np.errstate(all="ignore"):
        yield lambda tensors: kernel.stats_on_gpu(
            [t.reshape(-1).to(DEVICE) for t in tensors], None, 256, 32, 1
        ).cpu()


def test_both_devices_agree_on_a_model_of_odd_tensors(stats):
    torch.manual_seed(1)
    nasty = [torch.tensor(numbers).repeat(30) for numbers in SPECIAL.values()]
    half = torch.randn(301).half()
    half[:3] = torch.tensor([1e-7, 0.0, 6.2e-5])
    others = [torch.randn(1000).double() * 1e-200, half, torch.randn(70).bfloat16(), torch.arange(-40, 90)]
    empty = [torch.empty(0), torch.tensor([True, False, True]), torch.full((65,), NAN)]
    unaligned = torch.randn(200)[1:]
    tensors = [*nasty, *others, *empty, unaligned, torch.tensor([5e-324, 0.0, 2.2e-308], dtype=torch.float64)]
    for row, tensor in zip(stats(tensors), tensors, strict=True):
        floating = tensor.dtype.is_floating_point
        assert_row_is_right(row, tensor, torch.finfo(tensor.dtype).tiny if floating else 0.0)


def changes_on_gpu(now, before):
    kernel = pytest.importorskip("gradproof.kernels.triton_stats")
    with np.errstate(all="ignore"):
        return kernel.stats_on_gpu(
            [t.to(DEVICE) for t in now], [t.to(DEVICE) for t in before], 256, 32, 1
        ).cpu()


@pytest.mark.parametrize("stats", [tensor_stats, changes_on_gpu])
def test_changes_are_measured_as_if_they_had_been_subtracted(stats):
    g = torch.Generator().manual_seed(2)
    now = [torch.randn(700, generator=g), torch.zeros(0), torch.randn(40, generator=g).bfloat16()]
    now += [torch.randn(91, generator=g)[1:], torch.randn(5, generator=g).double()]
    before = [x + 1e-3 * torch.randn(x.shape, generator=g).to(x.dtype) for x in now]
    before[0][17] = now[0][17]
    now[3][4] = NAN
    rows = stats(now, before)
    for row, new, old in zip(rows[len(now) :], now, before, strict=True):
        change = (new.float() - old.float()).to(torch.float32) if new.dtype != torch.float64 else new - old
        if new.dtype == torch.bfloat16 and stats is tensor_stats:
            change = new - old  # a CPU subtracts in the tensors' own precision
        assert_row_is_right(row, change, torch.finfo(new.dtype).tiny)
    for row, new in zip(rows, now, strict=False):
        assert_row_is_right(row, new, torch.finfo(new.dtype).tiny)


def test_changes_of_memory_in_another_order():
    now = torch.randn(6, 7, generator=torch.Generator().manual_seed(3))
    assert_row_is_right(tensor_stats([now.t()], [2 * now.t().contiguous()])[1], -now, 1.1754943508222875e-38)
