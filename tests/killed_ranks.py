"""Two ranks, one of which is ended by SIGKILL at a random moment of its training, again and again.

    python tests/killed_ranks.py FOLDER MOMENTS SEED

One process imports everything, forks two ranks for each moment, and prints one JSON line for each: who was ended, how
many steps it had ended by its own account, and how the other one came to its end. After every fifth moment, there is
one without gradproof, for comparison.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import gradproof.probes.script as script
from gradproof.probes import autoload, helper, hooks, taping, watch  # noqa: F401  imported once, before the forks

STEPS = 40
PLAIN = 5  # after every so many moments, one at which nobody watches
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, meeting, told = int(os.environ["RANK"]), sys.argv[1], os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(int(sys.argv[3])):
    os.pwrite(told, b"%4d" % step, 0)
    x = torch.randn(32, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.003)
os.pwrite(told, b"%4d" % step, 0)
"""


def start(rank: int, folder: Path, watched: bool) -> int:
    child = os.fork()
    if child:
        return child
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    os.chdir(folder)
    quiet = os.open("said", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    program, arguments = (
        script.load_script("train.py"),
        [str(folder / "meeting"), str(folder / f"told{rank}"), str(STEPS)],
    )
    code = 3
    try:
        if watched:
            code = script.run_program(program, arguments, out="run", quiet=True, examine=0.0).exit_code
        else:
            code = script.execute(program, arguments)[0]
    finally:
        os._exit(code)


def steps_told(file: Path) -> int | None:
    """The step that a rank says it is in."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def one_moment(folder: Path, draw: random.Random, watched: bool, lasts: float) -> dict | None:
    """What became of two ranks; None where the one had ended before its moment came."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    ranks = [start(rank, folder, watched) for rank in range(2)]
    who, wait = draw.randrange(2), draw.uniform(0, lasts)
    while steps_told(folder / f"told{who}") is None:
        time.sleep(0.001)
    began = time.perf_counter()
    time.sleep(wait)
    step = steps_told(folder / f"told{who}")
    os.kill(ranks[who], signal.SIGKILL)
    told = steps_told(folder / f"told{who}")
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    if codes[who] != -signal.SIGKILL or told is None or told >= STEPS - 1:
        return None
    return {
        "folder": str(folder),
        "watched": watched,
        "who": who,
        "steps": sorted({step, told}),
        "codes": codes,
        "seconds": round(time.perf_counter() - began, 3),
    }


def main() -> None:
    folder, moments, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw, tried, lasts = random.Random(seed), 0, 0.4
    for number in range(moments):
        for watched in (True, False) if number % PLAIN == PLAIN - 1 else (True,):
            made = None
            while made is None:
                made = one_moment(folder / f"moment{tried}", draw, watched, lasts)
                tried += 1
                lasts *= 0.9 if made is None else 1.03
            print(json.dumps(made), flush=True)


if __name__ == "__main__":
    assert dist.is_available() and torch.get_num_threads()
    main()
