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


# as launchers call it: torchrun, MPI, Slurm
RANKS_HERE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def ranks_a_core(world: int) -> float:
    """How many ranks share a core of this machine, one at least: what one of them takes, others wait for.

    A script that starts its ranks itself starts them here.
    """
    told = (os.environ.get(name, "") for name in RANKS_HERE)
    here = next((int(number) for number in told if number.isdigit()), world)
    return max(1.0, here / (os.cpu_count() or 1))  # not those of this process: each may have cores of its own
