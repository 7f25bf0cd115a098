"""Trainings that are killed at random moments: what they leave opens, and no whole row is lost.

    python tests/killed.py 300 DIRECTORY [SEED]

Each is a fork of this process, which has imported everything: a new one would spend its life on `import torch`.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

TRAINING = """
import sys, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open(sys.argv[1], "ab", buffering=0) as steps:
    for _ in range(int(sys.argv[2])):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        steps.write(b".")
"""
NOTHING = "No step was recorded: there is nothing to say about training."
PATIENCE = 300  # seconds
# when, and how often of 20; a training of so many steps, examined for so many seconds
MOMENTS = {
    "at start": (5, 10**9, 0),
    "training": (10, 10**9, 0),
    "at the end": (3, 100, 0),
    "examining": (2, 40, 20),
}


def kill_one(folder, when, draw):
    """What is wrong with the run of a training that was killed; None: nothing."""
    from gradproof.diagnosis.ranking import diagnose
    from gradproof.errors import UserError
    from gradproof.record.run import open_run

    _, steps, examined = MOMENTS[when]
    folder.mkdir()
    script, run, log = folder / "train.py", folder / "run", folder / "log"
    script.write_text(TRAINING)
    pid = start(["run", "--examine", f"{examined}s", "--out", str(run), str(script), str(log), str(steps)])
    try:
        wait_for(when, log, steps, draw)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    taken = size(log)
    try:
        found = open_run(run)
    except UserError as error:
        return f"{taken} steps, and {error}" if taken else None  # one sentence
    first = str(diagnose(found)).splitlines()[0]
    if not taken <= len(found) <= taken + 1:
        return f"{taken} steps were made, {len(found)} are there"
    if found.notes:
        return f"it opens with {found.notes}"
    return None if len(found) or first == NOTHING else f"of no step is said: {first}"


def wait_for(when, log, steps, draw):
    until = time.monotonic() + PATIENCE
    if when == "at start":
        time.sleep(draw.uniform(0.0, 0.6))
        return
    wanted = draw.randrange(1, 2000) if when == "training" else steps
    while size(log) < wanted:
        assert time.monotonic() < until, f"{size(log)} steps of {wanted}"
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, {"training": 0.05, "at the end": 0.3, "examining": 4.0}[when]))


def size(log):
    return log.stat().st_size if log.exists() else 0


def start(words):
    """`gradproof WORDS` in a process of its own."""
    from gradproof.cli import main

    pid = os.fork()
    if pid:
        return pid
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    code = 1
    with contextlib.suppress(BaseException):
        code = main(words)
    os._exit(code)


def main(count, directory, seed=0):
    import torch

    import gradproof.probes.hooks
    import gradproof.probes.taping  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)  # it imports a compiler
    draw = random.Random(seed)
    times = {when: share for when, (share, _, _) in MOMENTS.items()}
    killed, failures = Counter(), []
    for number in range(count):
        when = (
            draw.choices(list(times), list(times.values()))[0]
            if number >= len(times)
            else list(times)[number]
        )
        folder = Path(directory) / str(number)
        wrong = kill_one(folder, when, draw)
        killed[when] += 1
        if wrong:
            failures.append(f"{number}, {when}: {wrong}")
            print(failures[-1], flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        if number % 50 == 49:
            print(f"{number + 1} killed, {len(failures)} with something wrong", flush=True)
    print(f"{count} killed ({dict(killed)}), {len(failures)} with something wrong")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
