"""Processes that a script starts itself are watched, and nothing happens in a process that was not asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradproof.children import ATTACH
from gradproof.diagnosis.ranks import ranks_out_of_step
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
    del model  # first: its reducer would free the group, and may wait for gloo's thread for ever
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (2,), nprocs=2)
"""


FORK = """
import os, sys, torch
import torch.multiprocessing as mp

def train(lr, steps=6):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print("trained", lr, flush=True)

if __name__ == "__main__":
    START
"""
SWEEP = """mp.set_start_method("METHOD")
    children = [mp.Process(target=train, args=(lr,)) for lr in (0.1, 0.01)]
    [c.start() for c in children]; [c.join() for c in children]
    sys.exit(max(c.exitcode for c in children))"""
OS_FORK = """train(0.1, 3)
    if os.fork() == 0:
        train(0.01)
        sys.exit(3)
    print("child", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    train(0.1, 4)"""


@pytest.fixture
def python(tmp_path):
    """Runs Python in a directory of its own; gradproof lies beside."""
    (tmp_path / "work").mkdir()

    def run(text, *before, path=(), **variables):
        (tmp_path / "work" / "train.py").write_text(text)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GRADPROOF")}
        paths = [*map(str, path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of an older gradproof that is installed here
        environment.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), **variables)
        command = [sys.executable, *before, "train.py"]
        return subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=240
        )

    run.directory = tmp_path / "work"
    return run


def runs_in(directory):
    return sorted(name for name in os.listdir(directory) if name.startswith("run"))


def test_nothing_of_ours_is_loaded_where_gradproof_is_not_asked():
    """`import torch` of every other program of the environment does not depend on us."""
    assert "torch.backends" not in (ROOT / "pyproject.toml").read_text()


def test_nothing_happens_unless_asked(python):
    loaded = "\nimport sys\nprint([m for m in sys.modules if m.startswith('gradproof')])"
    answer = python(PLAIN + loaded, path=[ATTACH])
    assert answer.returncode == 0 and answer.stderr == ""
    assert answer.stdout == "done\n[]\n"
    assert os.listdir(python.directory) == ["train.py"]


def test_a_variable_is_enough_to_be_watched(python):
    answer = python(PLAIN, path=[ATTACH], GRADPROOF="1")
    assert answer.returncode == 0 and answer.stdout == "done\n"
    assert "6 steps" in answer.stderr and answer.stderr.rstrip().splitlines()[-1].startswith(
        "next: gradproof"
    )
    (run,) = (python.directory / "runs").iterdir()
    assert len(open_run(run)) == 6 and open_run(run).info["ended"]


def test_a_run_with_the_variable_set_is_watched_once(python):
    answer = python(PLAIN, "-m", "gradproof", "run", "--out", "run", path=[ATTACH], GRADPROOF="1")
    assert answer.returncode == 0 and answer.stderr.count("· 6 steps") == 1
    assert sorted(os.listdir(python.directory)) == ["run", "train.py"]


def test_an_error_in_here_does_not_break_import_torch(python):
    answer = python("import torch\nprint('done')", path=[ATTACH], GRADPROOF_RUN="no json")
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
    # each its own data, one averaged gradient (which a busy rank may measure less closely)
    assert losses[0] != losses[1] and norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert [p["name"] for p in runs[1].info["parameters"]] == ["weight", "bias"]
    assert runs[0].info["cost"]["taped_steps"] >= 2 and runs[1].info["cost"]["taped_steps"] == 0
    assert not [event for event in runs[0].events if event["event"] == "experiment_failed"]
    lines = runs[0].info["facts"]["lines"]  # made before the optimizer, and noted all the same
    assert {"init_process_group", "manual_seed", "ddp", "synchronised forward"} <= set(lines)


def test_a_process_looks_as_if_we_were_not_there(python, tmp_path):
    """sys.path, the environment's own sitecustomize, and how torch was loaded."""
    text = (
        "import sys, sitecustomize, torch\nprint(sys.path, [type(finder) for finder in sys.meta_path])\n"
        "print(sitecustomize.__file__, sitecustomize.MARK)\n"
        "print(vars(torch.__spec__.loader), torch.__spec__.name, type(torch.__loader__))"
    )
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("MARK = 17\n")
    plain = python(text, path=[tmp_path / "own"])
    asked = python(text, path=[ATTACH, tmp_path / "own"], GRADPROOF="1")
    assert plain.returncode == 0 and "17" in plain.stdout
    assert (asked.stdout, asked.stderr) == (plain.stdout, plain.stderr)


def test_a_gradproof_that_is_gone_breaks_nothing(python, tmp_path):
    """The folder is still on PYTHONPATH, the package is not beside it any more."""
    (tmp_path / "gone" / "attach").mkdir(parents=True)
    file = tmp_path / "gone" / "attach" / "sitecustomize.py"
    file.write_text((Path(ATTACH) / "sitecustomize.py").read_text())
    answer = python(PLAIN, "-W", "error", path=[file.parent], GRADPROOF="1")
    assert answer.returncode == 0 and answer.stdout == "done\n"
    assert answer.stderr.startswith("gradproof cannot watch process")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_trainings_in_processes_without_a_group_are_runs_of_their_own(method, python):
    text = FORK.replace("START", SWEEP).replace("METHOD", method)
    answer = python(text, "-m", "gradproof", "run", "--examine", "off", "--out", "run")
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == ["trained 0.01", "trained 0.1"]
    assert "2 of which were watched; this is run.process" in answer.stderr
    assert answer.stderr.count("gradproof · ") == 1 and "distributed" not in answer.stderr
    assert runs_in(python.directory) == ["run", "run.process", "run.process-2"]
    found = [open_run(python.directory / name) for name in ("run.process", "run.process-2")]
    assert sorted(run.steps["lr"][0] for run in found) == [0.01, 0.1]
    assert all(len(run) == 6 and run.info["ended"] and run.info["world"] == 1 for run in found)
    assert all(run.info["cost"]["taped_steps"] for run in found)
    assert not [symptom for run in found for symptom in ranks_out_of_step(run)]


@pytest.mark.slow
def test_a_forked_process_has_a_run_of_its_own_and_no_report(python):
    plain = python(FORK.replace("START", OS_FORK))
    answer = python(
        FORK.replace("START", OS_FORK), "-m", "gradproof", "run", "--examine", "off", "--out", "run"
    )
    assert answer.returncode == plain.returncode == 0, answer.stderr
    assert answer.stdout == plain.stdout and "child 3\n" in plain.stdout
    assert answer.stderr.count("gradproof · ") == 1, answer.stderr
    assert runs_in(python.directory) == ["run", "run.process"]
    parent, child = (open_run(python.directory / name) for name in ("run", "run.process"))
    assert len(parent) == 7 and len(child) == 6 and parent.info["ended"] and child.info["ended"]
    assert set(parent.steps["lr"]) == {0.1} and set(child.steps["lr"]) == {0.01}
