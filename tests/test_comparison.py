"""Runs side by side: each planted difference is named, and the same run twice has none."""

import subprocess

import numpy as np
import pytest
from examined import write_examination
from pages import run_apart, run_line

from gradproof.record.run import open_run
from gradproof.record.schema import STATISTICS, STATISTICS_FRAME
from gradproof.record.source import SCRIPT_COPY, describe_source, find_commit
from gradproof.record.writer import RunWriter
from gradproof.report.comparison import compare_trainings, describe_arguments, label_runs
from gradproof.report.comparison_text import render_comparison

SCRIPT = "import torch\nlr = {lr}\nprint('training')\n"


def write_run(path, losses, command=("train.py",), lr=0.1, norm=1.0, torch="2.13.0", events=()):
    group = {"lr": lr, "betas": [0.9, 0.999]}
    info = {
        "command": list(command),
        "source": {"file": "train.py", "sha256": f"{lr}", "commit": "a" * 40},
        "versions": {"torch": torch, "python": "3.11.7"},
        "optimizers": [{"name": "optimizer", "class": "Adam", "groups": [group]}],
        "parameters": [{"name": "w", "shape": [2, 2], "dtype": "float32", "trainable": True, "optimizer": 0}],
    }
    writer = RunWriter(path, info)
    writer.append(SCRIPT_COPY, SCRIPT.format(lr=lr).encode())
    for step, loss in enumerate(losses):
        rows = np.full((1, len(STATISTICS)), norm)
        writer.write_frame(STATISTICS_FRAME, step, np.array([writer.add_tensor("gradient", "w")]), rows)
        writer.write_step({"step": step, "loss": float(loss), "order": "zbs"})
    for event in events:
        writer.write_event("verdict", **event)
    writer.close()
    return open_run(path)


FALLING = np.linspace(4.0, 1.0, 60)


def test_the_same_run_twice_differs_in_nothing(tmp_path):
    run = write_run(tmp_path / "a", FALLING)
    found = compare_trainings([run, open_run(tmp_path / "a")])
    assert found.labels == ("a (1)", "a (2)")
    assert found.differences == () and found.tensors == () and found.code == ("", "")
    assert found.apart_since == (None, None) and found.health[0] == found.health[1]


def test_only_what_was_asked_is_called_good(tmp_path):
    write_run(tmp_path / "a", FALLING)
    write_examination(write_run(tmp_path / "b", FALLING).path)
    runs = [open_run(tmp_path / name) for name in "ab"]
    lines = render_comparison(compare_trainings(runs), runs, 100, False).splitlines()
    (health,) = [line.split() for line in lines if line.startswith("  health")]
    assert health == ["health", "nothing", "found", "good"]


def test_every_planted_difference_is_named(tmp_path):
    first = write_run(tmp_path / "a", FALLING, ("train.py", "--lr", "0.1", "--fast"))
    verdict = {
        "experiment": "e",
        "verdict": "confirmed",
        "family": "lr-too-high",
        "id": "lr-too-high/overshoot",
    }
    losses = np.where(np.arange(60) < 20, FALLING, np.nan)
    second = write_run(
        *(tmp_path / "b", losses, ("train.py", "--lr=3"), 3.0, 8.0, "2.11.0"),
        events=[{**verdict, "where": "w", "step": 20}],
    )
    found = compare_trainings([first, second])
    differences = {(d.group, d.what): d.values for d in found.differences}
    assert differences == {
        ("code", "text (sha256)"): ("0.1", "3.0"),
        ("arguments", "--lr"): ("0.1", "3"),
        ("arguments", "--fast"): ("given", None),
        ("versions", "torch"): ("2.13.0", "2.11.0"),
        ("optimizer", "lr"): ("0.1", "3.0"),
    }
    assert found.apart_since == (None, 20)
    row = next(row for row in found.findings if row.id == "lr-too-high/overshoot")
    assert row.levels == (None, "problem") and row.where == (None, "w")
    assert [(t.name, t.values, t.ratio) for t in found.tensors] == [("w", (1.0, 8.0), 8.0)]
    assert "-lr = 0.1\n+lr = 3.0" in found.code[1]
    assert found.health[0].worst is None and found.health[1].worst == "problem"
    assert np.isnan(found.health[1].last_loss) and found.health[1].best_loss == pytest.approx(FALLING[19])


def test_an_empty_run_can_be_compared(tmp_path):
    found = compare_trainings([write_run(tmp_path / "a", []), write_run(tmp_path / "b", FALLING)])
    assert np.isnan(found.health[0].last_loss) and found.health[0].steps == 0
    assert found.apart_since == (None, None)


def test_runs_from_an_older_gradproof_have_no_source(tmp_path):
    runs = []
    for name in "ab":
        RunWriter(tmp_path / name, {"command": []}).close()
        runs.append(open_run(tmp_path / name))
    found = compare_trainings(runs)
    assert found.differences == () and found.code == ("", "")


def test_labels_tell_runs_apart(tmp_path):
    assert label_runs([tmp_path / "x" / "a", tmp_path / "x" / "b"]) == ["a", "b"]
    assert label_runs([tmp_path / "x" / "a", tmp_path / "y" / "a"]) == ["x/a", "y/a"]


def test_arguments_are_read_by_name():
    words = ["train.py", "--lr", "-3e-4", "--fast", "--name=x=y", "seed=1", "data.txt", "-v"]
    assert describe_arguments({"command": words}) == {
        **{"--lr": "-3e-4", "--fast": "given", "--name": "x=y", "seed": "1", "word 1": "data.txt"},
        "-v": "given",
    }


def test_the_commit_is_read_from_git_itself(tmp_path):
    script = tmp_path / "deep" / "train.py"
    script.parent.mkdir()
    script.write_text("x = 1\n")
    assert find_commit(script.parent) is None or describe_source(script)[0]["commit"]  # /tmp may lie in one
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert find_commit(script.parent) is None  # a repository without a commit
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    said = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert describe_source(script)[0]["commit"] == said
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert find_commit(script.parent) == said
    subprocess.run([*git, "worktree", "add", "-q", str(tmp_path / "tree")], check=True)
    assert find_commit(tmp_path / "tree") == said
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True)
    assert find_commit(script.parent) == said


def test_a_missing_script_is_no_error(tmp_path):
    assert describe_source(tmp_path / "none.py") == ({}, b"")
    assert describe_source("") == ({}, b"") and describe_source(None) == ({}, b"")


def test_a_watched_script_is_kept_with_its_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nw = torch.nn.Linear(2, 1)\no = torch.optim.SGD(w.parameters(), lr=0.1)\n"
        "w(torch.ones(3, 2)).mean().backward()\no.step()\n"
    )
    run_apart(run_line, "gradproof run --no-experiments --out run train.py", tmp_path)
    run = open_run(tmp_path / "run")
    assert (run.path / SCRIPT_COPY).read_text() == script.read_text()
    assert run.info["source"]["file"] == "train.py" and len(run.info["source"]["sha256"]) == 64
