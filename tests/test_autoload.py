"""Processes that a script starts itself are watched, and nothing happens in a process that was not asked."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from gradproof.record.run import open_run

ROOT = Path(__file__).parent.parent

TRAIN = """
import torch
def train(rank=0):
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in LOADER:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
PLAIN = TRAIN.replace("LOADER", "torch.randn(6, 8, 4)") + "train()\nprint('done')\n"
WORKERS = (
    TRAIN.replace(
        "LOADER", "torch.utils.data.DataLoader(DATA, 8, num_workers=2, multiprocessing_context='spawn')"
    )
    + "DATA = torch.randn(48, 4)\nif __name__ == '__main__':\n    train()\n"
)
SPAWN = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def work(rank, world):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(7):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2,), nprocs=2)
"""


@pytest.fixture
def python(tmp_path):
    """Runs Python in a directory of its own, with the entry point that an installed gradproof has."""
    path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    if not any(e.value.startswith("gradproof.") for e in entry_points(group="torch.backends")):
        info = tmp_path / "site" / "gradproof_entry-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gradproof-entry\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[torch.backends]\ngradproof = gradproof.probes.autoload:attach_if_asked\n"
        )
        path.append(str(tmp_path / "site"))
    (tmp_path / "work").mkdir()

    def run(text, *before, **variables):
        (tmp_path / "work" / "train.py").write_text(text)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADPROOF")}
        environment.update(PYTHONPATH=os.pathsep.join(filter(None, path)), **variables)
        command = [sys.executable, *before, "train.py"]
        return subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=240
        )

    run.directory = tmp_path / "work"
    return run


def test_the_entry_point_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."torch.backends"]' in text
    assert 'gradproof = "gradproof.probes.autoload:attach_if_asked"' in text


def test_nothing_happens_unless_asked(python):
    loaded = "\nimport sys\nprint([m for m in sys.modules if m.startswith('gradproof.probes.')])"
    answer = python(PLAIN + loaded)
    assert answer.returncode == 0 and answer.stderr == ""
    assert answer.stdout == "done\n['gradproof.probes.autoload']\n"
    assert os.listdir(python.directory) == ["train.py"]


def test_a_variable_is_enough_to_be_watched(python):
    answer = python(PLAIN, GRADPROOF="1")
    assert answer.returncode == 0 and answer.stdout == "done\n"
    assert "6 steps" in answer.stderr and answer.stderr.rstrip().splitlines()[-1].startswith(
        "next: gradproof"
    )
    (run,) = (python.directory / "runs").iterdir()
    assert len(open_run(run)) == 6 and open_run(run).info["ended"]


def test_a_run_with_the_variable_set_is_watched_once(python):
    answer = python(PLAIN, "-m", "gradproof", "run", "--out", "run", GRADPROOF="1")
    assert answer.returncode == 0 and answer.stderr.count("6 steps") == 1
    assert sorted(os.listdir(python.directory)) == ["run", "train.py"]


def test_an_error_in_here_does_not_break_import_torch(python):
    answer = python("import torch\nprint('done')", GRADPROOF_RUN="no json")
    assert answer.stdout == "done\n" and answer.stderr.startswith("gradproof cannot watch process")


def test_workers_of_a_loader_leave_nothing_behind(python):
    answer = python(WORKERS, "-m", "gradproof", "run", "--out", "run", "--quiet")
    assert answer.returncode == 0, answer.stderr
    assert [n for n in os.listdir(python.directory) if n.startswith("run")] == ["run"]
    assert len(open_run(python.directory / "run")) == 6


@pytest.mark.slow
def test_spawned_ranks_are_watched(python):
    answer = python(SPAWN, "-m", "gradproof", "run", "--out", "run")
    assert answer.returncode == 0, answer.stderr
    assert (
        "train.py trained in processes that it started, 2 of which were watched; this is run.rank0"
        in answer.stderr
    )
    assert answer.stderr.count("7 steps") == 1
    runs = [open_run(python.directory / f"run.rank{rank}") for rank in (0, 1)]
    assert [run.info["rank"] for run in runs] == [0, 1] and all(len(run) == 7 for run in runs)
    assert all(run.info["ended"] and run.info["world"] == 2 for run in runs)
    losses, norms = ([run.steps[key].tolist() for run in runs] for key in ("loss", "grad_norm"))
    assert losses[0] != losses[1] and norms[0] == norms[1]  # each its own data, one averaged gradient
    assert [p["name"] for p in runs[1].info["parameters"]] == ["weight", "bias"]
    assert runs[0].info["cost"]["taped_steps"] >= 2 and runs[1].info["cost"]["taped_steps"] == 0
    assert not [event for event in runs[0].events if event["event"] == "experiment_failed"]
    lines = runs[0].info["facts"]["lines"]  # made before the optimizer, and noted all the same
    assert {"init_process_group", "manual_seed", "ddp", "synchronised forward"} <= set(lines)
