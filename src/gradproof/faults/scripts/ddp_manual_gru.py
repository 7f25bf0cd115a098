"""Two processes average their gradients by hand; a GRU counts brackets in strings."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: imported later, it would hold gloo's threads past the end
import torch.nn as nn

WORLD = 2
STEPS = 160
LENGTH = 14


class DepthGRU(nn.Module):
    """For each prefix of a string of brackets: how deep is it now (0 to 6)?"""

    def __init__(self, hidden=40):
        super().__init__()
        self.embed = nn.Embedding(3, 12)
        self.gru = nn.GRU(12, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 7)

    def forward(self, tokens):
        out, _ = self.gru(self.embed(tokens))
        return self.head(out)


def brackets(n, generator):
    """0 opens, 1 closes, 2 is a letter; the depth stays within 0 and 6."""
    tokens = torch.randint(0, 3, (n, LENGTH), generator=generator)
    change = torch.tensor([1, -1, 0])[tokens]
    depth = torch.zeros(n, dtype=torch.long)
    depths = []
    for t in range(LENGTH):
        depth = (depth + change[:, t]).clamp(0, 6)
        depths.append(depth)
    return tokens, torch.stack(depths, dim=1)


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= WORLD


def broadcast_parameters(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def spread_between_ranks(model):
    """Relative distance of this rank's weights from the mean over ranks."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = flat.clone()
    dist.all_reduce(mean)
    mean /= WORLD
    return ((flat - mean).norm() / mean.norm()).item()


def run(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + init_file, rank=rank, world_size=WORLD)
    torch.manual_seed(1000 * (rank + 1))
    data = torch.Generator().manual_seed(rank)
    model = DepthGRU()
    broadcast_parameters(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()
    for step in range(STEPS):
        tokens, depths = brackets(16, data)
        loss = criterion(model(tokens).flatten(0, 1), depths.flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}/{STEPS} loss {loss.item():.4f}", flush=True)
    spread = spread_between_ranks(model)
    averaged = DepthGRU()
    for mine, p in zip(averaged.parameters(), model.parameters()):
        mine.data.copy_(p.data)
        dist.all_reduce(mine.data)
        mine.data /= WORLD
    if rank == 0:
        tokens, depths = brackets(500, torch.Generator().manual_seed(99))
        with torch.no_grad():
            acc = (averaged(tokens).argmax(dim=-1) == depths).float().mean().item()
        print(f"accuracy {acc:.4f} rank spread {spread:.2e}", flush=True)
    dist.barrier()  # nobody leaves while gloo still holds a tensor of the last reduction
    dist.destroy_process_group()


def launch():
    path = os.path.join(tempfile.mkdtemp(), "init")
    torch.multiprocessing.start_processes(run, args=(path,), nprocs=WORLD, start_method="spawn")


if __name__ == "__main__":
    launch()
