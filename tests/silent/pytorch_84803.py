"""Data parallel by hand: gradients are averaged over two ranks by all_reduce."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORLD = 2


def reduce(tensor):
    dist.all_reduce(tensor)
    return tensor


def worker(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    centres = torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(10 + rank)
    for step in range(120):
        y = torch.randint(4, (32,), generator=data)
        x = centres[y] + torch.randn(32, 16, generator=data)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            reduce(p.grad).div_(WORLD)
        optimizer.step()
        if rank == 0 and step % 30 == 0:
            print(step, round(loss.item(), 4), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(os.path.join(tempfile.mkdtemp(), "meet"),), nprocs=WORLD)
