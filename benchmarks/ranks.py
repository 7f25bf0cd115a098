"""What watching costs on several ranks, against one: watched steps to plain ones, in the same processes.

Each rank trains the GPT of overhead.py under DDP (gloo, one thread), in blocks of plain and watched steps by turns. All
ranks begin a block together, with a step that is not counted; its wall time is that of the slowest, its CPU time that
of all of them. The table shows all watched blocks to all plain ones, so that a step that is looked at closely counts in
full, and after ± how far that moves when rounds are drawn again.

Several ranks are watched in two ways: as ranks (fingerprints, landmarks, flight recorder), and each as if alone.
The first to the second is what ranks cost; the second to one process alone is what a machine costs that has fewer cores
than ranks. The last column is the CPU time inside of our own handlers: other programs touch it least.

    python benchmarks/ranks.py [--ranks 4] [--rounds 40] [--steps 16] [--keep FILE]    # 4 minutes on two quiet cores

With --keep, rounds are added to those of earlier calls.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import GPT, Variant, watched
from torch.nn.parallel import DistributedDataParallel

from gradproof.probes import watch
from gradproof.probes.session import Session

WARM_UP = 512  # steps of each: the first quarter of a second is measured whole, the first 64 steps closely
BAR = 0.01
KINDS = ("wall", "CPU", "CPU of our handlers")
ALONE, RANKS = "each as if alone", "as ranks"
Block = tuple[float, float, float]  # seconds: wall, CPU, CPU of our handlers
Round = dict[str, Block]  # by the way of watching; "plain": not at all


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--keep", help="a file to which the rounds are added")
    parser.add_argument("--only", type=int, help="measure so many ranks now; the others are in the file")
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
    kept = Path(args.keep) if args.keep else None
    rounds: dict[int, list[Round]] = {1: [], args.ranks: []}
    for world in [args.only] if args.only else rounds:
        rounds[world] = together(run_ranks(world, sys.argv[1:]))
        if kept is not None:
            with kept.open("a") as lines:
                lines.writelines(json.dumps([world, each]) + "\n" for each in rounds[world])
    if kept is not None:
        every = [json.loads(line) for line in kept.read_text().splitlines()]
        rounds = {world: [each for w, each in every if w == world] for world in rounds}
    if not all(rounds.values()):
        return
    show(rounds, args.steps)
    if load > 0.5:
        print("\nOther programs were running: wall times are theirs, too, and no verdict on them holds.")


def show(rounds: dict[int, list[Round]], steps: int) -> None:
    heads = ("ranks", "watched", "rounds", "ms a plain step: wall", "CPU of a rank")
    print(f"| {' | '.join(heads)} | watched to plain: wall | CPU | our handlers |")
    print("|---" * (len(heads) + 3) + "|")
    ratios = {}
    for world, found in rounds.items():
        plain = np.array([each["plain"] for each in found])
        for way in [way for way in found[0] if way != "plain"]:
            seen = np.array([each[way] for each in found])
            pairs = [
                (plain[:, 0], seen[:, 0]),
                (plain[:, 1], seen[:, 1]),
                (plain[:, 1], plain[:, 1] + seen[:, 2]),
            ]
            ratios[world, way] = [spread(np.stack(pair, axis=1)) for pair in pairs]
            wall, cpu = 1e3 * plain[:, :2].mean(axis=0) / steps
            cells = [
                f"{world}",
                way if world > 1 else "",
                f"{len(found)}",
                f"{wall:.1f}",
                f"{cpu / world:.1f}",
            ]
            cells += [f"{value:.4f} ± {error:.4f}" for value, error in ratios[world, way]]
            print(f"| {' | '.join(cells)} |", flush=True)
    many = list(rounds)[1]
    compare(f"{many} ranks, to one", ratios[many, RANKS], ratios[1, ALONE])
    compare(f"{many} ranks, to each as if alone", ratios[many, RANKS], ratios[many, ALONE])


def compare(words: str, many: list[tuple[float, float]], one: list[tuple[float, float]]) -> None:
    print(f"\n{words}:")
    for kind, (alone, alone_error), (value, error) in zip(KINDS, one, many, strict=True):
        apart, off = value - alone, (alone_error**2 + error**2) ** 0.5
        verdict = "met" if apart + 2 * off <= BAR else "missed" if apart - 2 * off > BAR else "not decided"
        print(f"  {kind}: {100 * apart:+.2f} % ± {100 * off:.2f} % (bar: {100 * BAR:.0f} %, {verdict})")


def spread(pairs: np.ndarray) -> tuple[float, float]:
    """All watched blocks to all plain ones, and the standard deviation of that over rounds that are drawn again."""
    plain, seen = pairs.sum(axis=0)
    draws = np.random.default_rng(0).choice(pairs, (1000, len(pairs))).sum(axis=1)
    return float(seen / plain), float((draws[:, 1] / draws[:, 0]).std())


def together(ranks: list[list[Round]]) -> list[Round]:
    """The rounds of all ranks as one: a block takes as long as its slowest rank, and the CPU time of all."""
    found: list[Round] = []
    for same in zip(*ranks, strict=True):
        blocks = {way: np.array([each[way] for each in same]) for way in same[0]}
        found.append(
            {way: (float(b[:, 0].max()), *map(float, b[:, 1:].sum(axis=0))) for way, b in blocks.items()}
        )
    return found


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

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    def block(variant: Variant) -> Block:
        with variant.begin():
            step()  # whoever begins to watch looks at all weights once
            dist.barrier()
            wall, cpu, own = time.perf_counter(), time.process_time(), handlers[0]
            for _ in range(args.steps):
                step()
            return time.perf_counter() - wall, time.process_time() - cpu, handlers[0] - own

    ways = {"plain": Variant("plain"), ALONE: watched_as((rank, 1), model)}
    if world > 1:
        ways[RANKS] = watched_as((rank, world), model)
    for _ in range(WARM_UP // (args.steps + 1)):
        for way in list(ways)[1:]:
            block(ways[way])
    rounds, order = [], list(ways)
    for _ in range(args.rounds):
        rounds.append({way: block(ways[way]) for way in order})
        order = order[1:] + order[:1]
    dist.barrier()
    return rounds


def watched_as(who: tuple[int, int], model: torch.nn.Module) -> Variant:
    """Watched as this rank of so many."""
    found, watch.rank_and_world = watch.rank_and_world, lambda: who
    try:
        return watched("watched", model, None)
    finally:
        watch.rank_and_world = found


def count_handlers() -> list[float]:
    """From here on: the CPU seconds of this thread inside of our handlers, in a list of one."""
    total, inside = [0.0], [0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            inside[0] += 1
            began = time.thread_time()
            try:
                return method(*args)
            finally:
                inside[0] -= 1
                if not inside[0]:
                    total[0] += time.thread_time() - began

        return call

    for name, method in list(vars(Session).items()):
        if hasattr(method, "__wrapped__"):  # a handler of events; see probes/guard
            setattr(Session, name, timed(method))
    return total


if __name__ == "__main__":
    main()
