"""`gradproof check FILE.py:NAME`: find a function and its inputs in a file, check it, report it."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gradproof.check.backward import check_backward
from gradproof.check.example import example_tensor
from gradproof.check.findings import KernelCheck
from gradproof.check.gradient import GradientCheck, GradientMismatch, check_gradient
from gradproof.check.kernel import find_kernel_faults
from gradproof.errors import UserError


@dataclass(frozen=True)
class FileCheck:
    """The outcome of a check from the shell: one of the two is set."""

    target: str
    check: GradientCheck | None
    mismatch: GradientMismatch | None

    @property
    def verdict(self) -> str:
        if self.check is None:
            return "wrong"
        return "right" if self.check.decided else "undecided"

    @property
    def exit_code(self) -> int:
        return {"right": 0, "wrong": 1, "undecided": 2}[self.verdict]

    def __str__(self) -> str:
        return str(self.check or self.mismatch)

    def as_json(self) -> str:
        found: dict[str, Any] = {"target": self.target, "verdict": self.verdict}
        if self.check is not None:
            found |= asdict(self.check)
        if self.mismatch is not None:
            found |= {"name": self.mismatch.name, "notes": self.mismatch.notes} | asdict(
                self.mismatch.culprit
            )
        return json.dumps(_finite(found), indent=2)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no inf; they are written as text."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_file(target: str, specs: Sequence[str] | None, seed: int) -> FileCheck:
    """Check the gradient of what `FILE.py:NAME` names."""
    module, path, name = _named(target)
    inputs = _inputs(module, path, name, specs, seed)
    try:
        return FileCheck(target, _check(module, path, name, inputs), None)
    except GradientMismatch as mismatch:
        return FileCheck(target, None, mismatch)


def check_kernel_file(target: str, specs: Sequence[str] | None, seed: int) -> KernelCheck:
    """Try what `FILE.py:NAME` names as a black box; NAME may be an optimizer, which needs no inputs."""
    module, path, name = _named(target)
    kernel = _target(module, path, name)
    optimizer = isinstance(kernel, torch.optim.Optimizer) or (
        isinstance(kernel, type) and issubclass(kernel, torch.optim.Optimizer)
    )
    inputs = () if optimizer and not specs else _inputs(module, path, name, specs, seed)
    reference = getattr(module, f"reference_{name}", None)
    return find_kernel_faults(kernel, *inputs, reference=reference, name=name)


def _named(target: str) -> tuple[ModuleType, str, str]:
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise UserError(f"cannot read {target!r}; write FILE.py:NAME, e.g. kernels.py:attention")
    return load_file(Path(path)), path, name


def load_file(path: Path) -> ModuleType:
    """A Python file as a module, with what stands beside it importable."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; write FILE.py:NAME, from the directory that you are in")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; write FILE.py:NAME, e.g. kernels.py:attention")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and Triton look a function's module up by its name
    sys.path.insert(
        0, str(path.parent.resolve())
    )  # what stands beside the file can be imported, as in a script
    spec.loader.exec_module(module)
    return module


def _inputs(module: ModuleType, path: str, name: str, specs: Sequence[str] | None, seed: int) -> tuple:
    if specs:
        generator = torch.Generator().manual_seed(seed)
        return tuple(example_tensor(spec, generator) for spec in specs)
    given = getattr(module, "example_inputs", None)
    if isinstance(given, dict):
        given = given.get(name)
    given = given() if callable(given) else given
    if given is None:
        raise UserError(
            f"{path} has no example_inputs for {name}; "
            "add one (a tuple of tensors), or say --input 'float64[4,8]'"
        )
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _check(module: ModuleType, path: str, name: str, inputs: tuple) -> GradientCheck:
    pair = [getattr(module, f"{name}_{way}", None) for way in ("forward", "backward")]
    if getattr(module, name, None) is None and pair[0] is not None and pair[1] is not None:
        return check_backward(pair[0], pair[1], *inputs)
    return check_gradient(_target(module, path, name), *inputs, name=name)


def _target(module: ModuleType, path: str, name: str) -> Any:
    """The function, Function, module or optimizer of a name; a module's class is made without arguments."""
    target = getattr(module, name, None)
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        target = target()
    if not callable(target) and not isinstance(target, torch.optim.Optimizer):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{path} has no function {name}; it has {', '.join(names[:12]) or 'none at all'}")
    return target
