"""gradproof finds out why a neural network does not train, and proves it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name -> the module that defines it, imported on first use: `import gradproof` must not import torch
_HOME = {
    "watch": "gradproof.commands.attaching",
    "diagnose": "gradproof.diagnosis.ranking",
    "open_run": "gradproof.record.run",
    "cross_entropy": "gradproof.kernels.cross_entropy",
    "linear_cross_entropy": "gradproof.kernels.linear_cross_entropy",
    "check_gradient": "gradproof.check.gradient",
    "check_module": "gradproof.check.module",
    "check_backward": "gradproof.check.backward",
    "compare": "gradproof.check.implementation",
    "GradientMismatch": "gradproof.check.gradient",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gradproof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
