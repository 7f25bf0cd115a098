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
from gradproof.check.gradient import GradientCheck, GradientMismatch, check_gradient
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
    """Check what `FILE.py:NAME` names."""
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise UserError(f"cannot read {target!r}; write FILE.py:NAME, e.g. kernels.py:attention")
    module = _load(Path(path))
    inputs = _inputs(module, path, name, specs, seed)
    try:
        return FileCheck(target, _check(module, path, name, inputs), None)
    except GradientMismatch as mismatch:
        return FileCheck(target, None, mismatch)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
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
    target = getattr(module, name, None)
    if target is None and pair[0] is not None and pair[1] is not None:
        return check_backward(pair[0], pair[1], *inputs)
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        target = target()
    if not callable(target):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{path} has no function {name}; it has {', '.join(names[:12]) or 'none at all'}")
    return check_gradient(target, *inputs, name=name)
