"""From which file, and which row of it, a sample comes: said by the data set, asked for by `fed` and `origin`."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import gradproof
from gradproof import children
from gradproof.probes.sources import sources_of, split_of

SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset
torch.manual_seed(0)

class Shard(Dataset):
    def __init__(self, path):
        self.path, self.split = path, "train"
        self.rows = [tuple(map(float, line.split(","))) for line in open(path)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        *x, y = self.rows[i]
        return torch.tensor(x), torch.tensor(y)

for name in ("a.csv", "b.csv"):
    with open(name, "w") as file:
        for i in range(12):
            *x, y = torch.randn(4).tolist()
            y = "nan" if sys.argv[1] == name and i == 7 else y
            file.write(",".join(map(str, [*x, y])) + "\\n")
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(ConcatDataset([Shard("a.csv"), Shard("b.csv")]), 24, shuffle=True, num_workers=int(sys.argv[2]))
for epoch in range(3):
    for x, y in loader:
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


class Files(Dataset):
    """Named files below a root, with texts beside them that are no files."""

    def __init__(self, root, names):
        self.root, self.texts, self.train = root, ["one", "two", "three"], False
        self.samples = [(name, 0) for name in names]

    def __len__(self):
        return len(self.samples)


class Mapped(Dataset):
    def __init__(self, array):
        self.array = array

    def __len__(self):
        return len(self.array)


def test_every_sample_has_a_source_and_a_number_there(tmp_path):
    for name in ("x.png", "y.png", "z.png"):
        (tmp_path / name).touch()
    files = Files(str(tmp_path), ["x.png", "y.png", "z.png"])
    mapped = Mapped(np.memmap(tmp_path / "tokens.bin", np.int32, "w+", shape=(5, 2)))
    plain = TensorDataset(torch.zeros(4, 1))
    whole = ConcatDataset([files, mapped, Subset(plain, [3, 2])])
    names, places = sources_of(whole, [2, 0, 4, 8, 9])
    assert names == ("z.png", "x.png", "tokens.bin", "TensorDataset")
    assert places == ((0, 2), (1, 0), (2, 1), (3, 3), (3, 2))
    assert split_of(whole) == "test" and split_of(plain) == ""
    assert sources_of(ConcatDataset([plain, TensorDataset(torch.zeros(4, 1))]), [0, 5])[0] == (
        "TensorDataset",
        "TensorDataset 2",
    )


def test_a_file_that_is_not_there_is_no_source(tmp_path):
    names, places = sources_of(Files(str(tmp_path), ["x.png", "y.png", "z.png"]), [1])
    assert names == ("Files",) and places == ((0, 1),)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bad", ["b.csv", "none"])
def test_a_bad_number_comes_from_its_file_and_row(tmp_path, bad, workers):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["-m", "gradproof", "run", "--quiet", "--examine", "off", "--until", "2", "--out", "run"]
    subprocess.run(
        [sys.executable, *command, "train.py", bad, str(workers)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": children.environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"},
    )
    run = gradproof.open(tmp_path / "run")
    fed = run.ask("fed")
    counted = {row["what"]: row["samples"] for row in fed.rows if row["what"].startswith("source")}
    assert counted == {"source a.csv": 12, "source b.csv": 12} and "a.csv" in fed.sentence
    assert [row["split"] for row in fed.rows if row.get("in_this_step")] == ["train"]
    found = run.ask("origin")
    if bad == "b.csv":
        assert "b.csv, row 7" in found.sentence and found.numbers["file"] == "b.csv, row 7"
        assert "train.py" in found.place
    else:
        assert "nan" not in found.sentence and "row 7" not in found.sentence
        entry = run.ask("origin", of="target").numbers
        shard, row = entry["file"].split(", row ")
        line = (tmp_path / shard).read_text().splitlines()[int(row)]
        assert float(line.split(",")[3]) == pytest.approx(float(entry["value"]), rel=1e-5)
