"""The benchmark of public code runs a clone as it is, and only the commit that it names."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "real_code", Path(__file__).parent.parent / "benchmarks" / "real_code.py"
)
benchmark = importlib.util.module_from_spec(spec)
sys.modules["real_code"] = benchmark  # a dataclass looks its module up
spec.loader.exec_module(benchmark)

SCRIPT = """
import torch
from helper import width
model = torch.nn.Linear(width, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    x = torch.randn(16, width)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def clones(tmp_path, monkeypatch):
    clone = tmp_path / "clones" / "someone" / "code"
    (clone / "examples").mkdir(parents=True)
    (clone / "examples" / "train.py").write_text(SCRIPT)
    (clone / "helper.py").write_text("width = 4\n")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    monkeypatch.setattr(benchmark, "COMMITS", {"someone/code": head})
    return tmp_path / "clones"


def test_every_training_has_a_commit():
    assert {t.repository for t in benchmark.TRAININGS} == set(benchmark.COMMITS)
    assert len(benchmark.COMMITS) >= 12
    assert all(len(commit) == 40 for commit in benchmark.COMMITS.values())


@pytest.mark.slow
def test_a_script_runs_in_a_copy_and_ends(clones, tmp_path):
    training = benchmark.Training("someone/code", "examples", "train.py")
    row = benchmark.run(training, clones / "someone/code", tmp_path / "out", steps=30, seconds=120)
    commit = benchmark.COMMITS["someone/code"][:8]
    assert row.startswith(f"| someone/code | {commit} | `examples/train.py` | 30 steps, ")
    assert sorted(p.name for p in (clones / "someone/code").iterdir()) == [".git", "examples", "helper.py"]


def test_another_commit_or_a_changed_file_is_refused(clones, monkeypatch):
    assert benchmark.find_clone(clones, "someone/code") == clones / "someone/code"
    (clones / "someone/code/helper.py").write_text("width = 5\n")
    with pytest.raises(SystemExit, match="changed files; next: git"):
        benchmark.find_clone(clones, "someone/code")
    monkeypatch.setattr(benchmark, "COMMITS", {"someone/code": "0" * 40, "someone/other": "0" * 40})
    with pytest.raises(SystemExit, match=r"next: git -C .* checkout 0000"):
        benchmark.find_clone(clones, "someone/code")
    with pytest.raises(SystemExit, match="is no clone; --clone"):
        benchmark.find_clone(clones, "someone/other")
