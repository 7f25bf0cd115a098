"""Compiles a .cu file of this package on first use, by torch's own run-time compiler, and launches its kernels."""

from __future__ import annotations

import warnings
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_uint,
    c_void_p,
    pointer,
)
from functools import cache, lru_cache
from pathlib import Path

import torch

NON_PORTABLE_CLUSTER = 14  # of the driver's function attributes: clusters of more than 8 CTAs
SHARED_BYTES = 8  # the most shared memory of a CTA
NO_CONTEXT = 201  # the driver's error in a thread that has not used the GPU yet
PARAMETERS = c_char_p * 1  # pointers to the arguments, here to one struct


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class _Launch(Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *((name, c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared_bytes")),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("number", c_uint),
    )


EARLY = _Attribute(6, 0, 1)  # programmatic stream serialisation: start while the launch before still runs


def bind_context(driver) -> None:
    """Give a thread that has not used the GPU yet the context that torch uses for the current device."""
    context = c_void_p()
    driver.cuCtxGetCurrent(byref(context))
    if not context:
        driver.cuDevicePrimaryCtxRetain(byref(context), torch.cuda.current_device())
        driver.cuCtxSetCurrent(context)


class Kernel:
    """A compiled kernel whose only parameter is a struct, on one device."""

    def __init__(self, function: c_void_p, threads: int, shared_bytes: int) -> None:
        self._driver = torch.cuda._utils._get_gpu_runtime_library()
        self._function = function
        self._threads, self._shared_bytes = threads, shared_bytes

    def launch(self, ctas: int, arguments: bytes, stream: int, early: bool = False) -> None:
        """On the current device. With `early` it may start before the launch before it has ended."""
        config = _config(ctas, self._threads, self._shared_bytes, stream, early)
        parameters = PARAMETERS(arguments)
        error = self._driver.cuLaunchKernelEx(byref(config), self._function, parameters, None)
        if error == NO_CONTEXT:
            bind_context(self._driver)
            error = self._driver.cuLaunchKernelEx(byref(config), self._function, parameters, None)
        if error:
            raise RuntimeError(
                f"a CUDA kernel was not launched: error {error}, {ctas} CTAs of {self._threads} threads, "
                f"{self._shared_bytes} bytes"
            )


@lru_cache(1024)
def _config(ctas: int, threads: int, shared_bytes: int, stream: int, early: bool) -> _Launch:
    attributes = pointer(EARLY) if early else POINTER(_Attribute)()
    return _Launch(ctas, 1, 1, threads, 1, 1, shared_bytes, stream, attributes, int(early))


@cache
def find_kernel(
    file: str,
    name: str,
    macros: tuple[tuple[str, str | int], ...],
    threads: int,
    shared_bytes: int,
    cluster: int,
    device: torch.device,
) -> Kernel | None:
    """The kernel compiled with these macros; None, after a warning, where it cannot be compiled."""
    source = Path(__file__).with_name(file).read_text()
    options = ["-default-device", *(f"-D{macro}={value}" for macro, value in macros)]
    try:
        with torch.cuda.device(device):
            bind_context(torch.cuda._utils._get_gpu_runtime_library())
            made = torch.cuda._compile_kernel(source, name, nvcc_options=options)
            kernel = Kernel(made.func, threads, shared_bytes)
            if shared_bytes > 48 << 10:
                kernel._driver.cuFuncSetAttribute(made.func, SHARED_BYTES, shared_bytes)
            if cluster > 8:
                kernel._driver.cuFuncSetAttribute(made.func, NON_PORTABLE_CLUSTER, 1)
    except (RuntimeError, OSError, AttributeError) as error:  # no compiler here, or another torch
        warnings.warn(
            f"gradproof's CUDA cross-entropy does not compile here, Triton's is used: {error}", stacklevel=4
        )
        return None
    return kernel
