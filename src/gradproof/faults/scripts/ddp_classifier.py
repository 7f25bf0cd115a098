"""Two processes, DistributedDataParallel over gloo, a classifier of noisy codes."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: imported later, it would hold gloo's threads past the end
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORLD = 2
EPOCHS = 10


def make_codes(n, seed):
    """Ten classes of two clusters each, in 32 dimensions."""
    fixed = torch.Generator().manual_seed(5)
    g = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(10, 2, 32, generator=fixed)
    label = torch.randint(0, 10, (n,), generator=g)
    which = torch.randint(0, 2, (n,), generator=g)
    return prototypes[label, which] + 1.4 * torch.randn(n, 32, generator=g), label


def make_model():
    return nn.Sequential(
        nn.Linear(32, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    )


def replica_gap(module):
    """Largest difference between this rank's weights and rank 0's."""
    gap = 0.0
    for p in module.parameters():
        reference = p.detach().clone()
        dist.broadcast(reference, src=0)
        gap = max(gap, (reference - p.detach()).abs().max().item())
    result = torch.tensor(gap)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.item()


def worker(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(100 + rank)
    train = TensorDataset(*make_codes(800, 1))
    x_val, y_val = make_codes(1000, 2)
    sampler = DistributedSampler(train, num_replicas=WORLD, rank=rank, shuffle=True)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        if rank == 0:
            print(f"epoch {epoch + 1} loss {total / len(loader):.4f}", flush=True)
    gap = replica_gap(model.module)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            logits = model.module(x_val)
        acc = (logits.argmax(dim=1) == y_val).float().mean().item()
        print(
            f"val loss {F.cross_entropy(logits, y_val).item():.4f} val acc {acc:.4f} replica gap {gap:.2e}",
            flush=True,
        )
    del model  # its reducer must not be the last to hold the group: freeing that could wait for gloo's thread for ever
    dist.barrier()  # nobody leaves while gloo still holds a tensor of the last reduction
    dist.destroy_process_group()


if __name__ == "__main__":
    init_file = os.path.join(tempfile.mkdtemp(), "rendezvous")
    mp.spawn(worker, args=(init_file,), nprocs=WORLD)
