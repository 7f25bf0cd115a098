"""What a project puts into its own CI: the fixture `watched`, and the workflow that fails a sick pull request."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD({what}.parameters(), lr=0.1)

def train(steps=60):
    for _ in range(steps):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
"""
HEALTHY, SICK = TRAIN.format(what="model"), TRAIN.format(what="model[2]")
TEST = """
import pytest, train, sick

def test_healthy(watched):
    with watched(train.model, train.optimizer, schedule="parameters every step"):
        train.train()

def test_sick(watched):
    with watched(sick.model, sick.optimizer, schedule="parameters every step"):
        sick.train()

def test_fails_by_itself(watched):
    with watched(sick.model, sick.optimizer):
        sick.train()
        raise KeyError("its own reason")
"""


@pytest.mark.slow
def test_the_fixture_fails_what_is_sick_and_says_why(tmp_path):
    for name, text in (("train", HEALTHY), ("sick", SICK), ("test_train", TEST)):
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "gradproof.fixtures", "test_train.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "2 failed, 1 passed" in out and "PASSED test_train.py::test_healthy" in out
    assert "FAILED test_train.py::test_sick - Failed: the training is sick" in out
    assert "param-not-updated/not-in-optimizer" in out
    assert "FAILED test_train.py::test_fails_by_itself - KeyError: 'its own reason'" in out


def workflow_commands():
    """What the workflow's steps run with gradproof."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / "examples" / "github-action.yml").read_text())
    steps = workflow["jobs"]["train"]["steps"]
    return [step["run"] for step in steps if step.get("run", "").startswith("gradproof ")]


@pytest.mark.parametrize(
    "source, passes",
    [pytest.param(HEALTHY, True, marks=pytest.mark.slow), (SICK, False)],
    ids=["healthy", "sick"],
)
def test_the_workflow_fails_a_pull_request_whose_training_got_sick(source, passes, tmp_path):
    commands = workflow_commands()
    assert len(commands) == 2
    (tmp_path / "train.py").write_text(source + "\n\ntrain()\n")
    script = f'gradproof() {{ "{sys.executable}" -m gradproof "$@"; }}\n' + "\n".join(commands)
    answer = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == (0 if passes else 1), answer.stdout + answer.stderr
    assert ("param-not-updated" in answer.stdout) != passes
