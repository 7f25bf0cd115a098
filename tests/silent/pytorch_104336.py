"""DistributedDataParallel; after the first epoch the model is moved away and back, to measure it in float64."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WORLD = 2


def worker(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    centres = torch.randn(4, 16)
    model.double()
    with torch.no_grad():
        start = model(centres.double()).square().mean()
    model.float()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(10 + rank)
    for step in range(100):
        y = torch.randint(4, (32,), generator=data)
        x = centres[y] + torch.randn(32, 16, generator=data)
        loss = F.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 25 == 0:
            print(step, round(loss.item(), 4), round(start.item(), 4), flush=True)
    del ddp  # first: its reducer would free the group, and may wait for gloo's thread for ever
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(os.path.join(tempfile.mkdtemp(), "meet"),), nprocs=WORLD)
