"""cross_entropy against 50 digits: random rows, confident targets, offsets, -inf, in float32 and bfloat16."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradproof.kernels import torch_loss
from gradproof.kernels.loss_options import LossOptions
from gradproof.numerics.difference import difference
from gradproof.numerics.formats import ulp

TINY = torch.finfo(torch.float32).tiny


@st.composite
def rows(draw):
    """(logits (V,), target): of any spread and offset, the target up to 85 ahead, some logits -inf."""
    v = draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 255, 257])))
    g = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    offset = draw(st.sampled_from([0.0, 0.37, -1.9, -33.3, 52.1, 299.7, -1e4, 1e4]))
    spread = draw(st.sampled_from([0.0, 1e-3, 1.0, 5.0, 30.0]))
    logits = torch.tensor(offset + spread * g.standard_normal(v)).to(draw(st.sampled_from(DTYPES)))
    target = draw(st.integers(0, v - 1))
    ahead = draw(st.one_of(st.none(), st.floats(0, 85)))
    if ahead is not None:
        logits[target] = logits.max() + ahead
    if draw(st.booleans()):
        hidden = torch.from_numpy(g.random(v) < 0.3)
        hidden[target] = False
        logits[hidden] = -torch.inf
    return logits, target


DTYPES = (torch.float32, torch.bfloat16)


def exact(logits, target):
    """Loss and gradient to 50 digits, as float64."""
    with mpmath.workdps(50):
        x = [mpmath.mpf(number) for number in logits.double().tolist()]
        e = [mpmath.exp(number - x[target]) for number in x]
        others = mpmath.fsum(e[:target] + e[target + 1 :])
        gradient = [number / (1 + others) for number in e]
        gradient[target] = -others / (1 + others)
        return float(mpmath.log1p(others)), torch.tensor([float(g) for g in gradient], dtype=torch.float64)


def lost_to_the_shift(logits, target):
    """A target that is far ahead has losses under 1e-7, made of exponents that were rounded when all were shifted."""
    others = torch.cat([logits[:target], logits[target + 1 :]]).float()
    ahead = float(logits[target]) - float(others.max()) if others.numel() else 0.0
    return 2.0**-24 * ahead if 16 < ahead < math.inf else 0.0  # half an ulp of the difference


def assert_right(backend, logits, target):
    gradient = torch.full_like(logits[None], torch.nan)
    targets, scale = torch.tensor([target]), torch.ones((), dtype=torch.float64)
    with np.errstate(all="ignore"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        on = [t.to(device) for t in (logits[None], targets, scale, gradient)]
        loss, _ = backend.losses_and_gradient(on[0], on[1], None, None, LossOptions(), on[2], on[3])
    loss_exact, dexact = exact(logits, target)
    assert abs(loss.item() - loss_exact) <= (1e-6 + lost_to_the_shift(logits, target)) * loss_exact + TINY
    if logits.dtype == torch.bfloat16:
        # one rounding to the nearest: half an ulp; but the interpreter of Triton rounds towards zero
        ulps = 1.0 if getattr(backend, "INTERPRETED", False) else 0.5
        allowed = ulps * ulp(dexact, torch.bfloat16) + 1e-5 * dexact.abs() + TINY
    else:
        allowed = 2e-6 * dexact.abs().max() + TINY
    found = difference(on[3][0].cpu(), dexact, absolute=allowed)
    assert found.ok, str(found)


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows())
def test_torch_backend_against_fifty_digits(row):
    assert_right(torch_loss, *row)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows())
def test_triton_backend_against_fifty_digits(row):
    assert_right(pytest.importorskip("gradproof.kernels.triton_loss"), *row)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows())
def test_triton_backend_against_fifty_digits_at_length(row):
    assert_right(pytest.importorskip("gradproof.kernels.triton_loss"), *row)
