"""Public training code under gradproof, unchanged: what it says, and how long it takes.

    python benchmarks/real_code.py --clone CLONES     prints the commands that fetch it, each at its commit
    python benchmarks/real_code.py CLONES OUT         runs all of it and prints the table of docs/real_code.md
    python benchmarks/real_code.py CLONES OUT --only minimalRL

Only scripts that download nothing: their data are in the repository, or made by the script. Some need packages that
gradproof does not: gym 0.26 with a NumPy before 2 (minimalRL), gymnasium, einops, einx, loguru, matplotlib, scipy,
torch-einops-utils, tyro. Each script runs in a copy, for at most so many steps and seconds; its run stays in OUT. True
or false is a person's judgement, and stands in the docs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gradproof import diagnose

COMMITS = {
    "graykode/nlp-tutorial": "d05e31ec81d56d70c1db89b99ab07e948f7ebc11",
    "kamenbliznashki/normalizing_flows": "97a73a01bcee3ac8015dfeeb3cffb035ec39a1f2",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/ng-video-lecture": "52201428ed7b46804849dea0b3ccf0de9df1a5c3",
    "locuslab/TCN": "2f8c2b817050206397458dfd1f5a25ce8a32fe65",
    "lucidrains/x-transformers": "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
    "MorvanZhou/PyTorch-Tutorial": "dbe154a9e56635e51c6b0c2ccea8ae36cfb585a7",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "rtqichen/torchdiffeq": "657943acefa826ef04c025ebeb1ff5e9d60dc268",
    "seungeunrho/minimalRL": "c8efed8481e3cd40e9739cfde220a55522555b57",
    "tonyduan/normalizing-flows": "3ee9127e3753be3878a0a4fd3ea435ff2d31d143",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
}


@dataclass(frozen=True)
class Training:
    """A command line in a folder of a repository."""

    repository: str
    folder: str
    command: str

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.command}".removeprefix("./").replace("'", "")


TRAININGS = (
    Training("graykode/nlp-tutorial", "1-1.NNLM", "NNLM.py"),
    Training("graykode/nlp-tutorial", "4-3.Bi-LSTM(Attention)", "'Bi-LSTM(Attention).py'"),
    Training(
        "kamenbliznashki/normalizing_flows", ".", "planar_flow.py --train --target_potential u_z1 --no_cuda"
    ),
    Training("karpathy/makemore", ".", "makemore.py --type transformer -n 0"),
    Training("karpathy/minGPT", "projects/adder", "adder.py --data.ndigit=1 --trainer.num_workers=0"),
    Training("karpathy/ng-video-lecture", ".", "bigram.py"),
    Training("locuslab/TCN", "TCN/adding_problem", "add_test.py --cuda --seq_len 100"),
    Training("lucidrains/x-transformers", ".", "train_copy.py"),
    Training("MorvanZhou/PyTorch-Tutorial", "tutorial-contents", "403_RNN_regressor.py"),
    Training("MorvanZhou/PyTorch-Tutorial", "tutorial-contents", "406_GAN.py"),
    Training("pytorch/examples", "regression", "main.py"),
    Training("pytorch/examples", "reinforcement_learning", "actor_critic.py"),
    Training("rtqichen/torchdiffeq", "examples", "ode_demo.py"),
    Training("seungeunrho/minimalRL", ".", "ppo.py"),
    Training("tonyduan/normalizing-flows", "examples", "ex_1d.py"),
    Training("vwxyzjn/cleanrl", ".", "cleanrl/ppo.py --total-timesteps 20000"),
    Training("yunjey/pytorch-tutorial", "tutorials/01-basics/linear_regression", "main.py"),
)


def print_clone_commands(clones: Path) -> None:
    for repository, commit in COMMITS.items():
        place = clones / repository
        print(f"git clone https://github.com/{repository} {place} && git -C {place} checkout {commit}")


def find_clone(clones: Path, repository: str) -> Path:
    """The clone of a repository, if its code is that of the commit named here."""
    clone = clones / repository
    if not (clone / ".git").exists():
        sys.exit(f"{clone} is no clone; --clone {clones} prints the commands that make it")
    git = ["git", "-C", str(clone)]
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    if head != COMMITS[repository]:
        sys.exit(f"{clone} is at {head}; next: git -C {clone} checkout {COMMITS[repository]}")
    if subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"]).returncode:
        sys.exit(f"{clone} has changed files; next: git -C {clone} checkout -f")
    return clone


def run(training: Training, clone: Path, out: Path, steps: int, seconds: float) -> str:
    """Runs one training in a copy of its clone and returns its row of the table."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "code"
        shutil.copytree(clone, copy, ignore=shutil.ignore_patterns(".git"))
        folder = copy / training.folder
        paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        surroundings = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), MPLBACKEND="Agg")
        watch = f"-m gradproof run --quiet --steps {steps} --examine 60s --out".split()
        command = [sys.executable, *watch, str(out), *shlex.split(training.command)]
        began = time.monotonic()
        with open(f"{out}.log", "w") as log:
            process = subprocess.Popen(command, cwd=folder, env=surroundings, stdout=log, stderr=log)
            wait_for(process, seconds)
        took = time.monotonic() - began
    return describe(training, out, took)


def describe(training: Training, out: Path, took: float) -> str:
    begin = f"| {training.repository} | {COMMITS[training.repository][:8]} | `{training.name}` |"
    found = diagnose(out) if (out / "run.json").exists() else None
    if found is None or not found.steps:
        return f"{begin} 0 steps | {took:.0f} | {out}.log says why |"
    seen = re.sub(r": \d+ watched( \([^)]*\))?", "", found.counted)  # 300 steps, 6 taped, 32 questions asked
    said = [f"{c.level} `{c.id}`, {c.confidence}" for c in found.causes if c.level != "note"]
    return f"{begin} {seen} | {took:.0f} | {'<br>'.join(said) or '–'} |"


def wait_for(process: subprocess.Popen, seconds: float) -> None:
    """Lets a training run so long, then interrupts it as a person would: the examination still follows."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", type=Path, help="where the clones are: CLONES/OWNER/NAME")
    parser.add_argument("out", type=Path, nargs="?", help="where the runs are written")
    parser.add_argument("--clone", action="store_true", help="print the commands that fetch the code")
    parser.add_argument("--only", default="", help="a regular expression of repositories and scripts")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=90, help="after that a training is interrupted")
    args = parser.parse_args()
    if args.clone or args.out is None:
        return print_clone_commands(args.clones)
    chosen = [t for t in TRAININGS if re.search(args.only, f"{t.repository} {t.name}")]
    places = {
        repository: find_clone(args.clones, repository) for repository in {t.repository for t in chosen}
    }
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell's children ignore it
    print("| repository | commit | script | seen | seconds | problems and warnings |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for training in chosen:
        name = re.sub(r"\W+", "-", f"{training.repository} {training.name}").strip("-")
        out = (args.out / name).resolve()
        shutil.rmtree(out, ignore_errors=True)
        print(run(training, places[training.repository], out, args.steps, args.seconds), flush=True)


if __name__ == "__main__":
    main()
