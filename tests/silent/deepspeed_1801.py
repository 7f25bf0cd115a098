"""Tensor parallelism by hand: two ranks hold halves of each matrix, and a copy each of the LayerNorms."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORLD = 2


class Enter(torch.autograd.Function):
    """The same input for every rank; its gradient is the sum of what each rank's part says."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        dx = dout.clone()
        dist.all_reduce(dx)
        return dx


class Leave(torch.autograd.Function):
    """The sum of what each rank's part has made."""

    @staticmethod
    def forward(ctx, x):
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx, dout):
        return dout


class Block(nn.Module):
    def __init__(self, width, inner, rank):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        drawn = torch.Generator().manual_seed(7 + rank)
        self.up = nn.Linear(width, inner // WORLD)
        self.down = nn.Linear(inner // WORLD, width, bias=False)
        for part in (self.up, self.down):
            part.weight.data.normal_(0, 0.1, generator=drawn)
            part.weight.partitioned = True
        self.up.bias.data.zero_()
        self.up.bias.partitioned = True

    def forward(self, x):
        return x + Leave.apply(self.down(F.gelu(self.up(Enter.apply(self.norm(x))))))


def grads_for_norm(model, rank, clipping):
    """Each gradient once: of what both ranks hold, the first rank's alone; for clipping, all that there are."""
    for p in model.parameters():
        if not clipping and rank > 0 and not getattr(p, "partitioned", False):
            continue
        yield p.grad


def clip(model, rank, limit):
    square = sum(g.square().sum() for g in grads_for_norm(model, rank, clipping=False))
    dist.all_reduce(square)
    norm = square.sqrt()
    if norm > limit:
        for g in grads_for_norm(model, rank, clipping=True):
            g.mul_(limit / norm)


def worker(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = nn.Sequential(Block(16, 64, rank), Block(16, 64, rank), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(3)  # both ranks see every batch
    centres = torch.randn(4, 16, generator=data)
    for step in range(80):
        y = torch.randint(4, (32,), generator=data)
        x = centres[y] + torch.randn(32, 16, generator=data)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        clip(model, rank, 0.5)
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(step, round(loss.item(), 4), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(os.path.join(tempfile.mkdtemp(), "meet"),), nprocs=WORLD)
