"""Compiles the kernels that measure a GPU's tensors before a training needs them.

Triton compiles a kernel where it is first called and keeps it on disk. On a new machine that is four seconds of the
first step. A process of low priority, started beside a training that still imports and loads its data, takes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gradproof import children

GPU = Path("/dev/nvidiactl")
DTYPES = ("float32", "bfloat16", "float16")


def warm_up() -> None:
    """Where it is cold, compile in a process of its own."""
    if is_cold():
        with suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-m", "gradproof.kernels.warm"],
                env=children.environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def is_cold() -> bool:
    """Whether there is a GPU, and no sign that its kernels were compiled by these versions."""
    return GPU.exists() and not _mark().exists()


def hash_beside() -> None:
    """Triton reads all of itself before its first kernel: 0.4 seconds, in a thread, from when CUDA is first used."""
    import torch

    if GPU.exists():
        torch.cuda._lazy_call(_begin_to_hash)


def _begin_to_hash() -> None:
    with suppress(Exception):  # who needs it later works it out later
        from triton.runtime.cache import triton_key

        threading.Thread(target=triton_key, name="gradproof-triton", daemon=True).start()


def compile_kernels() -> None:
    """Measure something small in each way that a training is measured, and leave a sign."""
    import torch

    from gradproof.kernels.tensor_stats import tensor_stats

    if not torch.cuda.is_available():
        return
    for name in DTYPES:
        x = torch.ones(1024, dtype=getattr(torch, name), device="cuda")
        tensor_stats([x])
        tensor_stats([x[1:]])  # not aligned
        tensor_stats([x], [x.clone()])
    torch.cuda.synchronize()
    _mark().parent.mkdir(parents=True, exist_ok=True)
    _mark().touch()


def _mark() -> Path:
    """In Triton's own cache, so that both go together."""
    cache = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(cache) / "-".join(["gradproof", *map(_version, ("gradproof", "torch", "triton"))])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    os.nice(19)
    compile_kernels()
