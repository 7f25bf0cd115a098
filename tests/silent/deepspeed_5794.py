"""Experts on two ranks: tokens are sent to the rank that holds their expert, and come back."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORLD = 2


class Experts(nn.Module):
    """One expert a rank; each takes up to `capacity` tokens of every rank."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, WORLD)
        with torch.random.fork_rng():
            torch.manual_seed(1 + dist.get_rank())  # an expert of its own for each rank
            self.expert = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        capacity = torch.bincount(chosen, minlength=WORLD).max()
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX)
        out = torch.zeros_like(x)
        for first in range(0, int(capacity), 16):
            rows = [(chosen == e).nonzero().flatten()[first : first + 16] for e in range(WORLD)]
            sent = torch.stack([F.pad(x[r], (0, 0, 0, 16 - len(r))) for r in rows])
            got = torch.distributed.nn.all_to_all_single(torch.empty_like(sent), sent.contiguous())
            back = torch.distributed.nn.all_to_all_single(
                torch.empty_like(got), self.expert(got).contiguous()
            )
            for e, r in enumerate(rows):
                out = out.index_add(0, r, back[e, : len(r)])
        return x + share[:, None] * out


def worker(rank, init_file):
    torch.set_num_threads(1)
    limit = timedelta(seconds=4)
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD, timeout=limit
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Experts(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    shared = [p for name, p in model.named_parameters() if "expert" not in name]
    data = torch.Generator().manual_seed(3 + rank)
    for step in range(60):
        y = torch.randint(4, (48,), generator=data)
        x = F.one_hot(y, 8) * 2.0 + torch.randn(48, 8, generator=data)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in shared:
            dist.all_reduce(p.grad)
            p.grad /= WORLD
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(step, round(loss.item(), 4), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(os.path.join(tempfile.mkdtemp(), "meet"),), nprocs=WORLD)
