"""What watching costs on several ranks, against one: watched steps to plain ones, in the same processes.

Each rank trains the GPT of overhead.py under DDP (gloo, one thread), in alternating blocks of plain and watched steps
(plain first, then watched first, …). All ranks begin a block together; its wall time is that of the slowest, its CPU
time that of all of them. A round is one block of each; the table shows all watched blocks to all plain ones, so that a
step that is looked at closely counts in full, and after ± how far that moves when rounds are drawn again. One rank and
several take turns, so that a machine that changes its mind is seen. Other programs take wall time from both, and, by
way of the caches, some CPU time; least of all they touch the last column, the CPU time inside of our own handlers.

    python benchmarks/ranks.py [--ranks 4] [--rounds 32] [--steps 16] [--turns 2]    # 4 minutes on two quiet cores
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import GPT, Variant, watched
from torch.nn.parallel import DistributedDataParallel

from gradproof.probes import guard

WARM_UP = 256  # steps of each: the first quarter of a second is measured whole, the first 64 steps closely
BAR = 0.01
# of a block: wall plain, wall watched, CPU plain, CPU watched, CPU plain again and with what our handlers took
Round = tuple[float, float, float, float, float, float]
KINDS = ("wall", "CPU", "CPU of our handlers")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.meeting:
        print(json.dumps(measure(args)))
        return
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, load {load:.1f} before the first block\n",
        flush=True,
    )
    rounds: dict[int, list[Round]] = {1: [], args.ranks: []}
    for turn in range(args.turns):
        for world in list(rounds)[:: -1 if turn % 2 else 1]:
            rounds[world] += together(run_ranks(world, sys.argv[1:]))
    show(rounds, args.steps)
    if load > 0.5:
        print("\nOther programs were running: wall times are theirs, too, and no verdict on them holds.")


def show(rounds: dict[int, list[Round]], steps: int) -> None:
    print(
        "| ranks | rounds | ms a plain step: wall | CPU of a rank | watched to plain: wall | CPU | our handlers |"
    )
    print("|---|---|---|---|---|---|---|")
    ratios = {}
    for world, found in rounds.items():
        table = np.array(found)
        wall, cpu = 1e3 * table[:, 0].mean() / steps, 1e3 * table[:, 2].mean() / steps / world
        ratios[world] = [spread(table[:, at : at + 2]) for at in (0, 2, 4)]
        cells = [f"{world}", f"{len(found)}", f"{wall:.1f}", f"{cpu:.1f}"]
        cells += [f"{value:.4f} ± {error:.4f}" for value, error in ratios[world]]
        print(f"| {' | '.join(cells)} |", flush=True)
    one, many = ratios.values()
    print()
    for kind, (alone, alone_error), (value, error) in zip(KINDS, one, many, strict=True):
        apart, off = value - alone, (alone_error**2 + error**2) ** 0.5
        verdict = "met" if apart + 2 * off <= BAR else "missed" if apart - 2 * off > BAR else "not decided"
        print(
            f"{kind}: {list(rounds)[1]} ranks cost {100 * apart:+.2f} % ± {100 * off:.2f} % more than one "
            f"(bar: {100 * BAR:.0f} %, {verdict})"
        )


def spread(pairs: np.ndarray) -> tuple[float, float]:
    """All watched blocks to all plain ones, and the standard deviation of that over rounds that are drawn again."""
    plain, seen = pairs.sum(axis=0)
    draws = np.random.default_rng(0).choice(pairs, (1000, len(pairs))).sum(axis=1)
    return float(seen / plain), float((draws[:, 1] / draws[:, 0]).std())


def together(ranks: list[list[Round]]) -> list[Round]:
    """The rounds of all ranks as one: a block takes as long as its slowest rank, and the CPU time of all."""
    table = np.array(ranks)  # (ranks, rounds, 6)
    return np.concatenate((table[:, :, :2].max(axis=0), table[:, :, 2:].sum(axis=0)), axis=1).tolist()


def run_ranks(world: int, options: list[str]) -> list[list[Round]]:
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


def measure(args: argparse.Namespace) -> list[Round]:
    """Of this rank: what each round's blocks took."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.meeting}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(2, 128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + rank)
    ids = torch.randint(512, (4, 65))

    handlers = count_handlers()

    def block(variant: Variant) -> tuple[float, float, float]:
        with variant.begin():
            dist.barrier()
            wall, cpu, own = time.perf_counter(), time.process_time(), handlers[0]
            for _ in range(args.steps):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                optimizer.step()
            return time.perf_counter() - wall, time.process_time() - cpu, handlers[0] - own

    variants = [Variant("plain"), watched("watched", model, None)]
    rounds = []
    for number in range(WARM_UP // args.steps + args.rounds):
        order = (0, 1) if number % 2 else (1, 0)
        took = {index: block(variants[index]) for index in order}
        (wall, cpu, _), (watched_wall, watched_cpu, own) = took[0], took[1]
        rounds.append((wall, watched_wall, cpu, watched_cpu, cpu, cpu + own))
    dist.barrier()
    return rounds[-args.rounds :]


def count_handlers() -> list[float]:
    """From here on: the CPU seconds of this thread inside of our handlers, in a list of one."""
    total, original = [0.0], guard.without_trace

    def timed(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return original(*args)
        finally:
            total[0] += time.thread_time() - began

    guard.without_trace = timed
    return total


if __name__ == "__main__":
    main()
