"""Cross-entropy on a GPU: each logit is read once from memory, each entry of the gradient written once.

A row is cut into slices, one CTA each. A CTA looks at its slice three times: for the largest logit, for the
sum of exponentials, and to write the gradient; all but the first look find the slice in the cache. Before the
third it posts (largest, sum) and waits for the other slices of its row. Slices are handed out by a ticket, so
every CTA that waits, waits for CTAs that run or are next to run. Rows too long for that, and the interpreter,
which runs one CTA after another, have one slice.

The target is left out of the largest and of the sum. The sum is then right to 1e-6 however far the target is
ahead, with an exponential of three instructions: what that loses grows with the distance from the largest,
where terms are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradproof.kernels import cuda_loss
from gradproof.kernels.loss_options import LossOptions
from gradproof.kernels.triton_steps import add_losses, mean_scale, scale_rows

__all__ = ["add_losses", "losses_and_gradient", "mean_scale", "scale_rows"]  # of a backend

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(0.693145751953125)  # 16 digits: its product with an integer up to 256 is exact
LN2_LOW = tl.constexpr(1.42860682030941723212e-6)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a float32 to an integer, in its low bits
NOTHING = tl.constexpr(-1e300)  # the largest of no logits


@triton.jit
def _exp(u):
    """exp of a float32 u <= 1 to 2e-7; exp2(u * log2(e)) would lose |u| ulps."""
    biased = tl.maximum(u * LOG2E + MAGIC, MAGIC - 126.0)
    k = biased - MAGIC
    r = (u - k * LN2_HIGH) - k * LN2_LOW
    power = ((biased.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.exp2(r * LOG2E) * power


@triton.jit
def _exp_difference(a, b, WIDE: tl.constexpr):
    """exp(a - b) for a <= b, without the rounding of a - b."""
    difference = a.to(tl.float64) - b.to(tl.float64)
    if WIDE:
        return tl.exp(difference)
    else:
        difference = tl.where(difference < -1000.0, -1000.0, difference)
        high = difference.to(tl.float32)
        return _exp(high) * (1.0 + (difference - high.to(tl.float64)).to(tl.float32))


@triton.jit
def _exp_below(x, largest, WIDE: tl.constexpr, QUICK: tl.constexpr):
    """exp(x - largest) of a block."""
    if WIDE:
        return tl.exp(x - largest)
    elif QUICK:
        return tl.exp2((x - largest) * LOG2E)
    else:
        return _exp(x - largest)


@triton.jit
def _tanh(z):
    """tanh by its series near 0 and by exp elsewhere: right to 2e-7 of 1."""
    z2 = z * z
    series = z * (1 + z2 * (-1 / 3 + z2 * (2 / 15 + z2 * (-17 / 315 + z2 * (62 / 2835)))))
    q = tl.exp(-2 * tl.abs(z))
    far = 1 - 2 * q / (1 + q)
    return tl.where(z2 < 0.0625, series, tl.where(z < 0, -far, far))


@triton.jit
def _soften(x, softcap, WIDE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logits as the loss sees them, in the precision it computes in."""
    x = x.to(tl.float64 if WIDE else tl.float32)
    if SOFTCAP:
        return softcap * _tanh(x / softcap)
    else:
        return x


@triton.jit
def _log1p(z):
    """log(1 + z) in float64 without losing a small z."""
    u = 1 + z
    return tl.where(u == 1, z, tl.log(u) * (z / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def _other_logits(
    x_row, begin, lead, at_y, v, softcap, BLOCK: tl.constexpr, WIDE: tl.constexpr, SOFTCAP: tl.constexpr
):
    """The logits of a block of a row, with -inf for the target and for what is not of the row."""
    offsets = begin + tl.arange(0, BLOCK)
    if (begin >= lead) & (begin + BLOCK <= lead + v):  # without a mask, loads are 16 bytes wide
        x = _soften(tl.load(x_row + offsets), softcap, WIDE, SOFTCAP)
    else:
        inside = (offsets >= lead) & (offsets < lead + v)
        x = _soften(tl.load(x_row + offsets, mask=inside, other=0.0), softcap, WIDE, SOFTCAP)
        x = tl.where(inside, x, float("-inf"))
    if (at_y >= begin) & (at_y < begin + BLOCK):
        x = tl.where(offsets == at_y, float("-inf"), x)
    return x


@triton.jit
def _finish_row(
    row, write, y, x_y, largest, total, spread, losses, lses, weights, w_sum, scales, v, smoothing, z_loss,
    WIDE: tl.constexpr, PER_ROW: tl.constexpr, SMOOTH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    Z: tl.constexpr,
):  # fmt: skip
    """Loss and log-sum-exp of a row, from the largest and the sum of exponentials of all but the target.

    Returns what its gradient is made of: dx = factor * exp(x - largest) - soft * w, and the target's own dx.
    """
    kind = tl.float64 if WIDE else tl.float32
    top = tl.maximum(x_y.to(tl.float64), largest)
    ahead = _exp_difference(largest, top, WIDE)
    e_y = _exp_difference(x_y, top, WIDE)
    others = total * ahead
    d = (others + e_y).to(kind)
    known = (y >= 0) & (y < v)
    w_y = tl.load(weights + y, mask=known, other=float("nan")).to(tl.float64) if HAS_WEIGHT else 1.0
    w_total = tl.load(w_sum) if SMOOTH and HAS_WEIGHT else tl.full((), v, tl.float64)
    hard = (1.0 - smoothing) * w_y
    soft = smoothing / v
    pull = tl.zeros((), tl.float64)
    if SMOOTH:
        pull += soft * w_total
    if Z:
        pull += 2.0 * z_loss * (top + tl.log(others + e_y))
    if write:
        log_d = tl.log(others + e_y)
        lse = top + log_d
        # lse - x_y = log(1 + others / e_y): the difference itself cancels for a confident target
        confident = e_y >= others
        nll = tl.where(confident, _log1p(others / tl.where(confident, e_y, 1.0)), log_d + (top - x_y))
        loss = hard * nll + z_loss * lse * lse
        if SMOOTH:
            loss += soft * (w_total * lse - (spread + w_y * x_y))
        tl.store(losses + row, loss)
        tl.store(lses + row, lse)
    times = tl.load(scales + (row if PER_ROW else 0)).to(tl.float64)
    factor = ((hard + pull) * times * ahead).to(kind) / d
    target = ((pull * e_y - hard * others) * times).to(kind) / d - (soft * w_y * times).to(kind)
    return factor, (soft * times).to(kind), target


@triton.jit
def _zero_row(out, low, high, BLOCK: tl.constexpr):
    for begin in range(low, high, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        tl.store(out + offsets, tl.zeros((BLOCK,), out.dtype.element_ty), mask=offsets < high)


@triton.jit
def _gradient(
    x, times, less, largest, classes, weights, softcap, v,
    WIDE: tl.constexpr, QUICK: tl.constexpr, SMOOTH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits x of a block, none of them the target."""
    dx = _exp_below(x, largest, WIDE, QUICK) * times
    if SMOOTH:
        if HAS_WEIGHT:
            known = (classes >= 0) & (classes < v)
            dx -= less * tl.load(weights + classes, mask=known, other=0.0).to(dx.dtype)
        else:
            dx -= less
    if SOFTCAP:
        bent = x / softcap
        dx *= 1 - bent * bent
    return dx


@triton.jit(do_not_specialize=["slices", "per_slice"])
def _cross_entropy(
    logits, gradient, targets, masks, weights, w_sum, scales, losses, lses, posts, counters,
    v, per_outer, x_outer, x_inner, g_outer, g_inner, ignore_index, smoothing, z_loss, softcap,
    slices, per_slice, BLOCK: tl.constexpr, MANY: tl.constexpr, POSTS: tl.constexpr, SHIFT: tl.constexpr,
    WIDE: tl.constexpr,
    QUICK_SUM: tl.constexpr, QUICK: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    PER_ROW: tl.constexpr, WANT: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One CTA a slice of per_slice blocks.

    With SHIFT, blocks are counted from the last multiple of 8 entries before the row, so that the loads and
    stores of a row that starts anywhere are 16 bytes wide, but for the entries at its edges.
    """
    kind = tl.float64 if WIDE else tl.float32
    ticket = tl.atomic_add(counters, 1, sem="relaxed") if MANY else tl.program_id(0)
    row = ticket // slices
    part = ticket % slices
    start = (row // per_outer).to(tl.int64) * x_outer + (row % per_outer).to(tl.int64) * x_inner
    out = gradient + (row // per_outer).to(tl.int64) * g_outer + (row % per_outer).to(tl.int64) * g_inner
    y = tl.load(targets + row).to(tl.int64)
    valid = y != ignore_index
    if HAS_MASK:
        valid = valid & (tl.load(masks + row) != 0)
    low = part * per_slice * BLOCK
    if not valid:
        if WANT:
            _zero_row(out, low, tl.minimum(low + per_slice * BLOCK, v), BLOCK)
        if part == 0:
            tl.store(losses + row, 0.0)
            tl.store(lses + row, 0.0)
        return
    x_y = tl.load(logits + start + y, mask=(y >= 0) & (y < v), other=float("nan"))  # NaN: not a class
    x_y = _soften(x_y, softcap, WIDE, SOFTCAP)
    lead = 0
    x_row = logits + start
    out_row = out
    if SHIFT:
        lead = (start % 8).to(tl.int32)
        x_row = logits + tl.multiple_of(start - lead, 8)
        out_row = gradient + tl.multiple_of(start - lead, 8)
    high = tl.minimum(low + per_slice * BLOCK, (lead + v + BLOCK - 1) // BLOCK * BLOCK)
    at_y = (y + lead).to(tl.int32)

    most = tl.full((BLOCK,), float("-inf"), kind)
    for begin in range(low, high, 4 * BLOCK):
        begin = tl.multiple_of(begin, BLOCK)
        plain = (begin >= lead) & (begin + 4 * BLOCK <= tl.minimum(lead + v, high))
        if plain & ((at_y < begin) | (at_y >= begin + 4 * BLOCK)):  # four loads under way at a time
            at = x_row + begin + tl.arange(0, BLOCK)
            a, b = tl.load(at), tl.load(at + BLOCK)
            c, d = tl.load(at + 2 * BLOCK), tl.load(at + 3 * BLOCK)
            x = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
            most = tl.maximum(most, _soften(x, softcap, WIDE, SOFTCAP))
        else:
            for each in range(begin, tl.minimum(begin + 4 * BLOCK, high), BLOCK):
                x = _other_logits(x_row, each, lead, at_y, v, softcap, BLOCK, WIDE, SOFTCAP)
                most = tl.maximum(most, x)
    found = tl.max(most, 0)
    mine = tl.where(found == float("-inf"), NOTHING, found.to(tl.float64))
    largest = tl.where(found == float("-inf"), 0.0, found)

    sums = tl.zeros((BLOCK,), kind)
    lost = tl.zeros((BLOCK,), kind)
    spread = tl.zeros((), tl.float64)
    for begin in range(low, high, BLOCK):
        begin = tl.multiple_of(begin, BLOCK)
        x = _other_logits(x_row, begin, lead, at_y, v, softcap, BLOCK, WIDE, SOFTCAP)
        # compensated: what was lost of the sum so far is taken off the next term
        more = _exp_below(x, largest, WIDE, QUICK_SUM) - lost
        together = sums + more
        lost = (together - sums) - more
        sums = together
        if SMOOTH:
            classes = begin - lead + tl.arange(0, BLOCK)
            counted = (classes >= 0) & (classes < v) & (classes != y)
            w = tl.load(weights + classes, mask=counted, other=0.0).to(tl.float64) if HAS_WEIGHT else 1.0
            spread += tl.sum(tl.where(counted, x.to(tl.float64) * w, 0.0), 0)
    total = tl.sum(sums.to(tl.float64) - lost.to(tl.float64), 0)

    row_largest = mine
    if MANY:
        # post mine, wait for all of the row, add them up in the order of the slices
        post = posts + (row.to(tl.int64) * slices + part) * 3
        tl.store(post, mine)
        tl.store(post + 1, total)
        tl.store(post + 2, spread)
        tl.debug_barrier()
        tl.atomic_add(counters + 1 + row, 1, sem="release", scope="gpu")
        while tl.atomic_add(counters + 1 + row, 0, sem="acquire", scope="gpu") < slices:
            pass
        tl.debug_barrier()
        each = tl.arange(0, POSTS)
        post = posts + (row.to(tl.int64) * slices + each) * 3
        theirs = tl.load(post, mask=each < slices, other=NOTHING, cache_modifier=".cg")
        totals = tl.load(post + 1, mask=each < slices, other=0.0, cache_modifier=".cg")
        row_largest = tl.max(theirs, 0)
        total = tl.sum(totals * _exp_difference(theirs, row_largest, WIDE), 0)
        if SMOOTH:
            spread = tl.sum(tl.load(post + 2, mask=each < slices, other=0.0, cache_modifier=".cg"), 0)
    row_largest = tl.where(row_largest == NOTHING, x_y.to(tl.float64), row_largest)
    factor, less, target = _finish_row(
        row, part == 0, y, x_y, row_largest, total, spread, losses, lses, weights, w_sum, scales, v,
        smoothing, z_loss, WIDE, PER_ROW, SMOOTH, HAS_WEIGHT, Z,
    )  # fmt: skip
    if WANT:
        if SOFTCAP:
            bent = x_y / softcap
            target *= 1 - bent * bent
        first = (lead + 7) // 8 * 8  # the entries before it, and from end on, are the row's edges
        end = (lead + v) // 8 * 8
        if SHIFT and part == 0:
            count = tl.arange(0, 16)
            edge = tl.where(count < 8, count, tl.maximum(end, 8) + count - 8)
            outer = ((edge < first) | (edge >= end)) & (edge >= lead) & (edge < lead + v)
            x_edge = _soften(tl.load(x_row + edge, mask=outer, other=0.0), softcap, WIDE, SOFTCAP)
            x_edge = tl.where(edge == at_y, float("-inf"), x_edge)
            dx_edge = _gradient(
                x_edge, factor, less, row_largest.to(kind), edge - lead, weights, softcap, v,
                WIDE, False, SMOOTH, HAS_WEIGHT, SOFTCAP,
            )  # fmt: skip
            dx_edge = tl.where(edge == at_y, target, dx_edge)
            tl.store(out_row + edge, dx_edge.to(out.dtype.element_ty), mask=outer)
        times = factor * _exp_difference(mine, row_largest, WIDE)
        for back in range(low, high, BLOCK):  # backwards, to meet what is still cached
            begin = tl.multiple_of(high - BLOCK - (back - low), BLOCK)
            offsets = begin + tl.arange(0, BLOCK)
            x = _other_logits(x_row, begin, lead, at_y, v, softcap, BLOCK, WIDE, SOFTCAP)
            dx = _gradient(
                x, times, less, largest, offsets - lead, weights, softcap, v,
                WIDE, QUICK, SMOOTH, HAS_WEIGHT, SOFTCAP,
            )  # fmt: skip
            if (at_y >= begin) & (at_y < begin + BLOCK):
                dx = tl.where(offsets == at_y, target, dx)
            dx = dx.to(out.dtype.element_ty)
            if (begin >= lead) & (begin + BLOCK <= lead + v):
                tl.store(out_row + offsets, dx)
            elif SHIFT:
                tl.store(out_row + offsets, dx, mask=(offsets >= first) & (offsets < end))
            else:
                tl.store(out_row + offsets, dx, mask=offsets < v)


@dataclass(frozen=True)
class Launch:
    """How a row is worked on: slices of `slice` entries, each by blocks of `block`."""

    slice: int
    block: int
    warps: int
    registers: int | None = None  # at most, of a thread


INTERPRETED = not isinstance(_cross_entropy, triton.runtime.JITFunction)


def choose_launch(v: int, size: int, aligned: bool, processors: int) -> Launch:
    """The fastest way measured on an H200 by benchmarks/kernels.py, for logits of `size` bytes."""
    if INTERPRETED or triton.cdiv(v + 7, 8192) > processors or v < 8192:
        block = min(max(64, triton.next_power_of_2(v + 7)), 2048)
        return Launch(triton.cdiv(v + 7, block) * block, block, max(1, min(8, block // 256)))
    if size == 2:
        return Launch(16384, 2048 if aligned else 1024, 4)
    return Launch(8192, 2048, 8) if aligned else Launch(8192, 1024, 4)


def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    gradient: Tensor | None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """As `torch_loss.losses_and_gradient`, in one launch and without waiting for the device."""
    v, rows = logits.shape[-1], targets.numel()
    wide = logits.dtype == torch.float64
    if rows == 0:
        nothing = torch.empty(
            targets.shape, dtype=torch.float64 if wide else torch.float32, device=logits.device
        )
        return nothing, nothing.clone()
    x = logits if _has_rows(logits) else logits.contiguous()
    if gradient is not None and not _has_rows(gradient):
        fresh = torch.empty_like(x, memory_format=torch.contiguous_format)
        found = losses_and_gradient(x, targets, mask, weight, options, scale, fresh, launch)
        gradient.copy_(fresh)
        return found
    plan = cuda_loss.find_plan(x, gradient, weight, options) if launch is None else None
    done = cuda_loss.losses_and_gradient(x, targets, mask, options, scale, gradient, plan) if plan else None
    if done:
        return done
    if gradient is not None and gradient.dtype != x.dtype and _share_memory(x, gradient):
        apart = torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
        found = losses_and_gradient(x, targets, mask, weight, options, scale, apart, launch)
        gradient.copy_(apart)
        return found
    targets = targets.contiguous()
    mask = None if mask is None else mask.to(torch.int8).contiguous()
    losses = torch.empty(targets.shape, dtype=torch.float64 if wide else torch.float32, device=logits.device)
    lses = torch.empty_like(losses)
    out = x if gradient is None else gradient
    aligned = not any(stride % 8 for stride in _row_strides(x))
    launch = launch or choose_launch(v, x.element_size(), aligned, cuda_loss.processors(x.device))
    weight = None if weight is None else weight.contiguous()
    smooth = options.label_smoothing != 0
    w_sum = weight.sum(dtype=torch.float64) if weight is not None and smooth else None
    arguments = (x, out, targets, mask, weight, w_sum, scale.contiguous(), losses, lses)
    places = (v, x.shape[-2] if x.dim() > 1 else 1, *_row_strides(x), *_row_strides(out))
    numbers = (*places, options.ignore_index, options.label_smoothing, options.z_loss, options.softcap)
    flags: dict = {
        "WIDE": wide,
        "HAS_MASK": mask is not None,
        "HAS_WEIGHT": weight is not None,
        "PER_ROW": scale.dim() > 0,
        "WANT": gradient is not None,
        "SMOOTH": smooth,
        "Z": options.z_loss != 0,
        "SOFTCAP": options.softcap != 0,
        "BLOCK": launch.block,
        "num_warps": launch.warps,
    }
    if launch.registers and not INTERPRETED:
        flags["maxnreg"] = launch.registers
    shift = not aligned and _are_alike(x, out)
    slices = triton.cdiv(v + 7 if shift else v, launch.slice)
    posts = torch.empty(rows * slices * 3 if slices > 1 else 0, dtype=torch.float64, device=x.device)
    counters = torch.zeros(1 + rows if slices > 1 else 1, dtype=torch.int32, device=x.device)
    flags |= {"MANY": slices > 1, "POSTS": max(16, triton.next_power_of_2(slices)), "SHIFT": shift}
    flags |= {"QUICK_SUM": x.element_size() == 2, "QUICK": True}
    blocks = launch.slice // launch.block
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _cross_entropy[(rows * slices,)](*arguments, posts, counters, *numbers, slices, blocks, **flags)
    return losses, lses


def _share_memory(x: Tensor, out: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


def _are_alike(x: Tensor, out: Tensor) -> bool:
    """Whether entries at the same offsets of both are aligned alike."""
    return _row_strides(x) == _row_strides(out) and x.data_ptr() % 32 == 0 and out.data_ptr() % 32 == 0


def _has_rows(x: Tensor) -> bool:
    """Whether the rows of (..., V) lie dense, at an outer and an inner stride."""
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    return dense and (x.dim() <= 3 or x.is_contiguous())


def _row_strides(x: Tensor) -> tuple[int, int]:
    """The outer and the inner stride of the rows."""
    inner = x.stride(-2) if x.dim() > 1 else 0
    return (x.stride(-3) if x.dim() > 2 else 0), inner
