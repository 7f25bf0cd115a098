"""For test suites: an assertion for gradients, and hypothesis strategies for the tensors to make it at.

from hypothesis import given
from gradproof.testing import assert_gradient_matches, tensors

@given(tensors(min_dims=2))
def test_my_softmax(x):
    assert_gradient_matches(my_softmax, x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradproof.check.gradient import GradientCheck, check_gradient

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

LAYOUTS = ("contiguous", "transposed", "strided", "offset")


def assert_gradient_matches(fn: Callable, *inputs: Any, order: int = 1) -> GradientCheck:
    """Fail unless the gradient is right; a check that could not decide has proved nothing and fails too."""
    __tracebackhide__ = True
    found = check_gradient(fn, *inputs, order=order)
    if not found.decided:
        raise AssertionError(str(found))
    return found


def shapes(min_dims: int = 1, max_dims: int = 3, max_size: int = 6) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of small tensors, axes of size 1 among them."""
    from hypothesis import strategies as st

    return st.lists(st.integers(1, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes(*allowed: torch.dtype) -> SearchStrategy[torch.dtype]:
    """Floating-point dtypes: float64 and float32 unless others are given."""
    from hypothesis import strategies as st

    return st.sampled_from(allowed or (torch.float64, torch.float32))


def tensors(
    min_dims: int = 1,
    max_dims: int = 3,
    max_size: int = 6,
    allowed_dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    low: float = -3.0,
    high: float = 3.0,
) -> SearchStrategy[Tensor]:
    """Tensors between two bounds, in every memory layout that a kernel may be handed."""
    from hypothesis import strategies as st

    @st.composite
    def draw_tensor(draw: DrawFn) -> Tensor:
        shape = draw(shapes(min_dims, max_dims, max_size))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        return in_layout(values.to(draw(dtypes(*allowed_dtypes))), draw(st.sampled_from(LAYOUTS)))

    return draw_tensor()


def in_layout(x: Tensor, layout: str) -> Tensor:
    """The same numbers, differently laid out in memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    if layout == "strided":
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x
