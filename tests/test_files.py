"""Numbered files read in the order of their names as text, and in ways that are well."""

import numpy as np
import pytest
import torch

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
