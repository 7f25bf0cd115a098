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
PROCESSOR = 227 << 10  # bytes of shared memory
REGISTERS = 64  # that a thread should have
SHORT = 4096  # bytes of a row that Triton does as fast
# the structs that the kernels take
LOSS = struct.Struct("9P5id")
COUNT = struct.Struct("3P3i")
SCALING = struct.Struct("2Pq")


@dataclass(frozen=True)
class Plan:
    """A row by `cluster` CTAs of `threads`, each of which takes `pieces` of 16 bytes, `group` at a time.

    A thread has places for `ring` pieces, so that those of later rows are under way while it works on a row. A
    cluster does up to `rows` rows, or as many as there are for it if that is 0.
    """

    cluster: int
    threads: int
    pieces: int
    ring: int
    group: int = 4
    rows: int = 0

    @property
    def shared_bytes(self) -> int:
        return 16 * self.threads * self.ring

    @property
    def ctas(self) -> int:
        """Of a processor."""
        exchanged = 24 * self.cluster * self.threads // 32 + 1100  # and what the GPU takes for itself
        fit = PROCESSOR // (self.shared_bytes + exchanged)
        return max(1, min(fit, 65536 // (REGISTERS * self.threads), 32))


def plan_row(v: int, size: int, aligned: bool) -> Plan | None:
    """The fastest way measured on an H200 for rows of v logits of `size` bytes.

    A row that is not aligned may start inside a piece, and is best kept by one CTA. As many CTAs as possible
    should share a processor; then, as pieces that the row does not have cost as much as others, few of these.
    """
    total = -(-v * size // 16) + (not aligned)
    cluster = 1 if 16 * total <= (ONE_CTA if aligned else 2 * ONE_CTA) else _choose_cluster(16 * total, size)
    if not cluster:
        return None
    threads = {pieces: -(-total // (32 * cluster * pieces)) * 32 for pieces in (20, 16, 12, 8, 4)}
    plans = [Plan(cluster, number, pieces, pieces) for pieces, number in threads.items() if number <= 1024]
    return max(plans, key=lambda plan: (plan.ctas, -plan.shared_bytes, plan.pieces))


def _choose_cluster(row: int, size: int) -> int | None:
    """CTAs for a row of that many bytes."""
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
    """The mean or sum of the losses and the log-sum-exps, in two launches; None where the kernel does not do it.

    The first counts the valid positions, while the second already loads logits.
    """
    plan = find_plan(x, gradient, weight, options) if targets.numel() else None
    kernel = None if plan is None else _loss_kernel(plan, x, targets, mask, gradient, None)
    count = _step_kernel("count_long" if targets.dtype == torch.int64 else "count_int", x.device)
    if plan is None or kernel is None or count is None:
        return None
    rows = targets.numel()
    targets, mask = targets.contiguous(), _as_bytes(mask)
    lses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    shared = torch.empty(4 + rows, dtype=torch.float32, device=x.device)  # of the launches, and the losses
    place, masks = shared.data_ptr(), 0 if mask is None else mask.data_ptr()
    numbers = (rows, options.ignore_index, options.reduction == "mean")
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        count.launch(1, COUNT.pack(targets.data_ptr(), masks, place, *numbers), stream)
        results = (place + 16, lses.data_ptr(), loss.data_ptr(), place)
        arguments = _pack(x, targets, masks, place, results, options, gradient)
        kernel.launch(_ctas(kernel, plan, rows, x.device), arguments, stream, early=True)
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
    results = (losses.data_ptr(), lses.data_ptr(), 0, 0)
    masks = 0 if mask is None else mask.data_ptr()
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        arguments = _pack(x, targets, masks, scale.data_ptr(), results, options, gradient)
        kernel.launch(_ctas(kernel, plan, rows, x.device), arguments, stream)
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
    targets: Tensor,
    masks: int,
    scale: int,
    results: tuple[int, ...],
    options: LossOptions,
    gradient: Tensor | None,
) -> bytes:
    out = x if gradient is None else gradient
    places = (x.data_ptr(), out.data_ptr(), targets.data_ptr(), masks, scale, *results)
    numbers = (x.shape[-1], targets.numel(), _row_stride(x), _row_stride(out), options.ignore_index)
    return LOSS.pack(*places, *numbers, options.z_loss)


def _loss_kernel(
    plan: Plan, x: Tensor, targets: Tensor, mask: Tensor | None, gradient: Tensor | None, scale: Tensor | None
) -> Kernel | None:
    """The kernel for these tensors; without a scale it takes that of a mean or sum from the launch before."""
    entries, stride = 16 // x.element_size(), _row_stride(x) or 0
    return _compiled(
        plan,
        NAMES[x.dtype],
        NAMES[(x if gradient is None else gradient).dtype],
        "long long" if targets.dtype == torch.int64 else "int",
        "float" if scale is not None and scale.dtype == torch.float32 else "double",
        stride % entries > 0 or x.shape[-1] % entries > 0,
        mask is not None,
        scale is not None and scale.dim() > 0,
        gradient is not None,
        scale is None,
        x.device,
    )


@cache
def _compiled(
    plan: Plan,
    logit: str,
    gradient: str,
    target: str,
    scale: str,
    odd: bool,
    has_mask: bool,
    per_row: bool,
    want: bool,
    reduce: bool,
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
        "RING": plan.ring,
        "GROUP": plan.group,
        "CTAS": plan.ctas,
        "ODD": int(odd),
        "HAS_MASK": int(has_mask),
        "PER_ROW": int(per_row),
        "WANT": int(want),
        "REDUCE": int(reduce),
    }
    name = "cross_entropy"
    return find_kernel(
        f"{name}.cu", name, tuple(macros.items()), plan.threads, plan.shared_bytes, plan.cluster, device
    )


def _step_kernel(name: str, device: torch.device) -> Kernel | None:
    return find_kernel("loss_steps.cu", name, (), 1024, 0, 1, device) if has_clusters(device) else None


def _ctas(kernel: Kernel, plan: Plan, rows: int, device: torch.device) -> int:
    """How many to launch: clusters for all rows that `plan.rows` leaves them, or those that run at once."""
    most = -(-rows // plan.rows) if plan.rows else _at_once(kernel, plan, device)
    return plan.cluster * min(rows, most)


@cache
def _at_once(kernel: Kernel, plan: Plan, device: torch.device) -> int:
    """Clusters that run at the same time."""
    found = 0
    if plan.cluster > 1:
        with torch.cuda.device(device):
            found = kernel.clusters_at_once(plan.cluster)
    return found or max(1, plan.ctas * processors(device) // plan.cluster)


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
