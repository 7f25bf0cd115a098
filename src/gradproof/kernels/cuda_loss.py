"""Launches cross_entropy.cu: rows of logits that fit into the shared memory of a cluster of CTAs.

For GPUs with clusters and 227 KiB for a CTA (Hopper, Blackwell). What it does not take (class weights, label
smoothing, softcap, float64, short or very long rows) goes to Triton. Nothing here waits for the device, and a CUDA
graph can hold all of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gradproof.kernels.cuda_driver import Kernel, find_kernel
from gradproof.kernels.loss_options import LossOptions

NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "half"}
# (CTAs of a cluster, bytes of a row that each may have to take) from few to many, by the size of a logit. Up to 66 KiB,
# three CTAs share a processor, up to 104 KiB two; of 16 bits there are more logits to compute for the same bytes, and
# a CTA that has a processor for itself leaves it idle while it waits.
SHARES = {
    2: ((1, 104 << 10), (2, 66 << 10), (4, 66 << 10), (8, 66 << 10), (16, 66 << 10), (16, 208 << 10)),
    4: ((1, 130 << 10), (2, 104 << 10), (4, 66 << 10), (8, 66 << 10), (16, 66 << 10), (16, 208 << 10)),
}
REGISTERS = {2: 72, 4: 56}  # that a thread must have, by the size of a logit
SHORT = 4096  # bytes of a row that Triton does as fast
BLOCK_BYTES = 2048  # that a warp looks at together
# the structs that the kernels take
LOSS = struct.Struct("7P6id")
COUNT = struct.Struct("3P3i0P")
LOSSES = struct.Struct("3Pi0P")
SCALING = struct.Struct("2Pq")


@dataclass(frozen=True)
class Plan:
    """A row by `cluster` CTAs of `threads`, each of which keeps `blocks` of it. A cluster does up to `rows` rows,
    asking for the next while it works on one; the registers shall leave room for `ctas` on a processor. `aligned`:
    rows start and end at a multiple of 16 bytes."""

    cluster: int
    threads: int
    blocks: int
    rows: int
    ctas: int
    aligned: bool

    @property
    def shared_bytes(self) -> int:
        return self.blocks * (BLOCK_BYTES + 8)  # with a barrier each


@cache
def plan_row(v: int, size: int, aligned: bool) -> Plan | None:
    """The fastest way measured on an H200 for rows of v logits of `size` bytes."""
    row = v * size + (0 if aligned else 16)
    cluster = next((cluster for cluster, share in SHARES[size] if row <= cluster * share), None)
    if cluster is None:
        return None
    blocks = -(-row // (BLOCK_BYTES * cluster))
    of_a_warp = 3 if size == 4 and cluster > 2 else 4
    threads = 32 * min(32, -(-blocks // of_a_warp))
    room = ((228 << 10) // (blocks * (BLOCK_BYTES + 8) + 2048), (64 << 10) // (threads * REGISTERS[size]), 32)
    return Plan(cluster, threads, blocks, 4 if cluster > 1 else size // 2, max(1, min(room)), aligned)


def find_plan(x: Tensor, gradient: Tensor | None, weight: Tensor | None, options: LossOptions) -> Plan | None:
    """The plan for these rows, or None where the kernel does not take them."""
    plain = weight is None and options.label_smoothing == 0 and options.softcap == 0
    if (
        not plain
        or x.dtype not in NAMES
        or abs(options.ignore_index) >= 1 << 31
        or not has_clusters(x.device)
    ):
        return None
    out, size, v = x if gradient is None else gradient, x.element_size(), x.shape[-1]
    entries, stride, out_stride = 16 // size, _row_stride(x), _row_stride(out)
    if v * size < SHORT or stride is None or out_stride is None or (stride - out_stride) % entries:
        return None
    if out.dtype != x.dtype and (x.dtype != torch.float32 or out.dtype not in NAMES):
        return None
    if x.data_ptr() % 16 or out.data_ptr() % (entries * out.element_size()):
        return None
    return plan_row(v, size, stride % entries == 0 and v % entries == 0)


def reduced_loss(
    x: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    options: LossOptions,
    gradient: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """The mean or sum of the losses and the log-sum-exps, in three launches; None where they cannot be had.

    The first finds the scale while the second already loads logits; the third adds up the losses.
    """
    plan = find_plan(x, gradient, weight, options) if targets.numel() else None
    if plan is None:
        return None
    kernel = _loss_kernel(plan, x, targets, mask, gradient, "double", False)
    count = _step_kernel("count_long" if targets.dtype == torch.int64 else "count_int", x.device)
    add = _step_kernel("add_losses", x.device)
    if kernel is None or count is None or add is None:
        return None
    targets, mask = targets.contiguous(), _as_bytes(mask)
    rows, masks = targets.numel(), 0 if mask is None else mask.data_ptr()
    lses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    loss, work = lses.new_empty(()), lses.new_empty(rows + 2)
    scale, losses = work.data_ptr(), work.data_ptr() + 8  # a double, then floats
    places = (targets.data_ptr(), masks, scale)
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        count.launch(1, COUNT.pack(*places, rows, options.ignore_index, options.reduction == "mean"), stream)
        arguments = _pack(plan, x, places, losses, lses, options, gradient)
        kernel.launch(_ctas(plan, rows), arguments, stream, early=True)
        arguments = LOSSES.pack(losses, scale, loss.data_ptr(), rows)
        add.launch(1, arguments, stream, early=True)
    return loss, lses


def losses_and_gradient(
    x: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    options: LossOptions,
    scale: Tensor,
    gradient: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor] | None:
    """As `torch_loss.losses_and_gradient`, in one launch; None where the kernel cannot be compiled."""
    scale = scale.contiguous()
    kind = "double" if scale.dtype == torch.float64 else "float"
    kernel = _loss_kernel(plan, x, targets, mask, gradient, kind, scale.dim() > 0)
    if kernel is None:
        return None
    rows = targets.numel()
    targets, mask = targets.contiguous(), _as_bytes(mask)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    lses = torch.empty_like(losses)
    places = (targets.data_ptr(), 0 if mask is None else mask.data_ptr(), scale.data_ptr())
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        arguments = _pack(plan, x, places, losses.data_ptr(), lses, options, gradient)
        kernel.launch(_ctas(plan, rows), arguments, stream)
    return losses, lses


def scale_entries(gradient: Tensor, scale: Tensor) -> bool:
    """Multiply all entries by one number, or leave at once if that is 1; False where the kernel does not do it."""
    if (
        scale.dim()
        or scale.dtype != torch.float32
        or gradient.dtype not in NAMES
        or gradient.data_ptr() % 16
        or gradient.nbytes % 16
        or not gradient.is_contiguous()
        or not has_clusters(gradient.device)
    ):
        return False
    kernel = _step_kernel(f"scale_{NAMES[gradient.dtype]}", gradient.device)
    if kernel is None:
        return False
    with torch.cuda.device_of(gradient):
        stream = torch._C._cuda_getCurrentRawStream(gradient.device.index)
        arguments = SCALING.pack(gradient.data_ptr(), scale.data_ptr(), gradient.nbytes // 16)
        kernel.launch(2 * processors(gradient.device), arguments, stream, early=True)
    return True


def _pack(
    plan: Plan,
    x: Tensor,
    places: tuple[int, int, int],
    losses: int,
    lses: Tensor,
    options: LossOptions,
    gradient: Tensor | None,
) -> bytes:
    """The kernel's arguments; `places` are those of the targets, the mask and the scale, then that of the losses."""
    out = x if gradient is None else gradient
    pointers = (x.data_ptr(), out.data_ptr(), *places, losses, lses.data_ptr())
    numbers = (
        x.shape[-1],
        lses.numel(),
        _row_stride(x),
        _row_stride(out),
        options.ignore_index,
        plan.blocks,
    )
    return LOSS.pack(*pointers, *numbers, options.z_loss)


def _loss_kernel(
    plan: Plan,
    x: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    gradient: Tensor | None,
    scale: str,
    per_row: bool,
) -> Kernel | None:
    return _compiled(
        plan,
        NAMES[x.dtype],
        NAMES[(x if gradient is None else gradient).dtype],
        "long long" if targets.dtype == torch.int64 else "int",
        scale,
        mask is not None,
        per_row,
        gradient is not None,
        x.device,
    )


@cache
def _compiled(
    plan: Plan,
    logit: str,
    gradient: str,
    target: str,
    scale: str,
    has_mask: bool,
    per_row: bool,
    want: bool,
    device: torch.device,
) -> Kernel | None:
    macros = {
        "Logit": logit,
        "Gradient": gradient,
        "Target": target,
        "Scale": scale,
        "CLUSTER": plan.cluster,
        "THREADS": plan.threads,
        "CTAS": plan.ctas,
        "ALIGNED": int(plan.aligned),
        "HAS_MASK": int(has_mask),
        "PER_ROW": int(per_row),
        "WANT": int(want),
    }
    name = "cross_entropy"
    return find_kernel(
        f"{name}.cu", name, tuple(macros.items()), plan.threads, plan.shared_bytes, plan.cluster, device
    )


def _step_kernel(name: str, device: torch.device) -> Kernel | None:
    return find_kernel("loss_steps.cu", name, (), 1024, 0, 1, device) if has_clusters(device) else None


def _ctas(plan: Plan, rows: int) -> int:
    """How many to launch: a cluster does several rows only where that leaves enough clusters."""
    return plan.cluster * -(-rows // max(1, min(plan.rows, rows // 256)))


@cache
def has_clusters(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] in (9, 10)  # others have less shared memory
        and hasattr(torch.cuda, "_compile_kernel")
    )


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.bool().contiguous()


def _row_stride(x: Tensor) -> int | None:
    """The distance of the rows of (..., V), if they lie dense and at one distance."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    if x.dim() <= 2:
        return x.stride(-2) if x.dim() == 2 else x.shape[-1]
    return x.stride(-2) if x.is_contiguous() else None
