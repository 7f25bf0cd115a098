"""Positions, times and ids that half precision makes equal; and pixels, masks and casts that are exact."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.rounding import ID, are_whole_numbers_kept


def found(model, make_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return examine(are_whole_numbers_kept, model, optimizer, plain_step(model, optimizer, make_loss), steps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_times_cast_before_their_sine(dtype):
    model, periods = nn.Linear(4, 1), torch.tensor([12.0, 24.0])
    hours = torch.randperm(4000)[:64]

    def loss():
        angle = hours.to(dtype).unsqueeze(1) * (6.2831853 / periods).to(dtype)
        return model(torch.cat([angle.sin(), angle.cos()], 1).float()).pow(2).mean()

    verdicts = found(model, loss)
    assert ids(verdicts, "problem") == ({ID} if dtype == torch.bfloat16 else set())
    if verdicts:
        assert "test_experiment_rounding.py:" in verdicts[0].where


@pytest.mark.parametrize("half", [True, False])
def test_positions_under_autocast(half):
    model, scale = nn.Linear(16, 1), 0.5 ** torch.arange(8).float()

    def loss():
        positions = torch.arange(1024).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            angle = positions[:, None] @ scale[None]
        return model(torch.cat([angle.sin(), angle.cos()], 1).float()).pow(2).mean()

    assert ids(found(model, loss)) == ({ID} if half else set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ids_that_travel_among_features(dtype):
    model, items = nn.Embedding(5000, 4), torch.randperm(5000)[:64]

    def loss():
        row = torch.stack([items.float(), torch.rand(64)], 1).to(dtype)
        return model(row[:, 0].long()).pow(2).mean()

    assert ids(found(model, loss), "problem") == ({ID} if dtype == torch.float16 else set())


def test_a_range_counted_in_half_precision():
    model = nn.Linear(2, 1)

    def loss():
        angle = torch.arange(600, dtype=torch.bfloat16)[:, None]
        return model(torch.cat([angle.sin(), angle.cos()], 1).float()).pow(2).mean()

    assert ids(found(model, loss)) == {ID}


@pytest.mark.parametrize("half", [True, False])
def test_a_buffer_of_positions_cast_with_the_model(half):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("positions", torch.arange(600).float()[:, None])
            self.layer = nn.Linear(2, 1)

        def forward(self):
            angle = self.positions * 0.5
            return self.layer(torch.cat([angle.sin(), angle.cos()], 1))

    model = Positions().bfloat16() if half else Positions()
    assert ids(found(model, lambda: model().float().pow(2).mean())) == ({ID} if half else set())


@pytest.mark.parametrize(
    "data",
    [
        torch.randint(0, 256, (32, 64)),  # pixels
        torch.randint(0, 4096, (32, 64)),  # pixels of 12 bits: the rounding is small beside their spread
        (torch.rand(32, 64) < 0.5).float(),
        torch.randn(32, 64),
    ],
)
def test_what_is_no_position_is_silent(data):
    model = nn.Linear(64, 1).bfloat16()
    assert not found(model, lambda: model(data.to(torch.bfloat16)).float().pow(2).mean())


@pytest.mark.parametrize("start, id", [(1_700_000_000, {ID}), (0, set())])
def test_seconds_since_an_epoch_in_float32(start, id):
    model = nn.Linear(2, 1)
    seconds = start + torch.randint(0, 20_000, (64,))

    def loss():
        phase = 6.2831853 * torch.frac(seconds.float()[:, None] / 180.0)
        return model(torch.cat([phase.sin(), phase.cos()], 1)).pow(2).mean()

    assert ids(found(model, loss), "problem") == id
