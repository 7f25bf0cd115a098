"""How long an answer takes from one recorded step of a 124M-parameter GPT, each in a process of its own, by the clock.

    python benchmarks/answers.py OUT [--only REGEX] [--times 3] [--desk]

Trains a GPT-2 small (12 layers, 768 wide, 50,257 tokens; 2 × 128 tokens a step, AdamW) for two steps under `gradproof
run` unless OUT has that run already, then asks each question `--times` times by `gradproof ask` and prints the least:
the start of Python and the import of torch are in it. With --desk the questions go to one process that stays, as those
of a client of `gradproof mcp` do: what it has loaded or worked out for one question it has for the next. Bars, on two
cores: reading 1 s, replaying 10 s, training 60 s or a job.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from specimen import TRAINING

from gradproof.ask.desk import DONE, Desk

SIZE = (12, 768, 12, 50257, 2, 128, 2, 0)  # layers, width, heads, vocabulary, batch, context, steps, seconds
QUESTIONS = (
    ("", "read"),
    ("fed", "read"),
    ("tensor --of blocks.5.up.weight", "read"),
    ("tensor --of tokens.weight", "read"),
    ("tensor --of input", "read"),
    ("tensor --of blocks.5", "replay"),
    ("tensor --of blocks.5.up.weight.grad", "replay"),
    ("line --of train.py:{forward}", "replay"),
    ("origin --of prediction", "replay"),
    ("digits", "replay"),
    ("digits --of blocks.5", "replay"),
    ("hears", "replay"),
    ("update", "replay"),
    ("update --of blocks.5", "replay"),
    ("weighs", "replay"),
    ("gradient", "replay"),
    ("gradient --of blocks.5.up.weight", "replay"),
    ("parting --with {run}", "replay"),
    ("what-if --change lr=0.1x --steps 8", "train"),
)
BARS = {"read": 1, "replay": 10, "train": 60}


def record(out: Path) -> Path:
    """Step 1 of a GPT-2 small, recorded."""
    run = out / "run"
    if not (run / "run.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        # in float32, as on a CPU: in bfloat16 rounding hides so much that `gradient` asks every node of the graph
        (out / "train.py").write_text(
            TRAINING.replace("with torch.autocast(device, torch.bfloat16):", "if True:")
        )
        words = ["run", "--quiet", "--examine", "off", "--until", "1", "--out", str(run)]
        command = [sys.executable, "-m", "gradproof", *words, "train.py", json.dumps(SIZE)]
        subprocess.run(command, cwd=out, check=True, stdout=subprocess.DEVNULL)
    return run


def ask(run: Path, words: list[str]) -> tuple[float, str]:
    """Seconds by the clock, and the sentence."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "gradproof", "ask", str(run), *words, "--json"]
    said = subprocess.run(command, capture_output=True, text=True)
    taken = time.perf_counter() - began
    return taken, json.loads(said.stdout)["sentence"] if not said.returncode else said.stderr.strip()


def ask_desk(desk: Desk, run: Path, words: list[str]) -> tuple[float, str]:
    """The same of a desk: `question --of NAME` as a client says it."""
    names = {"--of": "of", "--change": "change", "--with": "other", "--steps": "steps"}
    arguments = {names[name]: value for name, value in zip(words[1::2], words[2::2], strict=True)}
    if "steps" in arguments:
        arguments["steps"] = int(arguments["steps"])
    if "other" in arguments:
        arguments["other"] = run.name
    began = time.perf_counter()
    job = desk.ask(run.name, {"question": " ".join(words[:1]), **arguments})
    job.over.wait()
    taken = time.perf_counter() - began
    return taken, job.answer["sentence"] if job.state == DONE else job.why


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="where the run is, or goes")
    parser.add_argument("--only", default="", help="questions that match")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--desk", action="store_true", help="ask a process that stays")
    args = parser.parse_args()
    run = record(args.out.resolve())
    lines = (run.parent / "train.py").read_text().splitlines()
    forward = next(i for i, line in enumerate(lines, 1) if "F.gelu" in line)
    desk = Desk(run.parent) if args.desk else None
    print("| question | kind | seconds | wanted | |\n|---|---|---|---|---|")
    for question, kind in QUESTIONS:
        if re.search(args.only, question):
            words = question.format(forward=forward, run=run).split()
            found = [ask_desk(desk, run, words) if desk else ask(run, words) for _ in range(args.times)]
            least = min(taken for taken, _ in found)
            missed = "" if least <= BARS[kind] else " ✗"
            name = question.format(forward=forward, run="RUN") or "what can be asked"
            print(
                f"| `{name}` | {kind} | {least:.2f}{missed} | {BARS[kind]} | {found[0][1][:100]} |",
                flush=True,
            )
    if desk:
        desk.close()


if __name__ == "__main__":
    main()
