"""Kernels in Triton, right and with one thing wrong; without a GPU its interpreter runs them."""

import torch
import triton
import triton.language as tl

BLOCK = 16


@triton.jit
def softmax_rows(x, out, columns, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=float("-inf") if MASKED else 0.0)
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, weights / tl.sum(weights, 0), mask=inside)


@triton.jit
def scale_blocks(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, 2.0 * values, mask=at < count)


def make_softmax(masked):
    def softmax(x):
        x = x.contiguous()
        out = torch.empty_like(x)
        size = triton.next_power_of_2(x.shape[1])
        softmax_rows[(x.shape[0],)](x, out, x.shape[1], size, masked)
        return out

    return softmax


def make_twice(blocks):
    """Twice its argument, in as many blocks as `blocks(count)` says."""

    def twice(x):
        x = x.contiguous()
        out = torch.empty_like(x)
        scale_blocks[(blocks(x.numel()),)](x, out, x.numel(), BLOCK)
        return out

    return twice


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return make_twice(lambda n: triton.cdiv(n, BLOCK))(x)

    @staticmethod
    def backward(ctx, g):
        return make_twice(lambda n: triton.cdiv(n, BLOCK))(g)


class TwiceByFour(Twice):
    @staticmethod
    def backward(ctx, g):
        return 2 * Twice.backward(ctx, g)
