"""Numbered files read in the order of their names as text, and in ways that are well."""

import json
import re
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch

from gradproof.cli import main
from gradproof.diagnosis.bookkeeping import files_as_text
from gradproof.probes.files import Readings
from gradproof.probes.watch import watch
from gradproof.record.run import open_run
from gradproof.record.writer import RunWriter


def read(names):
    facts = {}
    readings = Readings(facts)
    for name in names:
        readings.note(f"data/{name}")
    return facts.get("files", {})


@pytest.mark.parametrize(
    "names, found",
    [
        (sorted(f"img_{i}.npy" for i in range(60)), True),
        ([f"img_{i}.npy" for i in range(60)], False),
        (sorted(f"img_{i:03}.npy" for i in range(60)), False),
        ([f"img_{i}.npy" for i in np.random.default_rng(0).permutation(60)], False),
        (sorted(f"{i}_left.png" for i in range(60)), True),
        (sorted(f"img_{i}.npy" for i in range(9)), False),
    ],
)
def test_the_order_of_files(names, found):
    assert bool(read(names)) == found


def test_files_that_a_training_reads(tmp_path):
    for i in range(30):
        np.save(tmp_path / f"scan_{i}.npy", np.ones(3, np.float32))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for file in sorted(tmp_path.glob("*.npy")):
            optimizer.zero_grad()
            model(torch.from_numpy(np.load(file))).sum().backward()
            optimizer.step()
    (kind,) = open_run(tmp_path / "run").info["facts"]["files"].values()
    assert kind["names"] == ["scan_19.npy", "scan_2.npy"] and kind["line"].startswith("test_files.py:")


def test_what_is_no_file_was_not_read(tmp_path):
    """Python itself asks for the places of sys.path as if they were archives."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "words.txt").write_text("word")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, out=tmp_path / "run", experiments=False):
        for name in ("folder", "missing", "words.txt"):
            with suppress(OSError), open(tmp_path / name) as stream:
                stream.read()
        optimizer.step()
    assert list(open_run(tmp_path / "run").info["facts"]["opened"]) == [str(tmp_path / "words.txt")]


def run_with(path, curve, kinds=1):
    kind = {"names": ["a_10.npy", "a_2.npy"], "count": 48, "line": "train.py:9"}
    writer = RunWriter(path, {"facts": {"files": {f"kind {k}": kind for k in range(kinds)}}})
    for step, loss in enumerate(curve):
        writer.write_step({"step": step, "loss": float(loss), "order": "zbs", "lr": 0.1, "epoch": step // 40})
    writer.close()
    return [symptom.level for symptom in files_as_text(open_run(path))]


def test_learning_by_heart_is_told_from_learning(tmp_path):
    by_heart = np.concatenate([np.full(40, 1.6), np.linspace(1.6, 0.4, 160)])
    assert run_with(tmp_path / "a", by_heart) == ["problem"]
    assert run_with(tmp_path / "b", np.linspace(1.6, 0.4, 200)) == ["note"]
    assert run_with(tmp_path / "c", by_heart, kinds=2) == []  # images and their masks


SHARDS = """
import numpy as np, torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for shard in range(4):
    rows = np.load(f"shard_{shard}.npy")
    for row in rows:
        optimizer.zero_grad()
        row = torch.from_numpy(row)
        (model(row[:, :3]) - row[:, 3:]).square().mean().backward()
        optimizer.step()
"""


def test_the_step_at_which_each_file_was_opened(tmp_path, monkeypatch, capsys):
    """Of shards that are read one after the other: with the run, with each recorded step, and where the loss turns."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SHARDS)
    draw = np.random.default_rng(0)
    for shard in range(4):
        rows = draw.normal(size=(100, 8, 4)).astype(np.float32)
        rows[..., 3] = (
            rows[..., 3] * 3 if shard == 3 else rows[..., :3].sum(-1)
        )  # of the last, targets are noise
        np.save(tmp_path / f"shard_{shard}.npy", rows)
    words = "-m gradproof run --quiet --examine off --out run train.py"
    subprocess.run([sys.executable, *words.split()], check=True, capture_output=True)
    facts = open_run("run").info["facts"]
    assert facts["opened"] == {f"shard_{shard}.npy": 100 * shard for shard in range(4)}
    assert main(["ask", "run", "fed", "--step", "316", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    files = [row for row in answer["rows"] if row["what"].startswith("file ")]
    assert files[0] == {"what": "file shard_3.npy", "opened_at_step": 300} and len(files) == 4
    assert "The file opened last before it is shard_3.npy, at step 300." in answer["sentence"]
    assert main(["brief", "run"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"the loss leaps at about step (29\d|30\d):", text), text
    assert "shard_3.npy was first opened at step 300" in text


def test_a_library_or_the_run_itself_is_no_data(tmp_path):
    facts = {}
    readings = Readings(facts, lambda: 7, "/runs/a")
    for path in (
        "/runs/a/steps.csv",
        np.__file__,
        f"{np.__path__[0]}/data.txt",
        "/proc/self/stat",
        "x.py",
        "a.csv",
    ):
        readings.note(path)
    assert facts["opened"] == facts["_opened"] == {"a.csv": 7}


def test_of_many_files_the_last_are_kept():
    facts, steps = {}, iter(range(10_000))
    readings = Readings(facts, lambda: next(steps))
    for number in range(1000):
        readings.note(f"data/{number}.bin")
    assert next(iter(facts["opened"])) == "data/600.bin" and list(facts["_opened"])[-1] == "data/999.bin"
    readings.note("data/995.bin")
    assert (
        list(facts["_opened"].items())[-1] == ("data/995.bin", 1000)
        and facts["opened"]["data/995.bin"] == 995
    )
