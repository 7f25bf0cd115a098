"""A trainer that wraps its model in DistributedDataParallel."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WORLD = 2


class Trainer:
    def __init__(self, model):
        self.model, self.wrapped = model, None

    def get_model(self):
        if self.wrapped is None:
            self.wrapped = DDP(self.model)
        return self.wrapped

    def compute_loss(self, x, y):
        return F.cross_entropy(self.get_model()(x), y)


def worker(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    )
    centres = torch.randn(4, 16)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(10 + rank)
    for step in range(120):
        y = torch.randint(4, (32,), generator=data)
        x = centres[y] + torch.randn(32, 16, generator=data)
        loss = trainer.compute_loss(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 30 == 0:
            print(step, round(loss.item(), 4), flush=True)
    del trainer  # first: its reducer would free the group, and may wait for gloo's thread for ever
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(os.path.join(tempfile.mkdtemp(), "meet"),), nprocs=WORLD)
