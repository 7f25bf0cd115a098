"""Which of several processes this is."""

from __future__ import annotations

import os


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are: from torchrun's environment, else from the process group."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
