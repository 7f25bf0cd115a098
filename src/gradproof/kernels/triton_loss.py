"""Cross-entropy on a GPU: each logit is read once from memory, each entry of the gradient written once.

A row is cut into slices, one CTA each. A CTA reduces its slice to (log-scale, sum of exponentials), posts
that, waits for the other slices of its row, and turns its slice, still in registers, into the gradient.
Slices are handed out by a ticket, so every CTA that waits, waits for CTAs that run or are next to run. Rows
too long for that, and the interpreter, which runs one CTA after another, take `_row_by_row` instead: one CTA
reads its row twice, the second time backwards, from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradproof.kernels.loss_options import LossOptions

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH = tl.constexpr(0.693145751953125)  # 16 digits: its product with an integer up to 256 is exact
LN2_LOW = tl.constexpr(1.42860682030941723212e-6)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds a float32 to an integer, in its low bits


@triton.jit
def _exp_scaled(u, n):
    """exp(u) * 2**-n of float32, right to 3e-7 for any u up to n ln 2; exp2 of u * log2(e) loses |u| ulps."""
    biased = tl.maximum(u * LOG2E + (MAGIC - n), MAGIC - 126.0)
    k = (biased - MAGIC) + n
    r = (u - k * LN2_HIGH) - k * LN2_LOW
    power = ((biased.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.exp2(r * LOG2E) * power


@triton.jit
def _accurate_sum(x, BLOCK: tl.constexpr):
    """The sum in float64 of sums of four, a quarter of the block apart, which one thread holds."""
    return tl.sum(tl.sum(tl.reshape(x, (4, BLOCK // 4)), 0).to(tl.float64), 0)


@triton.jit
def _exponentials(x, floor, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """(exp(x - scale), scale, sum of them) with a scale near the largest of x and floor, both in float64."""
    m = tl.maximum(tl.max(x, 0), floor)
    empty = m == float("-inf")
    m = tl.where(empty, 0.0, m)
    if WIDE:
        e = tl.exp(x - m)
        return e, tl.where(empty, -1e300, m), tl.sum(e, 0)
    else:
        shift = tl.where(tl.abs(m) > 256.0, m, 0.0)  # then x - m is exact wherever exp is not 0
        n = tl.floor((m - shift) * LOG2E + 0.5)
        e = _exp_scaled(x - shift, n)
        scale = tl.where(empty, -1e300, shift.to(tl.float64) + n.to(tl.float64) * LN2)
        return e, scale, _accurate_sum(e, BLOCK)


@triton.jit
def _tanh(z):
    """tanh by its series near 0 and by exp elsewhere: right to 2e-7 of 1."""
    z2 = z * z
    series = z * (1 + z2 * (-1 / 3 + z2 * (2 / 15 + z2 * (-17 / 315 + z2 * (62 / 2835)))))
    q = tl.exp(-2 * tl.abs(z))
    far = 1 - 2 * q / (1 + q)
    return tl.where(z2 < 0.0625, series, tl.where(z < 0, -far, far))


@triton.jit
def _soften(x, softcap, SOFTCAP: tl.constexpr):
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
def _finish_row(
    row, write, y, x_y, scale, others, spread, losses, lses, weights, w_sum, v, smoothing, z_loss, scales,
    PER_ROW: tl.constexpr, SMOOTH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Loss and log-sum-exp of a row, from the sum over all but the target at a log-scale, all in float64.

    Returns what its gradient is made of: dx = factor * e - soft * w, and the target's own dx.
    """
    x_y = x_y.to(tl.float64)
    e_y = tl.exp(x_y - scale)
    d = others + e_y
    log_d = tl.log(d)
    lse = scale + log_d
    # lse - x_y = log(1 + others / e_y): the difference itself cancels for a confident target
    confident = e_y >= others
    nll = tl.where(confident, _log1p(others / tl.where(confident, e_y, 1.0)), log_d + (scale - x_y))
    known = (y >= 0) & (y < v)
    w_y = tl.load(weights + y, mask=known, other=float("nan")).to(tl.float64) if HAS_WEIGHT else 1.0
    hard = (1.0 - smoothing) * w_y
    soft = smoothing / v
    loss = hard * nll + z_loss * lse * lse
    w_total = tl.load(w_sum) if SMOOTH and HAS_WEIGHT else tl.full((), v, tl.float64)
    if SMOOTH:
        loss += soft * (w_total * lse - spread)
    if write:
        tl.store(losses + row, loss)
        tl.store(lses + row, lse)
    times = tl.load(scales + (row if PER_ROW else 0)).to(tl.float64)
    pull = soft * w_total + 2.0 * z_loss * lse
    factor = (hard + pull) * times / d
    target = ((pull * e_y - hard * others) / d - soft * w_y) * times
    return factor, soft * times, target


@triton.jit
def _gradient(x, e, offsets, y, factor, soft, target, weights, softcap, v,
              SMOOTH: tl.constexpr, HAS_WEIGHT: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    """The gradient of a slice from its exponentials e; x are its (softened) logits."""
    dx = e * factor.to(e.dtype)
    if SMOOTH:
        w = tl.load(weights + offsets, mask=offsets < v, other=0.0).to(e.dtype) if HAS_WEIGHT else 1.0
        dx -= soft.to(e.dtype) * w
    dx = tl.where(offsets == y, target.to(e.dtype), dx)
    if SOFTCAP:
        bent = x / softcap
        dx *= 1 - bent * bent
    return dx


@triton.jit
def _spread(x, offsets, inside, weights, v, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of w * x over a slice."""
    x = tl.where(inside, x, 0.0)
    if HAS_WEIGHT:
        x *= tl.load(weights + offsets, mask=inside, other=0.0).to(x.dtype)
    return _accurate_sum(x, BLOCK)


@triton.jit
def _target_of_row(targets, masks, row, ignore_index, HAS_MASK: tl.constexpr):
    """The target of a row and whether it counts."""
    y = tl.load(targets + row).to(tl.int64)
    valid = y != ignore_index
    if HAS_MASK:
        valid = valid & (tl.load(masks + row) != 0)
    return y, valid


@triton.jit
def _target_logit(logits, start, y, v, softcap, WIDE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The target's logit, NaN for a target that is no class."""
    inside = (y >= 0) & (y < v)
    x_y = tl.load(logits + start + y, mask=inside, other=float("nan"))
    return _soften(x_y.to(tl.float64 if WIDE else tl.float32), softcap, SOFTCAP)


@triton.jit
def _zero_row(out, lo, hi, BLOCK: tl.constexpr):
    for start in range(lo, hi, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tl.store(out + offsets, tl.zeros((BLOCK,), out.dtype.element_ty), mask=offsets < hi)


@triton.jit(do_not_specialize=["slices"])
def _by_slices(
    logits, gradient, targets, masks, weights, w_sum, scales, losses, lses, posts, counters,
    v, per_outer, x_outer, x_inner, g_outer, g_inner, ignore_index, smoothing, z_loss, softcap,
    slices, MANY: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, RELOAD: tl.constexpr,
    TICKET: tl.constexpr, WIDE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, PER_ROW: tl.constexpr,
    WANT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr, POSTS: tl.constexpr,
):  # fmt: skip
    """One CTA a slice of a row; slices * BLOCK cover it.

    With SHIFT, slices are counted from the last multiple of 8 entries before the row, so that loads and stores
    of a row that starts anywhere are 16 bytes wide; loads reach into the neighbouring rows, stores do not.
    """
    ticket = tl.atomic_add(counters, 1, sem="relaxed") if TICKET else tl.program_id(0)
    row = ticket // slices
    part = ticket % slices
    start = (row // per_outer).to(tl.int64) * x_outer + (row % per_outer).to(tl.int64) * x_inner
    out = gradient + (row // per_outer).to(tl.int64) * g_outer + (row % per_outer).to(tl.int64) * g_inner
    y, valid = _target_of_row(targets, masks, row, ignore_index, HAS_MASK)
    if not valid:
        if WANT:
            _zero_row(out, part * BLOCK, tl.minimum(part * BLOCK + BLOCK, v), BLOCK)
        if part == 0:
            tl.store(losses + row, 0.0)
            tl.store(lses + row, 0.0)
        return
    offsets = part * BLOCK + tl.arange(0, BLOCK)
    if SHIFT:
        lead = (start % 8).to(tl.int32)
        x_row = logits + tl.multiple_of(start - lead, 8)
        out_row = gradient + tl.multiple_of(start - lead, 8)
        loaded = offsets < tl.multiple_of((lead + v + 7) // 8 * 8, 8)
        stored = (offsets >= tl.multiple_of((lead + 7) // 8 * 8, 8)) & (
            offsets < tl.multiple_of((lead + v) // 8 * 8, 8)
        )
        classes = offsets - lead
        inside = (classes >= 0) & (classes < v)
    else:
        x_row = logits + start
        out_row = out
        classes = offsets
        inside = offsets < v
        loaded = inside
        stored = inside
    raw = tl.load(x_row + offsets, mask=loaded, other=float("-inf"))
    x = _soften(raw.to(tl.float64 if WIDE else tl.float32), softcap, SOFTCAP)
    x_y = _target_logit(logits, start, y, v, softcap, WIDE, SOFTCAP)
    e, scale, total = _exponentials(tl.where(inside & (classes != y), x, float("-inf")), x_y, WIDE, BLOCK)
    spread = _spread(x, classes, inside, weights, v, HAS_WEIGHT, BLOCK) if SMOOTH else 0.0
    if MANY:
        # post mine, wait for all of the row, add them up in the order of the slices
        post = posts + (row.to(tl.int64) * slices + part) * 3
        tl.store(post, scale)
        tl.store(post + 1, total)
        tl.store(post + 2, spread)
        tl.debug_barrier()
        tl.atomic_add(counters + 1 + row, 1, sem="release", scope="gpu")
        while tl.atomic_add(counters + 1 + row, 0, sem="acquire", scope="gpu") < slices:
            pass
        tl.debug_barrier()
        each = tl.arange(0, POSTS)
        here = each < slices
        post = posts + (row.to(tl.int64) * slices + each) * 3
        all_scales = tl.load(post, mask=here, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(post + 1, mask=here, other=0.0, cache_modifier=".cg")
        row_scale = tl.max(all_scales, 0)
        total = tl.sum(sums * tl.exp(all_scales - row_scale), 0)
        if SMOOTH:
            spread = tl.sum(tl.load(post + 2, mask=here, other=0.0, cache_modifier=".cg"), 0)
    else:
        row_scale = scale
    factor, soft, target = _finish_row(
        row, part == 0, y, x_y, row_scale, total, spread, losses, lses, weights, w_sum, v, smoothing, z_loss,
        scales, PER_ROW, SMOOTH, HAS_WEIGHT,
    )  # fmt: skip
    if WANT:
        if SHIFT and part == 0:  # the entries before the first and after the last multiple of 8
            count = tl.arange(0, 16)
            end = (lead + v) // 8 * 8
            edge = tl.where(count < 8, count, tl.maximum(end, 8) + count - 8)
            outer = (edge < (lead + 7) // 8 * 8) | (edge >= end)
            outer = outer & (edge >= lead) & (edge < lead + v)
            at_edge = tl.load(x_row + edge, mask=outer, other=0.0)
            at_edge = _soften(at_edge.to(tl.float64 if WIDE else tl.float32), softcap, SOFTCAP)
            e_edge = tl.exp(at_edge.to(tl.float64) - row_scale)
            dx_edge = _gradient(
                at_edge, e_edge, edge - lead, y, factor, soft, target, weights, softcap, v,
                SMOOTH, HAS_WEIGHT, SOFTCAP,
            )  # fmt: skip
            dx_edge = dx_edge.to(tl.float64 if WIDE else tl.float32)
            tl.store(out_row + edge, dx_edge.to(out.dtype.element_ty), mask=outer)
        factor *= tl.exp(scale - row_scale)
        if RELOAD:  # from the first-level cache, so that no registers are held while waiting
            raw = tl.load(x_row + offsets, mask=loaded, other=float("-inf"))
            x = _soften(raw.to(tl.float64 if WIDE else tl.float32), softcap, SOFTCAP)
            e, _, _ = _exponentials(tl.where(inside & (classes != y), x, float("-inf")), x_y, WIDE, BLOCK)
        dx = _gradient(
            x, e, classes, y, factor, soft, target, weights, softcap, v, SMOOTH, HAS_WEIGHT, SOFTCAP
        )
        tl.store(out_row + offsets, dx.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _row_by_row(
    logits, gradient, targets, masks, weights, w_sum, scales, losses, lses,
    v, per_outer, x_outer, x_inner, g_outer, g_inner, ignore_index, smoothing, z_loss, softcap,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    PER_ROW: tl.constexpr, WANT: tl.constexpr, SMOOTH: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One CTA a row; the second pass runs backwards, to meet what the first left in the cache."""
    row = tl.program_id(0)
    start = (row // per_outer).to(tl.int64) * x_outer + (row % per_outer).to(tl.int64) * x_inner
    out = gradient + (row // per_outer).to(tl.int64) * g_outer + (row % per_outer).to(tl.int64) * g_inner
    y, valid = _target_of_row(targets, masks, row, ignore_index, HAS_MASK)
    if not valid:
        if WANT:
            _zero_row(out, 0, v, BLOCK)
        tl.store(losses + row, 0.0)
        tl.store(lses + row, 0.0)
        return
    x_y = _target_logit(logits, start, y, v, softcap, WIDE, SOFTCAP)
    row_scale = tl.where(x_y == float("-inf"), -1e300, x_y.to(tl.float64))
    total = tl.zeros((), tl.float64)
    spread = tl.zeros((), tl.float64)
    blocks = tl.cdiv(v, BLOCK)
    for block in range(0, blocks):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < v
        raw = tl.load(logits + start + offsets, mask=inside, other=float("-inf"))
        x = _soften(raw.to(tl.float64 if WIDE else tl.float32), softcap, SOFTCAP)
        e, scale, part = _exponentials(tl.where(inside & (offsets != y), x, float("-inf")), x_y, WIDE, BLOCK)
        larger = tl.maximum(row_scale, scale)
        total = total * tl.exp(row_scale - larger) + part * tl.exp(scale - larger)
        row_scale = larger
        if SMOOTH:
            spread += _spread(x, offsets, inside, weights, v, HAS_WEIGHT, BLOCK)
    factor, soft, target = _finish_row(
        row, True, y, x_y, row_scale, total, spread, losses, lses, weights, w_sum, v, smoothing, z_loss,
        scales, PER_ROW, SMOOTH, HAS_WEIGHT,
    )  # fmt: skip
    if WANT:
        for backwards in range(0, blocks):
            offsets = (blocks - 1 - backwards) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < v
            raw = tl.load(logits + start + offsets, mask=inside, other=float("-inf"))
            x = _soften(raw.to(tl.float64 if WIDE else tl.float32), softcap, SOFTCAP)
            e, scale, _ = _exponentials(tl.where(inside & (offsets != y), x, float("-inf")), x_y, WIDE, BLOCK)
            here = factor * tl.exp(scale - row_scale)
            dx = _gradient(
                x, e, offsets, y, here, soft, target, weights, softcap, v, SMOOTH, HAS_WEIGHT, SOFTCAP
            )
            tl.store(out + offsets, dx.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _count_valid(targets, masks, weights, out, rows, ignore_index, v,
                 HAS_MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = 1 / (sum of the valid positions' weights), 1 where nothing is valid; one CTA, a fixed order."""
    total = tl.zeros((BLOCK,), tl.float64)
    some = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        y = tl.load(targets + offsets, mask=offsets < rows, other=ignore_index).to(tl.int64)
        valid = y != ignore_index
        if HAS_MASK:
            valid = valid & (tl.load(masks + offsets, mask=offsets < rows, other=0) != 0)
        if HAS_WEIGHT:
            known = valid & (y >= 0) & (y < v)
            total += tl.load(weights + y, mask=known, other=0.0).to(tl.float64)
        else:
            total += valid.to(tl.float64)
        some += valid.to(tl.int32)
    tl.store(out, tl.where(tl.sum(some, 0) > 0, 1.0 / tl.sum(total, 0), 1.0))


@triton.jit
def _add_losses(losses, scale, out, rows, BLOCK: tl.constexpr):
    """out = scale * sum(losses), in float64 and a fixed order: one CTA."""
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, rows, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(losses + offsets, mask=offsets < rows, other=0.0).to(tl.float64)
    tl.store(out, tl.sum(total, 0) * tl.load(scale).to(tl.float64))


@triton.jit
def _scale_entries(gradient, scales, size, v, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply in place, grid-stride; a single scale of 1 leaves at once."""
    if not PER_ROW and tl.load(scales) == 1.0:
        return
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < size
        x = tl.load(gradient + offsets, mask=inside)
        times = tl.load(scales + offsets // v, mask=inside) if PER_ROW else tl.load(scales)
        wide = tl.float64 if x.dtype == tl.float64 else tl.float32
        tl.store(gradient + offsets, (x.to(wide) * times.to(wide)).to(x.dtype), mask=inside)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


@dataclass(frozen=True)
class Launch:
    """How a row is worked on: by slices of `block`, or, with `sliced` False, by one CTA."""

    block: int
    warps: int
    sliced: bool = True
    reload: bool = False
    ticket: bool = True
    shift: bool = True  # align rows that start anywhere
    registers: int | None = 128  # at most, of a thread: more CTAs at a time hide each other's waiting


INTERPRETED = not isinstance(_by_slices, triton.runtime.JITFunction)


def choose_launch(v: int, dtype: torch.dtype, processors: int) -> Launch:
    """The fastest way measured on an H200 by benchmarks/kernels.py."""
    block = min(max(64, triton.next_power_of_2(v + 7)), 8192)
    warps = max(1, min(8, block // 512))
    sliced = v + 7 <= block or (not INTERPRETED and triton.cdiv(v + 7, block) <= processors)
    return Launch(block, warps, sliced)


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
    losses = torch.empty(targets.shape, dtype=torch.float64 if wide else torch.float32, device=logits.device)
    lses = torch.empty_like(losses)
    if rows == 0:
        return losses, lses
    x = logits if _has_rows(logits) else logits.contiguous()
    if gradient is not None and not _has_rows(gradient):
        fresh = torch.empty_like(x, memory_format=torch.contiguous_format)
        found = losses_and_gradient(x, targets, mask, weight, options, scale, fresh, launch)
        gradient.copy_(fresh)
        return found
    out = x if gradient is None else gradient
    launch = launch or choose_launch(v, logits.dtype, _processors(logits.device))
    targets = targets.contiguous()
    mask = None if mask is None else mask.to(torch.int8).contiguous()
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
        "SOFTCAP": options.softcap != 0,
        "BLOCK": launch.block,
        "num_warps": launch.warps,
    }
    if launch.registers and not INTERPRETED:
        flags["maxnreg"] = launch.registers
    if not launch.sliced:
        _row_by_row[(rows,)](*arguments, *numbers, **flags)
        return losses, lses
    anywhere = v % 8 != 0 or any(stride % 8 for stride in _row_strides(x))
    shift = launch.shift and anywhere and _are_alike(x, out)
    slices = triton.cdiv(v + 7 if shift else v, launch.block)
    posts = torch.empty(rows * slices * 3 if slices > 1 else 0, dtype=torch.float64, device=x.device)
    counters = torch.zeros(1 + rows if slices > 1 else 1, dtype=torch.int32, device=x.device)
    flags |= {"MANY": slices > 1, "SHIFT": shift, "POSTS": max(64, triton.next_power_of_2(slices))}
    flags |= {"RELOAD": launch.reload, "TICKET": launch.ticket and slices > 1}
    _by_slices[(rows * slices,)](*arguments, posts, counters, *numbers, slices, **flags)
    return losses, lses


def mean_scale(targets: Tensor, mask: Tensor | None, weight: Tensor | None, ignore_index: int) -> Tensor:
    """As `torch_loss.mean_scale`, in one launch."""
    out = torch.empty((), dtype=torch.float64, device=targets.device)
    targets = targets.contiguous()
    mask = None if mask is None else mask.to(torch.int8).contiguous()
    flags = {"HAS_MASK": mask is not None, "HAS_WEIGHT": weight is not None, "BLOCK": 1024}
    v = 0 if weight is None else len(weight)
    _count_valid[(1,)](targets, mask, weight, out, targets.numel(), ignore_index, v, **flags)
    return out


def add_losses(losses: Tensor, scale: Tensor) -> Tensor:
    """scale * sum of the losses."""
    out = torch.empty((), dtype=losses.dtype, device=losses.device)
    _add_losses[(1,)](losses, scale, out, losses.numel(), BLOCK=1024)
    return out


def scale_rows(gradient: Tensor, scale: Tensor) -> None:
    """Multiply contiguous rows (..., V) by one number, or by one each; a single 1 is seen on the device."""
    if not gradient.numel():
        return
    programs = min(triton.cdiv(gradient.numel(), 4096), 8 * _processors(gradient.device))
    flags = {"PER_ROW": scale.dim() > 0, "BLOCK": 4096}
    _scale_entries[(programs,)](gradient, scale.contiguous(), gradient.numel(), gradient.shape[-1], **flags)


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


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
