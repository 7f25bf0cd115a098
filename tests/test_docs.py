"""What the README and the docs show runs, and what they name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|sh|console) runnable\n(.*?)^```$", re.M | re.S)
PACKAGES = sorted(p.parent for p in (ROOT / "src" / "gradproof").glob("*/__init__.py"))


def run_python(text, directory):
    torch.manual_seed(0)
    before = Path.cwd()
    os.chdir(directory)
    try:
        exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)


def run_shell(text, directory):
    """Each line that is a command; `gradproof` is this Python's own."""
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    script = f'gradproof() {{ "{sys.executable}" -m gradproof "$@"; }}\n' + "\n".join(lines)
    answer = subprocess.run(
        ["bash", "-ec", script], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_runnable_blocks_run(page, tmp_path, capsys):
    """In one directory, in the order of the page: a block may use what the ones before it made."""
    for language, text in BLOCK.findall(page.read_text()):
        (run_python if language == "python" else run_shell)(text, tmp_path)


def test_the_readme_has_blocks_to_run():
    found = [language for language, _ in BLOCK.findall((ROOT / "README.md").read_text())]
    assert found.count("python") >= 3 and "sh" in found


def test_the_tree_is_the_tree():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("## The house") :].split("```")[1]
    named = dict(re.findall(r"^  (\w+)/ +(.*)$", tree, re.M))
    filled = {p.name for p in PACKAGES if any(f.name != "__init__.py" for f in p.glob("*.py"))}
    assert filled <= set(named) <= {p.name for p in PACKAGES}
    for package, files in named.items():
        shown = set(re.findall(r"[a-z_]+", files.partition(":")[2]))
        there = {f.stem for f in (ROOT / "src" / "gradproof" / package).glob("*.py")}
        assert shown <= there, f"{package}: {sorted(shown - there)} are not there"


def test_every_package_is_in_the_table_of_imports():
    design = (ROOT / "docs" / "design.md").read_text()
    assert {p.name for p in PACKAGES} <= set(re.findall(r"^\| (\w+) \|", design, re.M))


def test_make_run_is_the_demo_that_the_readme_promises():
    (recipe,) = re.findall(r"^run: .*\n\t@\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe == "gradproof demo"
    assert re.search(r"^make run +# gradproof demo:", (ROOT / "README.md").read_text(), re.M)


def test_the_demo_plants_a_fault_that_exists():
    from gradproof.commands.watching import DEMO
    from gradproof.faults.catalogue import FAULTS

    assert DEMO in {fault.name for fault in FAULTS}
