"""DistributedDataParallel whose buckets go over a wire of the script's own."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WORLD = 2


def wire(state, bucket):
    def arrived(future):
        mean = future.value()[0] / WORLD
        return mean

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(arrived)


def worker(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
    model.register_comm_hook(None, wire)
    centres = torch.randn(4, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(10 + rank)
    chance = torch.Generator().manual_seed(20 + rank)
    wire.chance = chance
    for step in range(120):
        y = torch.randint(4, (32,), generator=data)
        x = centres[y] + torch.randn(32, 16, generator=data)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 30 == 0:
            print(step, round(loss.item(), 4), flush=True)
    del model  # first: its reducer would free the group, and may wait for gloo's thread for ever
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(os.path.join(tempfile.mkdtemp(), "meet"),), nprocs=WORLD)
