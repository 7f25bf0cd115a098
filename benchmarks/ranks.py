"""What watching costs on several ranks, against what it costs on one: CPU time of watched steps to plain ones.

Each rank trains the GPT of overhead.py under DDP (gloo, one thread), in alternating blocks of plain and watched steps.
The CPU time of its process counts, so that waiting for another rank does not; the table shows the median over blocks
and ranks.

    python benchmarks/ranks.py [--ranks 4] [--rounds 20] [--steps 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import GPT, Variant, watched
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 8  # blocks: the first quarter of a second is measured whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.meeting:
        print(json.dumps(measure(args)))
        return
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}\n\n| ranks | watched to plain | CPU ms a plain step |"
    )
    print("|---|---|---|")
    for world in (1, args.ranks):
        found = run_ranks(world, sys.argv[1:])
        ratio = statistics.median(ratio for ratios, _ in found for ratio in ratios)
        print(
            f"| {world} | {ratio:.4f} | {1e3 * statistics.median(plain for _, plain in found):.1f} |",
            flush=True,
        )


def run_ranks(world: int, options: list[str]) -> list[tuple[list[float], float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, *options, "--meeting", f"{folder}/meeting"]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]


def measure(args: argparse.Namespace) -> tuple[list[float], float]:
    """Of this rank: for each round the ratio of a watched block to a plain one, and the seconds of a plain step."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.meeting}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(2, 128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + rank)
    ids = torch.randint(512, (4, 65))

    def block(variant: Variant) -> float:
        with variant.begin():
            start = time.process_time()
            for _ in range(args.steps):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                optimizer.step()
            return time.process_time() - start

    plain, seen = Variant("plain"), watched("watched", model, None)
    for _ in range(WARM_UP):
        block(plain), block(seen)
    rounds = [(block(plain), block(seen)) for _ in range(args.rounds)]
    dist.barrier()
    ratios = [with_us / without for without, with_us in rounds]
    return ratios, statistics.median(without for without, _ in rounds) / args.steps


if __name__ == "__main__":
    main()
