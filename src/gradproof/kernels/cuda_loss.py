"""Launches cross_entropy.cu: rows of logits that fit into the shared memory of a cluster of CTAs.

Compiled on first use by torch's own run-time compiler, for GPUs with clusters (Hopper and later). What it does
not take (class weights, label smoothing, softcap, float64, short or very long rows) goes to Triton.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from ctypes import addressof, c_double, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gradproof.kernels.loss_options import LossOptions

NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "half"}
ONE_CTA = 104 << 10  # bytes of a row that one CTA takes: two of them share a processor
SHARE = {2: 36 << 10, 4: 72 << 10}  # of a longer row, what a CTA of a cluster takes, by the size of a logit
SHORT = 4096  # bytes of a row that Triton does as fast
TRAITS = (
    "Logit",
    "Gradient",
    "Target",
    "Scale",
    "CLUSTER",
    "THREADS",
    "PIECES",
    "HAS_MASK",
    "PER_ROW",
    "WANT",
)
NON_PORTABLE_CLUSTER = 14  # of the driver's function attributes


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
        or not _has_clusters(x.device)
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
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    lses = torch.empty_like(losses)
    out = x if gradient is None else gradient
    scale = scale.contiguous()
    traits = (
        NAMES[x.dtype],
        NAMES[out.dtype],
        "long long" if targets.dtype == torch.int64 else "int",
        "double" if scale.dtype == torch.float64 else "float",
        plan.cluster,
        plan.threads,
        plan.pieces,
        int(mask is not None),
        int(scale.dim() > 0),
        int(gradient is not None),
    )
    rows = targets.numel()
    kernel = _compiled(traits, plan.shared_bytes, x.device)
    if kernel is None:
        return None
    mask = targets if mask is None else mask
    numbers = (x.shape[-1], rows, _row_stride(x) or 0, _row_stride(out) or 0, options.ignore_index)
    pointers = [c_void_p(t.data_ptr()) for t in (x, out, targets, mask, scale, losses, lses)]
    arguments = (*pointers, *(c_int(number) for number in numbers), c_double(options.z_loss))
    addresses = (c_void_p * len(arguments))(*map(addressof, arguments))
    clusters = -(-rows // max(1, min(plan.rows, rows // 256)))
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    kernel(
        clusters * plan.cluster,
        1,
        1,
        plan.threads,
        1,
        1,
        plan.shared_bytes,
        c_void_p(stream),
        addresses,
        None,
    )
    return losses, lses


@cache
def _compiled(traits: tuple, shared_bytes: int, device: torch.device) -> Callable | None:
    """Launches the kernel for these traits, with the driver's own arguments."""
    source = Path(__file__).with_name("cross_entropy.cu").read_text()
    macros = [f"-D{name}={value}" for name, value in zip(TRAITS, traits, strict=True)]
    try:
        with torch.cuda.device(device):
            kernel = torch.cuda._compile_kernel(source, "cross_entropy", nvcc_options=macros)
            kernel.set_shared_memory_config(shared_bytes)
    except (RuntimeError, OSError, AttributeError) as error:  # no compiler here, or another torch
        warnings.warn(
            f"gradproof's CUDA cross-entropy does not compile here, Triton's is used: {error}", stacklevel=4
        )
        return None
    driver = torch.cuda._utils._get_gpu_runtime_library()
    if traits[4] > 8:
        driver.cuFuncSetAttribute(kernel.func, NON_PORTABLE_CLUSTER, 1)

    def launch(*arguments) -> None:
        if driver.cuLaunchKernel(kernel.func, *arguments):
            raise RuntimeError(f"the CUDA cross-entropy was not launched: {traits}, {shared_bytes} bytes")

    return launch


@cache
def _has_clusters(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(torch.cuda, "_compile_kernel")
    )


def _row_stride(x: Tensor) -> int | None:
    """The distance of the rows of (..., V), if they lie dense and at one distance."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    if x.dim() <= 2:
        return x.stride(-2) if x.dim() == 2 else x.shape[-1]
    return x.stride(-2) if x.is_contiguous() else None
