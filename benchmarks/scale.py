"""What many ranks cost: files, bytes and time of writing, merging and comparing, from 8 to 16,384 simulated ranks.

    python benchmarks/scale.py [--ranks 8 64 1024] [--steps 10000] [--rows 10500000]

Ranks write through the real writer (a hundred steps one by one, the others as one block of the same rows) and are read
by the real `diagnose`. Of many ranks fewer steps are written, so that the rows of all stay below --rows. Rank 3's
weights part from the others' at two thirds of the run: it has to be named, with its step.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gradproof.record.prints import (
    FIELDS,
    MAGIC,
    PRINTS_FILE,
    ROW,
    TENSOR_PRINTS_FILE,
    is_landmark,
    pack_row,
    pack_tensors,
)
from gradproof.record.writer import RunWriter

TENSORS, SINGLY, ODD = 148, 100, 3  # as many tensors as GPT-2 has


def rows_of(rank: int, steps: int) -> np.ndarray:
    """What a rank would write: alike on all ranks, but for its batches, its losses and its times."""
    rows = np.zeros(steps, ROW)
    for name in FIELDS:
        rows[name] = np.nan
    step = np.arange(steps)
    own = np.random.default_rng(rank)
    rows["magic"], rows["step"] = MAGIC, step
    rows["began"], rows["seconds"], rows["own"] = 1.7e9 + step, 1.0, 0.3 + 0.02 * own.random(steps)
    rows["loss"], rows["lr"] = 4 / (1 + step) ** 0.1 + 0.01 * own.random(steps), 3e-4
    rows["gradient"], rows["weight"] = 1 / (1 + step), 100 + 0.01 * step
    rows["checksum"] = step * 7919.0
    rows["batch"], rows["entries"] = own.integers(1 << 48, size=steps), 8192
    if rank == ODD:
        rows["weight"][2 * steps // 3 :] *= 1.01
        rows["checksum"][2 * steps // 3 :] += 1
    return rows


def write_rank(folder: Path, rank: int, world: int, steps: int) -> float:
    """Seconds that one step of the real way took."""
    names = [f"blocks.{n // 12}.{n % 12}.weight" for n in range(TENSORS)]
    parameters = [{"name": name, "shape": [768, 768], "dtype": "float32"} for name in names]
    info = {"rank": rank, "world": world, "parameters": parameters, "ended": 1.7e9 + steps}
    info["prints"] = [["weight", name, 0] for name in names]
    writer = RunWriter(folder / (f"run.rank{rank}" if rank else "run"), info)
    rows = rows_of(rank, steps)
    began = time.perf_counter()
    for row in rows[:SINGLY]:
        step = int(row["step"])
        writer.append(PRINTS_FILE, pack_row(**{name: row[name] for name in ("step", *FIELDS)}))
        if is_landmark(step):
            squares = np.full(TENSORS, row["weight"] / TENSORS)
            writer.append(TENSOR_PRINTS_FILE, pack_tensors(step, range(TENSORS), squares))
    spent = (time.perf_counter() - began) / min(SINGLY, steps)
    writer.append(PRINTS_FILE, rows[SINGLY:].tobytes())
    for step in range(SINGLY, steps):
        if is_landmark(step):
            squares = np.full(TENSORS, rows["weight"][step] / TENSORS)
            writer.append(TENSOR_PRINTS_FILE, pack_tensors(step, range(TENSORS), squares))
    if rank == 0:
        for row in rows[:SINGLY]:
            writer.write_step({"step": int(row["step"]), "loss": float(row["loss"]), "order": "zbs"})
    writer.close()
    return spent


def read_all(folder: str) -> None:
    """In a process of its own, whose memory is the answer."""
    import gradproof

    began = time.perf_counter()
    found = gradproof.diagnose(Path(folder) / "run")
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cause = next((c for c in found.causes if c.family == "distributed-desync"), None)
    print(
        f"{seconds:.1f} {memory:.0f} {cause.step if cause else -1} {f'rank {ODD}' in str(cause and cause.evidence)}"
    )


def measure(world: int, steps: int, folder: Path) -> None:
    spent = [write_rank(folder, rank, world, steps) for rank in range(world)]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    files = sum(1 for file in folder.rglob("*") if file.is_file())
    command = [sys.executable, __file__, "--read", str(folder)]
    seconds, memory, step, named = subprocess.check_output(command, text=True).split()
    right = named == "True" and abs(int(step) - 2 * steps // 3) <= max(1, steps // 64)
    cells = [f"{world:,}", f"{steps:,}", f"{files:,}", f"{size / 1e9:.2f}", f"{size / world / steps:.0f}"]
    cells += [f"{1e6 * np.median(spent):.0f}", seconds, memory, f"step {step}" if right else "MISSED"]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024, 4096, 16384])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=10_500_000, help="of all ranks together, at most")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_all(args.read)
        return
    columns = (
        "ranks",
        "steps",
        "files",
        "GB",
        "bytes a rank and step",
        "µs to write a step",
        "s to merge",
        "MB",
    )
    print(f"| {' | '.join(columns)} | rank {ODD} named at |")
    print("|---" * (len(columns) + 1) + "|")
    for world in args.ranks:
        folder = Path(tempfile.mkdtemp(prefix="ranks"))
        try:
            measure(world, min(args.steps, args.rows // world), folder)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
