"""Sharded models (FSDP2, tensor parallel) on a tape: what a rank holds of a tensor, and what is no part of its step.

A rank's step is made of plain tensors. FSDP gathers whole parameters before a layer runs: those are leaves, named as
the parameters they are. Of a tensor-parallel layer a rank holds a part: that is the leaf. What other ranks have sent is
kept as it came, so that nobody has to send it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gradproof.tape.tensors import tensors_in

# FSDP2 says in the profiler's words what it is doing: gathering, and passing gradients on, are conversations of ranks
TALKS = ("FSDP::all_gather", "FSDP::pre_", "FSDP::post_", "FSDP::root_post_")
GATHERED, PARTS = "gathered", "parts"


def is_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    return any(hasattr(tensor, "to_local") for tensor in tensors)


def parts_of(tensor: torch.Tensor) -> int:
    """Of a sharded tensor: into how many different parts it is cut; each may lie on several ranks. 0 of any other."""
    if not hasattr(tensor, "to_local"):
        return 0
    placements = enumerate(tensor.placements)  # type: ignore[attr-defined]
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return math.prod(mesh.size(d) for d, placement in placements if not placement.is_replicate())


def is_flat(parameters: Iterable[torch.Tensor], models: Iterable[torch.nn.Module]) -> bool:
    """FSDP1: its flat parameter is given other memory, and none, behind everybody's back."""
    names = (type(module).__name__ for model in models for module in model.modules())
    flat = any(getattr(parameter, "_is_flat_param", False) for parameter in parameters)
    return flat or "FullyShardedDataParallel" in names


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds: of a DTensor its part, of a result that is still on its way the memory that it comes to."""
    while hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        inner = [part for part in parts if isinstance(part, torch.Tensor)]
        if len(inner) != 1:
            break
        tensor = inner[0]
    return tensor


def is_hypothetical(types: Iterable[type], args: tuple, kwargs: dict) -> bool:
    """DTensors find out what an operation would make of shapes, by tensors that hold nothing: that is no operation."""
    if any(kind.__name__ == "FakeTensor" for kind in types):
        return True
    first = next(iter(tensors_in(args)), None)
    device = kwargs.get("device") if first is None else first.device
    return device is not None and torch.device(device).type == "meta"


class Talk:
    """Whether FSDP talks to the other ranks now, by the ranges that it opens and closes for the profiler."""

    def __init__(self) -> None:
        self.depth = 0

    def hear(self, name: str, args: tuple) -> bool:
        """An operation of the profiler has run; whether it told of such a talk."""
        if name.startswith("_record_function_enter"):
            begins = bool(args) and isinstance(args[0], str) and args[0].startswith(TALKS)
            self.depth += self.depth > 0 or begins
            return begins
        if name == "_record_function_exit":
            self.depth -= self.depth > 0
        return False
