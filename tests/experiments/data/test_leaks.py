"""A validation set that shares rows with the training set, one that does not, and a look at the training error."""

import pytest
import torch
from torch import nn

import gradproof
from gradproof.record.run import open_run

DATA = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))


def verdicts(tmp_path, validation, whole=True):
    """What is said of a training on the first 240 rows, validated after each epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(12):
            model.train()
            for rows in torch.randperm(240).split(40):
                x = DATA[rows]
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(validation)
    found = open_run(tmp_path / "run").events
    return [e for e in found if e.get("experiment") == "has_validation_been_trained_on"]


def test_a_split_that_overlaps(tmp_path):
    said = verdicts(tmp_path, DATA[200:300])
    assert said[-1]["id"] == "data-order-or-sampling/leaked-validation" and said[-1]["level"] == "warning"
    assert "40 % of the 100 samples" in said[-1]["evidence"][0]
    assert "test_leaks.py:" in said[-1]["where"]


@pytest.mark.parametrize("validation", [DATA[240:], DATA[:240], torch.randint(0, 2, (100, 6)).float()])
def test_kept_apart_or_the_training_error_or_data_of_few_kinds(tmp_path, validation):
    assert not [e for e in verdicts(tmp_path, validation) if e["verdict"] == "confirmed"]


def test_prepared_in_another_way(tmp_path):
    said = [e for e in verdicts(tmp_path, 255 * DATA[240:]) if e["verdict"] == "confirmed"]
    assert said[-1]["id"] == "input-or-target-scale/validated-otherwise" and said[-1]["level"] == "problem"
    assert "test_leaks.py:" in said[-1]["where"]


def test_noise_on_one_of_them_is_no_other_way(tmp_path):
    assert not [e for e in verdicts(tmp_path, 2 * DATA[240:] + 0.5) if e["verdict"] == "confirmed"]
