"""Tables that were counted in half precision, and tables with equal rows for other reasons."""

import math

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.merged_rows import MANY, find_runs, have_neighbours_become_one
from gradproof.probes.tables import stepped_tables

HOURS = 3000
ID = "low-precision-error/merged-rows"


def waves(hours):
    phases = [2 * math.pi * k * hours / period for period in (24.0, 168.0) for k in (1, 2)]
    return torch.stack([f(phase) for phase in phases for f in (torch.sin, torch.cos)], 1).float()


class Calendar(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("table", waves(torch.arange(HOURS).to(dtype)))
        self.head = nn.Linear(8, 1)

    def forward(self, hours):
        return self.head(self.table[hours])


def train(dtype, latest=HOURS):
    torch.manual_seed(0)
    model = Calendar(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        hours = torch.randint(0, latest, (64,))
        return nn.functional.mse_loss(model(hours).squeeze(-1), torch.sin(2 * math.pi * hours / 24))

    return examine(
        have_neighbours_become_one,
        model,
        optimizer,
        plain_step(model, optimizer, loss),
        2,
        models={"": model},
    )


def test_hours_that_have_become_one():
    (said,) = {v.id: v for v in train(torch.bfloat16)}.values()
    line = Calendar.__init__.__code__.co_firstlineno + 2
    assert said.id == ID and said.level == "problem"
    assert said.where == f"Calendar (test_experiment_merged_rows.py:{line})"


def test_hours_that_are_apart_or_not_used():
    assert not ids(train(torch.float32))
    assert not ids(train(torch.bfloat16, latest=400))  # a longer table than anybody asks for


@pytest.mark.parametrize(
    ("table", "format"),
    [
        (waves(torch.arange(8000, dtype=torch.bfloat16)), torch.bfloat16),
        (waves(torch.arange(9000).half().float()), torch.float16),
        (waves(torch.arange(2000).half()), None),
        (waves(torch.arange(8000) / 8), None),
        (torch.arange(8000).div(7, rounding_mode="floor").float()[:, None], None),  # weeks
        (torch.randn(20, 4).repeat_interleave(100, 0), None),
        (torch.zeros(4000, 3), None),
        (torch.arange(1, 4001).log2().floor()[:, None], None),  # buckets that grow
        (torch.arange(1, 4001).log2().mul(64).floor()[:, None], None),
    ],
)
def test_what_makes_the_pattern(table, format):
    runs = find_runs(table)
    assert (runs.format if runs is not None else None) == format
    assert runs is None or runs.jumping > MANY


def test_what_is_smooth_is_good_enough():
    share = (torch.arange(8192) / 8192).to(torch.bfloat16).float()
    runs = find_runs(torch.stack([share, torch.sin(share), share.square()], 1))
    assert runs is not None and runs.jumping == 0


def features(dtype):
    """The verdicts on a script that keeps a table, and trains on its rows in any order."""
    data = torch.utils.data.TensorDataset(waves(torch.arange(HOURS).to(dtype)), torch.zeros(HOURS))
    memory = {"facts": {"_stepped_tables": list(stepped_tables())}}
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(list(torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)))
    step = plain_step(model, optimizer, lambda: model(next(batches)[0]).square().mean())
    return examine(have_neighbours_become_one, model, optimizer, step, 2, memory=memory)


def test_features_that_a_script_keeps():
    (said,) = features(torch.bfloat16)
    assert said.id == ID and said.level == "problem" and said.evidence[0].startswith("data.tensors")
    assert not features(torch.float32)
