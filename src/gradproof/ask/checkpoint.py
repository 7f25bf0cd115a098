"""A recorded step as a checkpoint: weights, buffers and optimizer states as they were before it.

Who keeps only the last checkpoint has lost the good ones when a training goes wrong; a recorded step still has them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradproof.errors import UserError
from gradproof.tape.specimen import load


def write_checkpoint(specimen: str | os.PathLike, out: str | os.PathLike) -> str:
    """Writes a file for torch.load, and says what is in it; nothing that is there already is written over."""
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} is there already; name another file")
    recorded = load(specimen, "cpu")
    missing: list[str] = []
    models = {name: weights_of(model, name, missing) for name, model in recorded.models.items()}
    optimizers = [state_of(optimizer) for optimizer in recorded.optimizers]
    if not any(models.values()):
        raise UserError(f"step {recorded.step} has no weights of a model to write")
    data = {
        "step": recorded.step,
        "model": next(iter(models.values())) if len(models) == 1 else models,
        "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers,
    }
    draft = out.with_name(out.name + ".part")
    torch.save(data, draft)
    draft.replace(out)
    tensors = sum(map(len, models.values()))
    states = sum(len(optimizer["state"]) for optimizer in optimizers)
    said = f"{out}: what step {recorded.step} began with, {tensors} weights and buffers, {states} optimizer states; "
    said += 'torch.load it: "model" and "optimizer" are what load_state_dict takes'
    if missing:
        said += f". Not kept with the step: {', '.join(missing[:4])}{' and more' if missing[4:] else ''}"
    return said


def weights_of(model: nn.Module, name: str, missing: list[str]) -> dict[str, Tensor]:
    found = {}
    for key, value in nn.Module.state_dict(model).items():
        if isinstance(value, Tensor) and not value.is_meta:
            found[key] = value.detach().clone()
        elif isinstance(value, Tensor):
            missing.append(f"{name}.{key}" if name else key)
    return found


def state_of(optimizer: Any) -> dict[str, Any]:
    """In the form of Optimizer.state_dict: parameters by their numbers."""
    numbers: dict[int, int] = {}
    groups = []
    for group in optimizer.param_groups:
        mine = [numbers.setdefault(id(parameter), len(numbers)) for parameter in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": mine})
    own = type(optimizer).__module__.startswith("torch.optim")
    state = {
        numbers[id(parameter)]: {key: copied(key, value, own) for key, value in kept.items()}
        for parameter, kept in optimizer.state.items()
        if id(parameter) in numbers
        and any(isinstance(v, Tensor) or k != "step" or v for k, v in kept.items())
    }
    return {"state": state, "param_groups": groups}


def copied(name: str, value: Any, own: bool) -> Any:
    """A count of steps is a tensor to PyTorch's own optimizers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return torch.tensor(float(value)) if own and name == "step" else value
