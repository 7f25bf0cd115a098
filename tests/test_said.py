"""What PyTorch and NumPy warn of is kept with its line, is a second witness, and alone no more than a note."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradproof
from gradproof.probes.watch import watch
from gradproof.record.run import open_run


def train(out, loss_of, steps=12, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer, out=out, **options):
        for _ in range(steps):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            loss_of(model(x), x.sum(1)).backward()
            optimizer.step()
    return open_run(out).info["facts"].get("said", [])


def against_a_row(prediction, target):
    return F.mse_loss(prediction, target)


def against_a_column(prediction, target):
    return F.mse_loss(prediction, target[:, None])


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_pytorch_warns_of_stands_beside_what_was_measured(tmp_path):
    said = train(tmp_path / "run", against_a_row)
    assert [(s["who"], s["step"], s["times"]) for s in said] == [("PyTorch", 0, 12)]
    assert said[0]["line"].startswith("test_said.py:") and "target size" in said[0]["text"]
    cause = gradproof.diagnose(tmp_path / "run").causes[0]
    assert cause.id == "axis-or-shape-error/broadcast-into-the-loss" and cause.confidence == "proven"
    assert cause.evidence[-1].startswith(
        f"PyTorch itself warns at {said[0]['line']}, 12 times: Using a target size"
    )


def test_a_healthy_twin_says_nothing(tmp_path):
    assert train(tmp_path / "run", against_a_column) == []
    assert not gradproof.diagnose(tmp_path / "run").causes


def test_alone_it_is_a_note_and_what_is_not_about_training_is_none(tmp_path):
    def with_words(prediction, target):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("from the script", stacklevel=1)
            prediction.grad  # noqa: B018  PyTorch's C++ warns: no leaf
            np.log(np.zeros(1))
            nn.init.uniform(torch.empty(2))  # deprecated
        return against_a_column(prediction, target)

    with warnings.catch_warnings(record=True) as shown:
        said = train(tmp_path / "run", with_words, experiments=False)
    assert {s["who"] for s in said} == {"PyTorch", "NumPy"} and len(said) == 3, said
    assert not any("Triggered internally" in s["text"] or "from the script" in s["text"] for s in said)
    assert sum("not a leaf" in str(w.message) for w in shown) <= 12  # as without us
    found = gradproof.diagnose(tmp_path / "run")
    assert {c.level for c in found.causes if "itself warns" in c.evidence[0]} == {"note"}
    assert not any("deprecated" in str(symptom) for symptom in found.symptoms)
