"""gradproof finds out why a neural network does not train, and proves it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker sees; `_HOME` is the same for Python, and a test compares the two
    from gradproof.ask.opened import open as open
    from gradproof.check.backward import check_backward as check_backward
    from gradproof.check.dump import dump_step as dump_step
    from gradproof.check.findings import KernelFault as KernelFault
    from gradproof.check.gradient import GradientMismatch as GradientMismatch
    from gradproof.check.gradient import check_gradient as check_gradient
    from gradproof.check.implementation import compare as compare
    from gradproof.check.kernel import check_kernel as check_kernel
    from gradproof.check.module import check_module as check_module
    from gradproof.check.training import check_training as check_training
    from gradproof.diagnosis.ranking import diagnose as diagnose
    from gradproof.kernels.cross_entropy import cross_entropy as cross_entropy
    from gradproof.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from gradproof.probes.watch import watch as watch
    from gradproof.record.run import open_run as open_run

__version__ = "0.1.0"

# name -> the module that defines it, imported on first use: `import gradproof` must not import torch
_HOME = {
    "watch": "gradproof.probes.watch",
    "diagnose": "gradproof.diagnosis.ranking",
    "open_run": "gradproof.record.run",
    "open": "gradproof.ask.opened",
    "cross_entropy": "gradproof.kernels.cross_entropy",
    "linear_cross_entropy": "gradproof.kernels.linear_cross_entropy",
    "check_gradient": "gradproof.check.gradient",
    "check_module": "gradproof.check.module",
    "check_backward": "gradproof.check.backward",
    "check_training": "gradproof.check.training",
    "dump_step": "gradproof.check.dump",
    "check_kernel": "gradproof.check.kernel",
    "compare": "gradproof.check.implementation",
    "GradientMismatch": "gradproof.check.gradient",
    "KernelFault": "gradproof.check.findings",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradproof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext gradproof`, in a notebook."""
    import_module("gradproof.notebook").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    import_module("gradproof.notebook").unload(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
