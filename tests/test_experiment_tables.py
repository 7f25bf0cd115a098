"""A column that float16 has spoiled is found by the features that were made of it; columns that it suits are not."""

from pathlib import Path

import numpy as np
import pytest
import torch

import gradproof
from gradproof.diagnosis.ranking import diagnose
from gradproof.experiments.tables import compare
from gradproof.record.run import open_run

RNG = np.random.default_rng(0)
MINUTES = np.sort(RNG.uniform(0, 60000, 6000))


def phase(numbers, period):
    return np.sin(2 * np.pi * numbers / period)


def jump(stored, feature):
    steps = compare(torch.as_tensor(stored), torch.as_tensor(feature))
    return None if steps is None else steps.jump


def test_a_phase_shorter_than_the_last_digit():
    stored = MINUTES.astype(np.float16)
    assert jump(stored, phase(stored.astype(np.float64), 45)) > 0.5
    assert jump(stored, phase(stored.astype(np.float64), 20000)) < 0.01  # a phase that it is good enough for
    assert jump(MINUTES.astype(np.float32), phase(MINUTES, 45)) is None


@pytest.mark.parametrize(
    ("stored", "feature"),
    [
        (RNG.integers(0, 1500, 6000).astype(np.float16), None),  # ids, and what belongs to them
        (RNG.integers(0, 255, 6000).astype(np.float16) / 4, None),
        (MINUTES.astype(np.float16), RNG.normal(size=6000)),  # something else
    ],
)
def test_columns_that_nothing_was_lost_of(stored, feature):
    table = RNG.normal(size=100_000)
    feature = table[stored.astype(int)] if feature is None else feature
    assert jump(stored, feature) is None


def test_temperatures_that_are_standardised():
    stored = (12 + 8 * RNG.normal(size=6000)).astype(np.float16)
    assert jump(stored, (stored.astype(np.float64) - 12) / 8) < 0.01


def train(path, kept):
    minutes = MINUTES.astype(kept)
    clock = minutes.astype(np.float64)
    x = torch.tensor(np.stack([phase(clock, 45), phase(clock, 1440)], 1), dtype=torch.float32)
    y = torch.tensor(phase(MINUTES, 45), dtype=torch.float32)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradproof.watch(model, optimizer, out=path):
        for rows in torch.randperm(6000, generator=torch.manual_seed(0)).split(500):
            loss = (model(x[rows]).squeeze(1) - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert len(open_run(path)) == 12
    return {cause.id: cause.where for cause in diagnose(path).causes if cause.level == "problem"}


def test_a_training_on_such_a_table(tmp_path):
    found = train(tmp_path / "short", np.float16)
    assert "low-precision-error/stored-in-half" in found
    place = found["low-precision-error/stored-in-half"]
    assert "float16" in Path(__file__).read_text().splitlines()[int(place.rpartition(":")[2]) - 1]
    assert "low-precision-error/stored-in-half" not in train(tmp_path / "long", np.float32)
