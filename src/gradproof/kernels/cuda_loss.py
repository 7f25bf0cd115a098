"""Launches cross_entropy.cu: rows of logits that fit into the shared memory of a cluster of CTAs.

For GPUs with clusters (Hopper and later). What it does not take (class weights, label smoothing, softcap, float64,
short or very long rows) goes to Triton. Nothing here waits for the device, and a CUDA graph can hold all of it.
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
ONE_CTA = 104 << 10  # bytes of a row that one CTA takes: two of them share a processor
SHARE = {2: 36 << 10, 4: 72 << 10}  # of a longer row, what a CTA of a cluster takes, by the size of a logit
SHORT = 4096  # bytes of a row that Triton does as fast
# the structs that the kernels take
LOSS = struct.Struct("7P5id")
COUNT = struct.Struct("3P3i0P")
LOSSES = struct.Struct("3Pi0P")
SCALING = struct.Struct("2Pq")


@dataclass(frozen=True)
class Plan:
    """A row by `cluster` CTAs of `threads`, each of which keeps `pieces` of 16 bytes; a cluster does up to
    `rows` rows, asking for the next while it works on one."""

    cluster: int
    threads: int
    pieces: int
    rows: int

    @property
    def shared_bytes(self) -> int:
        return 16 * self.threads * self.pieces


def plan_row(v: int, size: int, aligned: bool) -> Plan | None:
    """The fastest way measured on an H200 for rows of v logits of `size` bytes.

    A row that is not aligned may start inside a piece, and is best kept by one CTA. Pieces that the row does not
    have cost as much as others, so that as many threads are taken as leave few of them.
    """
    total = -(-v * size // 16) + (not aligned)
    cluster = 1 if 16 * total <= (ONE_CTA if aligned else 2 * ONE_CTA) else _choose_cluster(16 * total, size)
    if not cluster:
        return None
    plans = []
    for pieces in (20, 16, 12, 8, 4):
        threads = -(-total // (32 * cluster * pieces)) * 32
        if threads <= 1024:
            plans.append(Plan(cluster, threads, pieces, min(cluster, 4)))
    least = min(plan.shared_bytes for plan in plans)
    return next(plan for plan in plans if plan.shared_bytes <= 1.02 * least)


def _choose_cluster(row: int, size: int) -> int | None:
    """CTAs for a row of that many bytes; clusters of 16 are the slowest to be placed."""
    shares = [
        (2, SHARE[size]),
        (4, SHARE[size]),
        (8, SHARE[size]),
        (8, SHARE[4]),
        (16, SHARE[4]),
        (16, 2 * ONE_CTA),
    ]
    return next((cluster for cluster, share in shares if row <= cluster * share), None)


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
    out = x if gradient is None else gradient
    entries = 16 // x.element_size()
    stride, out_stride = _row_stride(x), _row_stride(out)
    if stride is None or out_stride is None or (stride - out_stride) % entries:
        return None
    if out.dtype != x.dtype and (x.dtype != torch.float32 or out.dtype not in NAMES):
        return None
    if x.data_ptr() % 16 or out.data_ptr() % (entries * out.element_size()):
        return None
    if x.shape[-1] * x.element_size() < SHORT:
        return None
    return plan_row(x.shape[-1], x.element_size(), stride % entries == 0)


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
    rows, scale = targets.numel(), torch.empty((), dtype=torch.float64, device=x.device)
    kernel = _loss_kernel(plan, x, targets, mask, gradient, scale)
    count = _step_kernel("count_long" if targets.dtype == torch.int64 else "count_int", x.device)
    add = _step_kernel("add_losses", x.device)
    if kernel is None or count is None or add is None:
        return None
    targets, mask = targets.contiguous(), _as_bytes(mask)
    masks = 0 if mask is None else mask.data_ptr()
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    lses, loss = torch.empty_like(losses), losses.new_empty(())
    places = (targets.data_ptr(), masks, scale.data_ptr())
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        count.launch(1, COUNT.pack(*places, rows, options.ignore_index, options.reduction == "mean"), stream)
        arguments = _pack(x, places, losses, lses, options, gradient)
        kernel.launch(_ctas(plan, rows), arguments, stream, early=True)
        arguments = LOSSES.pack(losses.data_ptr(), scale.data_ptr(), loss.data_ptr(), rows)
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
    kernel = _loss_kernel(plan, x, targets, mask, gradient, scale)
    if kernel is None:
        return None
    rows = targets.numel()
    targets, mask = targets.contiguous(), _as_bytes(mask)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    lses = torch.empty_like(losses)
    places = (targets.data_ptr(), 0 if mask is None else mask.data_ptr(), scale.data_ptr())
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        kernel.launch(_ctas(plan, rows), _pack(x, places, losses, lses, options, gradient), stream)
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
        kernel.launch(2 * processors(gradient.device), arguments, stream)
    return True


def _pack(
    x: Tensor,
    places: tuple[int, int, int],
    losses: Tensor,
    lses: Tensor,
    options: LossOptions,
    gradient: Tensor | None,
) -> bytes:
    """The kernel's arguments; `places` are those of the targets, the mask and the scale."""
    out = x if gradient is None else gradient
    pointers = (x.data_ptr(), out.data_ptr(), *places, losses.data_ptr(), lses.data_ptr())
    numbers = (x.shape[-1], losses.numel(), _row_stride(x), _row_stride(out), options.ignore_index)
    return LOSS.pack(*pointers, *numbers, options.z_loss)


def _loss_kernel(
    plan: Plan, x: Tensor, targets: Tensor, mask: Tensor | None, gradient: Tensor | None, scale: Tensor
) -> Kernel | None:
    return _compiled(
        plan,
        NAMES[x.dtype],
        NAMES[(x if gradient is None else gradient).dtype],
        "long long" if targets.dtype == torch.int64 else "int",
        "double" if scale.dtype == torch.float64 else "float",
        mask is not None,
        scale.dim() > 0,
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
        "PIECES": plan.pieces,
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
        and torch.cuda.get_device_capability(device) >= (9, 0)
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
