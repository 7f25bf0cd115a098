"""A recurrent layer that forgets its first input before the end, against ones that keep it or need not."""

import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.signal import where_does_the_signal_go


class Reader(nn.Module):
    """The class of a sequence (B, T, D) from the last output, the last state or the mean of all outputs."""

    def __init__(self, kind, use, batch_first=True):
        super().__init__()
        self.rnn = kind(6, 16, batch_first=batch_first)
        self.head = nn.Linear(16, 3)
        self.use, self.time = use, 1 if batch_first else 0

    def forward(self, x):
        outputs, state = self.rnn(x)
        if self.use == "state":
            return self.head(state[0][-1] if isinstance(state, tuple) else state[-1])
        return self.head(outputs.select(self.time, -1) if self.use == "last" else outputs.mean(self.time))


def verdicts(model, length=24, batch_first=True, embed=False):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn((8, length, 6) if batch_first else (length, 8, 6))
    y = torch.randint(0, 3, (8,))
    step = plain_step(model, optimizer, lambda: nn.functional.cross_entropy(model(x), y))
    return examine(where_does_the_signal_go, model, optimizer, step, steps=1)


def forgetful(kind, use, batch_first=True):
    torch.manual_seed(0)
    model = Reader(kind, use, batch_first)
    with torch.no_grad():
        if kind is nn.LSTM:
            model.rnn.bias_ih_l0[16:32] = -6.0  # the forget gate
            model.rnn.weight_hh_l0.mul_(0.1)
        else:
            nn.init.orthogonal_(model.rnn.weight_hh_l0, 0.3)
    return model


def keeping(kind, use):
    torch.manual_seed(0)
    model = Reader(kind, use)
    with torch.no_grad():
        if kind is nn.LSTM:
            model.rnn.bias_ih_l0[16:32] = 4.0
        else:
            nn.init.orthogonal_(model.rnn.weight_hh_l0, 1.0)
            model.rnn.weight_ih_l0.mul_(0.1)
    return model


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
@pytest.mark.parametrize("use", ["last", "state"])
def test_a_forgotten_beginning_is_found(kind, use):
    found = verdicts(forgetful(kind, use))
    assert ids(found) == {"vanishing-signal/time"}
    assert found[0].where.startswith("rnn") and found[0].if_troubled


def test_time_comes_first():
    found = verdicts(forgetful(nn.RNN, "last", batch_first=False), batch_first=False)
    assert ids(found) == {"vanishing-signal/time"}


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_a_state_that_keeps_is_not_accused(kind):
    assert not [v for v in verdicts(keeping(kind, "last")) if v.id]


def test_where_every_output_is_used_nothing_needs_to_last():
    assert not [v for v in verdicts(forgetful(nn.RNN, "mean")) if v.id]


class Leaky(nn.Module):
    """A state that keeps a share of itself at every step, written as a loop."""

    def __init__(self, keeps):
        super().__init__()
        self.into, self.keeps = nn.Linear(6, 16), nn.Parameter(torch.full((16,), keeps))

    def forward(self, x):
        state, states = x.new_zeros(x.shape[0], 16), []
        for time in range(x.shape[1]):
            state = self.keeps * state + self.into(x[:, time])
            states.append(state)
        return torch.stack(states, 1)


class Looped(nn.Module):
    def __init__(self, keeps, use="last"):
        super().__init__()
        self.memory, self.head, self.use = Leaky(keeps), nn.Linear(16, 3), use

    def forward(self, x):
        states = self.memory(x)
        return self.head(states[:, -1] if self.use == "last" else states.mean(1))


def test_a_loop_over_time_that_forgets():
    said = verdicts(Looped(0.2))
    assert ids(said) == {"vanishing-signal/time"}
    assert said[0].where.startswith("memory (test_echo.py:")


@pytest.mark.parametrize("model", [Looped(0.9), Looped(0.2, "mean")], ids=["keeps", "all are used"])
def test_loops_that_keep_or_need_not(model):
    assert not [v for v in verdicts(model) if v.id]


def test_a_window_of_a_convolution_is_no_memory():
    """The last output of a causal convolution hears the last inputs only, and is meant to."""

    class Convolved(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter, self.head = nn.Conv1d(6, 16, 3), nn.Linear(16, 3)

        def forward(self, x):
            seen = self.filter(nn.functional.pad(x.mT, (2, 0))).mT
            return self.head(seen[:, -1])

    assert not [v for v in verdicts(Convolved()) if v.id]
