"""Signals that explode or die along blocks and along time, against stacks and recurrences that keep their size."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.network.signal import where_does_the_signal_go


class Stack(nn.Module):
    def __init__(self, gain, depth=10, activation=torch.tanh):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(depth)])
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain)
        self.activation = activation

    def forward(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class Recurrent(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.cell = nn.Linear(8, 8, bias=False)
        nn.init.orthogonal_(self.cell.weight, gain)

    def forward(self, x):
        state = x
        for _ in range(20):
            state = self.cell(state)
        return state


def verdicts(model):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(16, 8)
    step = plain_step(model, optimizer, lambda: model(x).mean())
    return examine(where_does_the_signal_go, model, optimizer, step, steps=1)


@pytest.mark.parametrize(
    "model, what",
    [
        (Stack(4.0, activation=torch.relu), "exploding-signal/depth"),
        (Stack(0.3, activation=torch.sigmoid), "vanishing-signal/depth"),
        (Recurrent(2.0), "exploding-signal/time"),
        (Recurrent(0.4), "vanishing-signal/time"),
    ],
)
def test_growth_and_decay_are_named(model, what):
    found = verdicts(model)
    assert ids(found) == {what}
    assert found[0].where.startswith("cell" if "time" in what else "layers")
    assert found[0].confidence == "proven" and "a small change" in found[0].evidence[-1]


class Micro(nn.Module):
    """The same layer for eight batches one after another is no recurrence."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([self.layer(x * 10**-k) for k in range(8)])


@pytest.mark.parametrize("model", [Stack(1.0), Recurrent(1.0), Micro()])
def test_signals_that_keep_their_size_are_excluded(model):
    assert {v.verdict for v in verdicts(model)} <= {"excluded"}  # of too few blocks, nothing


class Cell(nn.Module):
    """A recurrence of two weights: one for what comes in, one for what comes back."""

    def __init__(self, gain):
        super().__init__()
        self.wx, self.wh = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        nn.init.orthogonal_(self.wh.weight, gain)

    def forward(self, x, state):
        return self.wx(x) + self.wh(state)


class TwoWeights(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.cell = Cell(gain)

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(20):
            state = self.cell(x, state)
        return state


@pytest.mark.parametrize("gain", [3.0, 0.2])
def test_of_a_recurrence_the_weight_that_comes_back_is_named(gain):
    assert verdicts(TwoWeights(gain))[0].where == "cell.wh"


def images(start, widths=(12, 16, 24, 24, 32)):
    """Convolutions one after another, without normalisation."""
    torch.manual_seed(0)
    layers, before = [], 1
    for width in widths:
        layers += [nn.Conv2d(before, width, 5, padding=2), nn.ReLU()]
        before = width
        if start is not None:
            nn.init.normal_(layers[-2].weight, std=(2.0 / start(layers[-2].weight)) ** 0.5)
            nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 8))


def fade(model, size=(8, 1, 16, 16)):
    x, y = torch.randn(size), torch.randint(8, (size[0],))
    evidence = evidence_of(model, lambda: nn.functional.cross_entropy(model(x), y))
    return confirmed_ids(where_does_the_signal_go, evidence)


def test_a_start_that_counts_the_outputs_too():
    """A few blocks are enough where each takes most of the signal; with the right count or PyTorch's own none does."""
    assert fade(images(lambda weight: weight.numel())) == ["vanishing-signal/depth"]
    assert fade(images(lambda weight: weight[0].numel())) == []
    assert fade(images(None)) == []
    deep = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(64, 64), nn.ReLU())], nn.Linear(64, 8))
    assert fade(deep, (32, 64)) == []


def test_a_validation_before_the_step_is_not_taken_for_it():
    torch.manual_seed(0)
    model = Stack(4.0, activation=torch.relu)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(16, 8)
    train = plain_step(model, optimizer, lambda: model(x).mean())

    def step():
        with torch.no_grad():
            model(x)
        return train()

    (found,) = examine(where_does_the_signal_go, model, optimizer, step, steps=1)
    assert "its gradient from" in found.evidence[0]


class Named(nn.Module):
    """Layers that are numbered in their names, not in a list."""

    def __init__(self, gain):
        super().__init__()
        for k in range(1, 9):
            setattr(self, f"fc{k}", nn.Linear(8, 8, bias=False))
            nn.init.orthogonal_(getattr(self, f"fc{k}").weight, gain)

    def forward(self, x):
        for k in range(1, 9):
            x = getattr(self, f"fc{k}")(x).relu()
        return x


class Heads(nn.Module):
    """Numbered, but beside each other: what one of them makes reaches no other."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])
        for k, head in enumerate(self.heads):
            nn.init.orthogonal_(head.weight, 10.0**k)

    def forward(self, x):
        return torch.stack([head(x) for head in self.heads])


def test_layers_numbered_by_name_and_at_the_top_of_a_sequential():
    assert ids(verdicts(Named(5.0))) == {"exploding-signal/depth"}
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8, bias=False), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, 5.0)
    assert ids(verdicts(nn.Sequential(*layers))) == {"exploding-signal/depth"}


def test_modules_beside_each_other_are_no_chain():
    assert not verdicts(Heads())


class Through(nn.Module):
    """Codes that are judged through a recurrent decoder; a second head beside it gets the same large gradients."""

    def __init__(self, strength, frozen=True, cell=nn.RNN):
        super().__init__()
        self.code, self.decoder, self.head = nn.Linear(6, 6), cell(6, 32, batch_first=True), nn.Linear(32, 1)
        self.aside = nn.Linear(6, 1)
        with torch.no_grad():
            weight = self.decoder.weight_hh_l0
            weight.copy_(strength * torch.linalg.qr(torch.randn(weight.shape))[0])
        self.decoder.requires_grad_(not frozen)

    def forward(self, x):
        codes = self.code(x)
        return self.head(self.decoder(codes)[0]) + self.aside(codes)


def step_through(model):
    x = torch.randn(8, 80, 6)
    return evidence_of(model, lambda: model(x).square().mean())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_recurrence_in_one_operation_that_multiplies(frozen):
    (found,) = where_does_the_signal_go(step_through(Through(3.0, frozen)))
    assert found.id == "exploding-signal/time" and found.confidence == "proven"
    assert found.where.startswith("decoder") and "times as large before it as behind it" in found.evidence[0]


@pytest.mark.parametrize("cell", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrences_that_do_not(cell):
    model = Through(0.9, cell=cell)
    assert not confirmed_ids(where_does_the_signal_go, step_through(model))


def test_what_only_rescales_multiplies_nothing():
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1))
    with torch.no_grad():
        model[0].weight.mul_(1e-6), model[0].bias.zero_()
    model[1].eps = 1e-20
    x = torch.randn(8, 6)
    assert not confirmed_ids(where_does_the_signal_go, evidence_of(model, lambda: model(x).square().mean()))


class Hidden(nn.Module):
    """Attention whose scores at hidden keys are set to a number; the softmax is a module of its own."""

    def __init__(self, fill, sharp=1.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, n) for n in (6, 6, 6, 1))
        self.softmax, self.fill, self.sharp = nn.Softmax(dim=-1), fill, sharp

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT * self.sharp
        hidden = torch.arange(x.shape[1]) > x.shape[1] // 2
        return self.out(self.softmax(scores.masked_fill(hidden, self.fill)) @ self.v(x))


@pytest.mark.parametrize("fill", [-1e4, -1e9, -1e30])
def test_hidden_scores_are_not_what_the_others_are_measured_by(fill):
    """A ten-billionth of -1e9 is 0.1, which is nothing to a hidden score and much to any other."""
    model, x = Hidden(fill), torch.randn(4, 8, 6)
    assert not confirmed_ids(where_does_the_signal_go, evidence_of(model, lambda: model(x).square().mean()))
