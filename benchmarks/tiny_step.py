"""What counting a step costs the thread that trains, where the step itself is next to nothing: a Linear under SGD.

Plain and watched steps in turn, in one process; medians of the CPU time of this thread.

    python benchmarks/tiny_step.py [--rounds 40] [--steps 250]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn

from gradproof.probes.hooks import attach
from gradproof.probes.names import Names
from gradproof.probes.taping import begin_taping
from gradproof.probes.watch import open_session

WARM = 6  # blocks in which the first steps are measured whole, and taped


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    session = open_session(f"{tempfile.mkdtemp()}/run", command=["tiny"], names=Names([model]))
    begin_taping(session)

    def seconds_of_a_step() -> float:
        began = time.thread_time()
        for _ in range(args.steps):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return (time.thread_time() - began) / args.steps

    plain, watched = [], []
    for _ in range(WARM + args.rounds):
        plain.append(seconds_of_a_step())
        with attach(session):
            watched.append(seconds_of_a_step())
    more = [after - before for before, after in zip(plain[WARM:], watched[WARM:], strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    print(
        f"plain {1e6 * statistics.median(plain):.0f} µs, watched {1e6 * middle:.0f} more ({1e6 * low:.0f} to ",
        end="",
    )
    print(f"{1e6 * high:.0f} in the middle half of {args.rounds} rounds)")


if __name__ == "__main__":
    main()
