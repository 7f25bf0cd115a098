"""A recurrence whose state never reaches the loss, and those that remember."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradproof
from gradproof.diagnosis.recurrences import recurrence_never_used
from gradproof.record.run import open_run

KIND = torch.arange(16) % 3
TEXTS = torch.randn(16, 6, 5) + KIND[:, None, None]


class Reader(nn.Module):
    """Reads sequences and tells their class by what `read` takes of the outputs and the last states."""

    def __init__(self, kind, read, **options):
        super().__init__()
        self.rnn = kind(5, 7, batch_first=True, **options)
        self.out = nn.Linear(14 if options.get("bidirectional") else 7, 3)
        self.read = read

    def forward(self, x):
        return self.out(self.read(*self.rnn(x)))


class Cell(nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.cell, self.out, self.steps = nn.GRUCell(5, 7), nn.Linear(7, 3), steps

    def forward(self, x):
        state = torch.zeros(len(x), 7)
        for t in range(self.steps):
            state = self.cell(x[:, t], state)
        return self.out(state)


class Carried(nn.Module):
    """One step at a time, with the state of the batch before: it remembers."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out, self.state = nn.GRU(5, 7, batch_first=True), nn.Linear(7, 3), None

    def forward(self, x):
        outputs, state = self.rnn(x[:, :1], self.state)
        self.state = state.detach()
        return self.out(outputs[:, -1])


def last(outputs, states):
    return outputs[:, -1]


def both_ends(outputs, states):
    return torch.cat([outputs[:, -1, :7], outputs[:, 0, 7:]], 1)


def run_of(model, path, x=TEXTS, steps=8):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # its decay moves what has no gradient, too

    def step(i):
        optimizer.zero_grad()
        F.cross_entropy(model(x), KIND).backward()
        optimizer.step()

    with gradproof.watch(model, optimizer, out=path, experiments=False):
        for i in range(steps):
            step(i)
    return open_run(path)


FORGETS = [
    (Reader(nn.LSTM, last, bidirectional=True, num_layers=2), TEXTS, "rnn.weight_hh_l1_reverse"),
    (Reader(nn.GRU, last, bidirectional=True), TEXTS, "rnn.weight_hh_l0_reverse"),
    (Reader(nn.RNN, last), TEXTS[:, :1], "rnn.weight_hh_l0"),
    (Cell(1), TEXTS, "cell.weight_hh"),
]
REMEMBERS = [
    Reader(nn.LSTM, both_ends, bidirectional=True),
    Reader(nn.LSTM, lambda outputs, states: torch.cat(list(states[0]), 1), bidirectional=True),
    Reader(nn.GRU, lambda outputs, states: outputs.mean(1), bidirectional=True, num_layers=2),
    Reader(nn.RNN, last),
    Cell(3),
    Carried(),
]


@pytest.mark.parametrize("model, x, name", FORGETS)
def test_a_state_that_is_never_used(model, x, name, tmp_path):
    found = gradproof.diagnose(run_of(model, tmp_path / "run", x)).causes
    (said,) = [f for f in found if f.id == "axis-or-shape-error/one-step-of-time"]
    assert (said.level, said.confidence) == ("warning", "likely") and said.where.startswith(name)
    assert not [f for f in found if f.family == "dead-activation"]


@pytest.mark.parametrize("model", REMEMBERS)
def test_what_remembers_is_let_alone(model, tmp_path):
    assert not list(recurrence_never_used(run_of(model, tmp_path / "run")))
