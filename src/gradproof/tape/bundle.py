"""A bad operation as a directory: operands, description, a script that reproduces it without the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gradproof.errors import UserError
from gradproof.tape.locate import FirstBad
from gradproof.tape.operations import Ref, Tape, references
from gradproof.tape.player import Player

SCRIPT = '''"""Reproduces the first bad operation of a training step: python reproduce.py"""

import json
import pathlib

import torch
from safetensors.torch import load_file

here = pathlib.Path(__file__).parent
about = json.loads((here / "operation.json").read_text())
tensors = load_file(str(here / "operands.safetensors"))


def value(part):
    """An argument as it was: tensors by name, PyTorch's own words by attribute, the rest as written."""
    if isinstance(part, list):
        return [value(item) for item in part]
    if not isinstance(part, dict):
        return part
    if "tensor" in part:
        return tensors[part["tensor"]].as_strided(part["size"], part["stride"])
    if "torch" in part:
        return getattr(torch, part["torch"])
    if "float" in part:
        return float(part["float"])
    return torch.device(part["device"])


def flatten(result):
    return [result] if isinstance(result, torch.Tensor) else [t for r in result or () for t in flatten(r)]


namespace, name, overload = about["operator"]
operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
args = [value(part) for part in about["args"]]
kwargs = {key: value(part) for key, part in about["kwargs"].items()}
for key, tensor in tensors.items():
    if tensor.is_floating_point():
        print(f"{key}: {tensor.dtype}{list(tensor.shape)} from {tensor.min():.4g} to {tensor.max():.4g}")
result = operator(*args, **kwargs)
changed = [args[place] for place in about["writes"]]
made = [tensor for tensor in flatten(result) + flatten(changed) if tensor.is_floating_point()]
bad = sum(int((~torch.isfinite(tensor)).sum()) for tensor in made)
print(f"{namespace}.{name}.{overload}: {bad} results are not finite; in the run: {about['count']}")
print(about["place"])
raise SystemExit(0 if bad else 1)
'''


def write_bundle(tape: Tape, bad: FirstBad, directory: str | Path) -> Path:
    """Writes operands.safetensors, operation.json and reproduce.py of a located operation."""
    from safetensors.torch import save_file

    index = bad.index
    if index < 0:  # a leaf was bad already: the operation that reads it first
        where = [
            op.index
            for op in tape.operations
            if any(tape.slots[s].name in bad.why for s in op.reads if tape.slots[s].name)
        ]
        index = where[0] if where else -1
    operation = tape.operations[index] if index >= 0 else None
    if operation is None or not hasattr(operation.func, "_schema") or bad.kind == "memory never written":
        raise UserError(
            f"{bad.operator} at {bad.line} cannot be bundled alone: it is no single operator with operands"
        )
    player = Player(tape, None, None)
    player.play(tape.operations[:index], keep_for=operation)
    tensors: dict[str, torch.Tensor] = {}
    described = {
        slot: _describe(player.value(slot), tensors)
        for slot in {ref.slot for ref in references((operation.args, operation.kwargs))}
    }
    schema = operation.func._schema
    about = {
        "operator": [*schema.name.split("::"), schema.overload_name or "default"],
        "args": _encode(operation.args, described),
        "kwargs": _encode(operation.kwargs, described),
        "writes": [
            i
            for i, a in enumerate(schema.arguments[: len(operation.args)])
            if a.alias_info and a.alias_info.is_write
        ],
        "count": bad.count,
        "place": tape.place(operation),
        "why": bad.why,
        "torch": torch.__version__,
    }
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "operands.safetensors"))
    (path / "operation.json").write_text(json.dumps(about, indent=1, allow_nan=False))
    (path / "reproduce.py").write_text(SCRIPT)
    return path


def _describe(value: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict:
    """A tensor goes to disk densely, in the memory order it had."""
    name = f"operand{len(tensors)}"
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    dense = value.detach().cpu().permute(order).contiguous()
    tensors[name] = dense.clone()
    strides = [0] * value.dim()
    for place, dim in enumerate(order):
        strides[dim] = dense.stride(place)
    return {"tensor": name, "size": list(value.shape), "stride": strides}


def _encode(part: Any, described: dict[int, dict]) -> Any:
    if isinstance(part, Ref):
        return described[part.slot]
    if isinstance(part, (list, tuple)):
        return [_encode(item, described) for item in part]
    if isinstance(part, dict):
        return {key: _encode(item, described) for key, item in part.items()}
    if isinstance(part, float) and part - part != 0:
        return {"float": str(part)}
    if isinstance(part, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(part).removeprefix("torch.")}
    if isinstance(part, torch.device):
        return {"device": "cpu"}
    return part
