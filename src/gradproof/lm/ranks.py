"""The processes that train one model together, as `torchrun` starts them; alone, a world of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it keeps the group, and gloo's threads, past the end
from torch import Tensor

from gradproof.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """This process's place: rank of world, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks, the same on each."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.world
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        if self.world == 1:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def joined_ranks(device: str) -> Iterator[Ranks]:
    """Joins the process group that the launcher's environment describes, and leaves it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    place = find_device(device, int(os.environ.get("LOCAL_RANK", "0")) if world > 1 else None)
    if world == 1:
        yield Ranks(0, 1, place)
        return
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Ranks(rank, world, place)
        # gloo's threads may still hold a tensor of the last reduction; freed while Python ends, it aborts the process
        dist.barrier()
    finally:
        dist.destroy_process_group()


def find_device(name: str, local_rank: int | None) -> torch.device:
    """ "auto" is the GPU where there is one; each local rank has its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"no device {name!r}: choose auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("--device cuda, but this PyTorch sees no GPU; use --device cpu")
        if local_rank is not None:
            device = torch.device("cuda", local_rank)
    return device
