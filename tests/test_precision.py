"""Sums within their bounds and better than those of simpler ones; the precision table against known facts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradproof.cli import main
from gradproof.errors import UserError
from gradproof.numerics.precision import WAYS, compare_ways, exact_cross_entropy, make_logits
from gradproof.numerics.summation import (
    SUMS,
    condition_of_sum,
    dynamic_range,
    error_bound,
    kahan_sum,
    naive_sum,
    neumaier_sum,
    pairwise_sum,
    two_product,
    two_sum,
)

numbers = st.floats(-(2.0**50), 2.0**50, width=32, allow_subnormal=False).filter(
    lambda x: x == 0 or abs(x) > 1e-15
)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_two_sum_and_two_product_lose_nothing(pairs):
    a, b = torch.tensor(pairs).unbind(1)
    for (x, y), s, e, p, f in zip(pairs, *two_sum(a, b), *two_product(a, b), strict=True):
        assert Fraction(s.item()) + Fraction(e.item()) == Fraction(x) + Fraction(y)
        assert Fraction(p.item()) + Fraction(f.item()) == Fraction(x) * Fraction(y)


@settings(deadline=None, max_examples=50)
@given(st.lists(numbers, min_size=1, max_size=300), st.sampled_from([torch.float32, torch.bfloat16]))
def test_every_sum_keeps_its_bound(terms, dtype):
    x = torch.tensor(terms).to(dtype)
    exact = math.fsum(x.tolist())
    size = math.fsum(x.abs().tolist())
    for method in SUMS:
        assert abs(method(x).item() - exact) <= error_bound(method, len(terms), dtype) * size + 1e-40, method


@pytest.mark.parametrize("method", SUMS)
def test_sums_take_any_dimension_and_nothing(method):
    x = torch.arange(24.0).view(2, 3, 4)
    for dim in (0, 1, -1):
        assert torch.equal(method(x, dim), x.sum(dim))
    assert torch.equal(method(torch.empty(3, 0)), torch.zeros(3))


def test_compensation_keeps_what_a_running_sum_drops():
    x = torch.full((20_000,), 2.0**-25)
    x[0] = 1.0
    exact = math.fsum(x.tolist())
    assert naive_sum(x) == 1  # drops every small term
    for method in (kahan_sum, neumaier_sum, pairwise_sum):
        assert abs(method(x).item() / exact - 1) <= 1e-7


def test_neumaier_survives_a_term_larger_than_the_sum_and_kahan_does_not():
    x = torch.tensor([1.0, 1e20, 1.0, -1e20])
    assert neumaier_sum(x) == 2 and kahan_sum(x) == 0


def test_condition_and_range():
    assert condition_of_sum(torch.tensor([1.0, -0.5])) == 3
    assert dynamic_range(torch.tensor([8.0, 0.0, -1.0])) == 3
    assert dynamic_range(torch.zeros(2)) == 0


def test_exact_reference_is_the_formula():
    d, loss, gradient = exact_cross_entropy([0.0, 0.0, 0.0, 0.0], 1)
    assert d == 4 and float(loss) == math.log(4) and [float(g) for g in gradient] == [0.25, -0.75, 0.25, 0.25]


def errors(kind, vocab):
    return {e.way: e for e in compare_ways(make_logits(kind, vocab))}


def test_a_sum_of_34_loses_nothing_in_float32_and_percents_in_bfloat16():
    found = errors("realistic", 34)
    assert found["float32, one after the other"].denominator <= 2e-6
    assert found["bfloat16, one after the other"].denominator >= 1e-3
    assert found["float64, one after the other"].loss <= 1e-14


def test_a_confident_target_is_lost_whatever_the_summation():
    found = errors("realistic", 2004)
    assert found["float32, Neumaier"].confident_loss >= 1e-4
    assert found["float32, Neumaier"].denominator <= 1e-7


def test_adversarial_logits_defeat_the_running_sum_only():
    found = errors("adversarial", 20_000)
    assert found["float32, one after the other"].denominator >= 1e-4
    assert found["float32, Kahan"].denominator <= 1e-6
    assert math.isinf(errors_of_large_logits()["float32, max not subtracted"].loss)


def errors_of_large_logits():
    return {e.way: e for e in compare_ways(torch.tensor([100.0, 0.0, 1.0]), WAYS[:2])}


def test_command_prints_a_table_and_writes_it(tmp_path, capsys):
    assert main(["precision", "--vocab", "34,100", "--out", str(tmp_path / "table.txt")]) == 0
    printed = capsys.readouterr().out
    assert "vocabulary 34" in printed and "gradproof.cross_entropy" in printed and "###" in printed
    assert (tmp_path / "table.txt").read_text().strip() in printed
    np.save(tmp_path / "row.npy", np.array([0.5, 2.0, -1.0], dtype=np.float32))
    assert main(["precision", "--logits", str(tmp_path / "row.npy")]) == 0
    assert "vocabulary 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--vocab", "x"], "vocab"),
        (["--vocab", "0"], "vocab"),
        (["--logits", "strange"], "strange"),
        (["--logits", "missing.npy"], "missing.npy"),
    ],
)
def test_command_names_what_is_wrong(argv, says, capsys):
    assert main(["precision", *argv]) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(UserError):
        make_logits("strange", 3)
