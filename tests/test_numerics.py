"""Formats, distances in ulp, and the one comparison: each against numbers worked out by hand or by math."""

import math

import pytest
import torch

from gradproof.errors import UserError
from gradproof.numerics.difference import difference
from gradproof.numerics.formats import FORMATS, format_of, ulp, ulp_distance


def test_format_table_says_what_ieee_says():
    assert {f.name: f.digits for f in FORMATS} == {
        "float64": 53,
        "float32": 24,
        "float16": 11,
        "bfloat16": 8,
        "float8_e4m3fn": 4,
        "float8_e5m2": 3,
    }
    assert format_of(torch.float32).smallest == 2.0**-149
    assert format_of(torch.float8_e4m3fn).max == 448
    with pytest.raises(UserError, match=r"torch.int64 is not a floating-point format"):
        format_of(torch.int64)


def test_ulp_is_the_step_to_the_next_number():
    x = torch.tensor([1.0, -1.5, 2.0, 3e-39, 0.0, 3e38])
    step = torch.nextafter(x.abs(), torch.tensor(torch.inf)).double() - x.abs().double()
    assert torch.equal(ulp(x)[:-1], step[:-1])
    assert math.isnan(ulp(torch.tensor(torch.inf)))
    assert ulp(torch.tensor(1.0), torch.bfloat16) == 2.0**-7


@pytest.mark.parametrize("dtype", [f.dtype for f in FORMATS])
def test_ulp_distance_counts_steps(dtype):
    smallest = format_of(dtype).smallest
    a = torch.tensor([0.0, -0.0, smallest, -smallest, 1.0, 1.0, torch.nan], dtype=torch.float64).to(dtype)
    b = torch.tensor(
        [0.0, 0.0, -smallest, 0.0, 1 + format_of(dtype).eps, torch.nan, torch.nan], dtype=torch.float64
    ).to(dtype)
    far = 2**63 - 1
    assert ulp_distance(a, b).tolist() == [0, 0, 2, 1, 1, far, far]


def test_ulp_distance_does_not_wrap_at_the_ends_of_float64():
    most = torch.finfo(torch.float64).max
    assert ulp_distance(torch.tensor(most).double(), torch.tensor(-most).double()) == 2**63 - 1


def test_difference_names_the_worst_place_against_what_is_allowed_there():
    reference = torch.tensor([[1.0, 100.0], [2.0, 4.0]])
    value = torch.tensor([[1.0, 100.5], [2.1, 4.0]])
    found = difference(value, reference, relative=1e-3)
    assert (found.place, found.disagree, found.total) == ((1, 0), 2, 4)  # 5 % beats a larger 0.5 %
    assert found.relative == pytest.approx(0.05, rel=1e-5)
    assert "2 of 4 entries disagree; the worst is at (1, 0)" in str(found)
    assert difference(value, reference, absolute=0.6).ok


@pytest.mark.parametrize("value", [[1.0, torch.nan], [1.0, torch.inf], [1.0, -torch.inf]])
def test_difference_never_calls_a_nan_or_a_stray_inf_near(value):
    found = difference(torch.tensor(value), torch.tensor([1.0, 2.0]), relative=1e300, absolute=1e300)
    assert (found.place, found.error, found.ok) == ((1,), math.inf, False)


def test_difference_calls_nan_far_from_nan_and_inf_equal_to_inf():
    nan, inf = torch.tensor([torch.nan]), torch.tensor([torch.inf])
    assert difference(nan, nan, absolute=1.0).nans == 1
    assert not difference(nan, nan, absolute=1.0).ok
    assert difference(inf, inf).ok
    assert not difference(inf, -inf).ok


def test_difference_of_empty_complex_integer_and_scalar_tensors():
    assert difference(torch.empty(0, 3), torch.empty(0, 3)).ok
    assert not difference(torch.tensor([1j]), torch.tensor([1 + 1j])).ok
    assert difference(torch.tensor(3), torch.tensor(3)).place == ()
    with pytest.raises(UserError, match=r"cannot compare shapes \(2,\) and \(3,\)"):
        difference(torch.zeros(2), torch.zeros(3))


def test_difference_allows_a_tensor_of_row_scales():
    exact = torch.tensor([[1.0, 0.0], [1000.0, 0.0]])
    value = exact + torch.tensor([[0.0, 1e-5], [0.0, 1e-5]])
    found = difference(value, exact, absolute=1e-6 * exact.abs().amax(1, keepdim=True))
    assert (found.place, found.disagree) == ((0, 1), 1)
