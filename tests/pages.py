"""Runs what a page of the docs shows, block by block, in one directory.

    ```python                 is executed
    ```python title="a.py"    is written to a.py, ```c title="a.c" to a.c
    ```diff title="a.py"      is applied to a.py
    ```sh                     each line is a command that has to succeed
    ```text                   the findings it names must be in what the commands before it said

A block below `<!-- slow -->` is left to the slow tests, one below `<!-- not run: why -->` is only shown. A page
that says `<!-- after: other.md -->` stands on another one, which is run first.
Each runs in a process of its own that has torch already.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

import gradproof.examination.worker
import gradproof.instruments.evidence
import gradproof.probes.watch  # noqa: F401  all before any fork
from gradproof.diagnosis.causes import CAUSES

FENCE = re.compile(r'^(?:<!-- (.*?) -->\n)?```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.M)
FINDING = re.compile(rf"\b(?:{'|'.join(cause.family for cause in CAUSES)})/[\w-]+")
SHELL = """
gradproof() { "$PYTHON" -m gradproof "$@"; }
python() { "$PYTHON" "$@"; }
torchrun() { "$PYTHON" -m torch.distributed.run "$@"; }
"""


class Block(NamedTuple):
    note: str
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def run_page(page: Path, directory: Path, slow: bool = False) -> None:
    """Every block of a page in its order; with `slow`, the slow ones, too."""
    for before in AFTER.findall(page.read_text(encoding="utf-8")):
        run_page(page.parent / before, directory)
    said = ""
    for block in blocks_of(page):
        if block.note.startswith("not run: ") or (block.note == "slow" and not slow):
            continue
        if block.language == "text":
            missing = set(FINDING.findall(block.text)) - set(FINDING.findall(said))
            assert not missing, f"{page.name} shows {sorted(missing)}, the commands said:\n{said}"
        elif block.title and block.language in ("python", "c"):
            (directory / block.title).write_text(block.text)
        elif block.title and block.language == "diff":
            apply_changes(directory / block.title, block.text)
        elif block.language == "python":
            run_apart(run_python, block.text, directory)
        elif block.language == "sh":
            said = "".join(run_apart(run_line, line, directory) for line in block.text.splitlines())


def apply_changes(file: Path, text: str) -> None:
    """Each group of `-` lines gives way to the group of `+` lines behind it."""
    source = file.read_text()
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", text, re.M):
        old, new = (re.sub(r"^[-+]", "", part, flags=re.M) for part in (old, new))
        assert source.count(old) == 1, f"{file.name} has not exactly one {old!r}"
        source = source.replace(old, new)
    file.write_text(source)


def run_apart(run, text: str, directory: Path) -> str:
    """What `run(text)` prints in another process; raises if it fails."""
    # where a GPU has been used, a forked process cannot run backward
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    output = directory / ".output"
    child = context.Process(target=_in_directory, args=(run, text, directory, output))
    child.start()
    child.join()
    said = output.read_text(encoding="utf-8", errors="replace")
    assert child.exitcode == 0, f"exit code {child.exitcode} of\n{text}\n{said}"
    return said


def _in_directory(run, text: str, directory: Path, output: Path) -> None:
    os.chdir(directory)
    with open(output, "wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.path.insert(0, str(directory))
    for name, module in list(sys.modules.items()):  # of other tests, beside whose pages other files stand
        if "/pytest-of-" in str(getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    warnings.resetwarnings()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    code = run(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run_python(text: str) -> None:
    exec(compile(text, "page.py", "exec"), {"__name__": "__main__"})


def run_line(line: str) -> int:
    """A line of a shell; what is only `gradproof …` needs no shell, and no second start of Python."""
    from gradproof.cli import main

    words = shlex.split(line)
    if words[0] == "gradproof" and not {"|", "||", "&&", ">", "2>&1"} & set(words):
        return main(words[1:])
    return subprocess.call(["bash", "-ec", SHELL + line], env={**os.environ, "PYTHON": sys.executable})
