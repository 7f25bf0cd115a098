"""A user's program is type-checked against gradproof: the names are there, and they have types."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradproof

PROGRAM = """
import gradproof
import torch

model = torch.nn.Linear(2, 1)
with gradproof.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), out="runs/a") as run:
    model(torch.ones(1, 2)).sum().backward()
worst: str | None = gradproof.diagnose("runs/a").worst
steps: int = len(gradproof.open_run("runs/a"))
"""


def test_what_a_type_checker_sees_is_what_python_finds():
    tree = ast.parse(Path(gradproof.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {name.asname: node.module for node in block.body for name in node.names}
    assert seen == gradproof._HOME


@pytest.mark.slow
def test_a_program_of_five_lines_is_strictly_typed(tmp_path):
    file, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    file.write_text(PROGRAM)
    wrong.write_text("import gradproof\nsteps: str = gradproof.diagnose('runs/a').steps\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    source = str(Path(gradproof.__file__).parents[1])
    answers = [
        subprocess.run(
            [*command, "--follow-imports", "silent", str(each)],
            capture_output=True, text=True, cwd=tmp_path, env={"MYPYPATH": source, "PATH": "/usr/bin"},
        )
        for each in (file, wrong)
    ]  # fmt: skip
    assert answers[0].returncode == 0, answers[0].stdout
    assert "Incompatible types in assignment" in answers[1].stdout
