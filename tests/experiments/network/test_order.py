"""Data that were viewed where they should have been transposed, before any step: only the numbers tell."""

import math

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.shapes import do_shapes_meet
from gradproof.instruments.order import another_order, text_runs_along_the_batch

SAMPLES, FEATURES, TIME = 32, 6, 40
VIEWED = ["axis-or-shape-error/view-for-transpose"]


def series():
    """(samples, features, time), each feature a wave of its own."""
    time, speed, start = torch.arange(TIME) / TIME, *torch.rand(2, SAMPLES, FEATURES, 1)
    return torch.sin(2 * math.pi * (3 * time * speed + start)) + 0.1 * torch.randn(SAMPLES, FEATURES, TIME)


def pictures(channels=3, height=24, width=20):
    coarse = torch.randn(SAMPLES, channels, 4, 4)
    return F.interpolate(coarse, size=(height, width), mode="bicubic") + 0.05 * torch.randn(1)


def text(length=20_000):
    """Numbered words, each of which is followed by one of four others."""
    words, next_ones = [0], torch.randint(0, 40, (40, 4))
    for choice in torch.randint(0, 4, (length,)).tolist():
        words.append(int(next_ones[words[-1], choice]))
    return torch.tensor(words)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_what_was_viewed_is_seen_and_how_it_lay():
    waves, images = series(), pictures()
    assert another_order(waves.view(SAMPLES, TIME, FEATURES))[0] == (FEATURES, TIME)
    assert another_order(waves.mT.reshape(SAMPLES, FEATURES, TIME))[0] == (TIME, FEATURES)
    assert another_order(waves.view(SAMPLES, TIME, FEATURES).mT)[0] == (FEATURES, TIME)
    last = images.permute(0, 2, 3, 1)
    assert another_order(last.reshape(images.shape))[0] == (24, 20, 3)
    assert another_order(images[:, :1].reshape(SAMPLES, 1, 20, 24))[0] == (24, 20)


def test_what_lies_as_it_should_is_not():
    waves, images = series(), pictures()
    long = torch.sin(torch.arange(FEATURES * TIME) * torch.rand(SAMPLES, 1) + torch.rand(SAMPLES, 1))
    daily = torch.cos(2 * math.pi * (torch.arange(48) / 24 + torch.rand(SAMPLES, 24, 1)))
    walks = torch.randn(SAMPLES, 12, 24).cumsum(1)
    for batch in (
        waves, waves.mT, images, images.permute(0, 2, 3, 1), pictures(1), daily, daily.mT, walks, walks.mT,
        walks.cumsum(2), torch.randn(SAMPLES, 5, 7), F.one_hot(torch.randint(0, 6, (SAMPLES, 20)), 6).float(),
        long.view(SAMPLES, TIME, FEATURES),  # cut into frames
        torch.zeros(SAMPLES, 4, 9), waves[:8], waves[:1],
    ):  # fmt: skip
        assert another_order(batch) is None


def test_text_that_runs_along_the_batch():
    words = text()
    rows, length = 16, 32
    used = words[: len(words) // rows * rows]
    assert text_runs_along_the_batch(used.view(-1, rows)[:length].T)
    starts = torch.randint(0, len(words) - length, (rows,)).tolist()
    for tokens in (
        used.view(rows, -1)[:, :length],
        torch.stack([words[i : i + length] for i in starts]),
        torch.stack([words[i : i + length] for i in range(rows)]),  # windows that overlap, in order
        torch.stack([words[i : i + length] for i in starts[: rows // 2]]).repeat_interleave(2, 0),
        torch.randint(0, 40, (rows, length)),
        torch.arange(rows * length).view(rows, length),
    ):
        assert text_runs_along_the_batch(tokens) is None


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(40, 8), nn.GRU(8, 16), nn.Linear(16, 40)

    def forward(self, tokens):
        return self.out(self.rnn(self.table(tokens))[0])


@pytest.mark.parametrize("rightly", [True, False])
def test_a_step_on_such_a_text(rightly):
    words, model = text(), Reader()
    used = words[: len(words) // 16 * 16]
    data = used.view(16, -1).t() if rightly else used.view(-1, 16)

    def loss():
        return F.cross_entropy(model(data[:32]).view(-1, 40), data[1:33].reshape(-1))

    assert confirmed_ids(do_shapes_meet, evidence_of(model, loss)) == ([] if rightly else VIEWED)


@pytest.mark.parametrize("rightly", [True, False])
def test_a_step_on_such_series(rightly):
    waves = series()
    data = waves if rightly else waves.mT.reshape(waves.shape)
    model = nn.Sequential(nn.Conv1d(FEATURES, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(data)
    y = torch.randint(0, 2, (SAMPLES,))
    found = confirmed_ids(do_shapes_meet, evidence_of(model, lambda: F.cross_entropy(model(data), y)))
    assert found == ([] if rightly else VIEWED)


class Gated(nn.Module):
    """A mixture of two experts, of which the first `k` are taken."""

    def __init__(self, k, first):
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), nn.Linear(6, 4 * 3)
        self.k, self.first = k, first

    def forward(self, x):
        scores = self.router(x)
        top, chosen = (scores.softmax(-1) if self.first else scores).topk(self.k, dim=-1)
        gates = top if self.first else top.softmax(-1)
        each = self.experts(x).view(-1, 4, 3).gather(1, chosen[..., None].expand(-1, -1, 3))
        return (gates[..., None] * each).sum(1)


@pytest.mark.parametrize("k, first, said", [(1, False, True), (2, False, False), (1, True, False)])
def test_a_gate_over_one(k, first, said):
    model, x, y = Gated(k, first), torch.randn(16, 6), torch.randint(0, 3, (16,))
    found = confirmed_ids(do_shapes_meet, evidence_of(model, lambda: F.cross_entropy(model(x), y)))
    assert found == (["axis-or-shape-error/softmax-of-one"] if said else [])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(4, 8)

    def forward(self, x, context):
        return (self.a(x) + self.b(context)).sum(1)


def of_two(rows_of_context, contexts=200):
    model, x, context = Two(), torch.randn(200, 6), torch.randn(contexts, 4)
    rows = torch.randint(0, 200, (16,))
    make = lambda: F.mse_loss(model(x[rows], context[rows_of_context(rows)]), x[rows, 0])  # noqa: E731
    return confirmed_ids(do_shapes_meet, evidence_of(model, make))


def test_one_row_for_all_samples():
    assert of_two(lambda rows: rows[:1]) == ["axis-or-shape-error/one-row-for-all"]
    assert of_two(lambda rows: rows) == []
    assert (
        of_two(lambda rows: torch.tensor([3]), contexts=20) == []
    )  # one of twenty styles, for the whole batch


@pytest.mark.parametrize("axis", [1, 2])
def test_a_softmax_over_time_before_a_loss_over_classes(axis):
    model, x, y = nn.Linear(4, 5), torch.randn(8, 6, 4), torch.randint(0, 5, (8, 6))
    make = lambda: F.nll_loss(model(x).log_softmax(axis).view(-1, 5), y.view(-1))  # noqa: E731
    found = confirmed_ids(do_shapes_meet, evidence_of(model, make))
    assert found == ([] if axis == 2 else ["axis-or-shape-error/softmax-axis"])


def test_noisy_pictures_whose_channels_lay_last():
    """Noise of five times the signal: no neighbour knows much of another, and all together tell."""
    torch.manual_seed(0)
    smooth = nn.functional.interpolate(torch.randn(48, 3, 6, 6), (32, 32), mode="bilinear")
    pictures = smooth + 2.5 * torch.randn(48, 3, 32, 32)
    last = pictures.permute(0, 2, 3, 1).contiguous()
    assert another_order(last.view(48, 3, 32, 32))[0] == (32, 32, 3)
    stripes = torch.sin(3.1 * torch.arange(32.0)[:, None] + 6 * torch.rand(48, 3, 1, 1)).expand(48, 3, 32, 32)
    for healthy in (
        pictures,
        smooth,
        stripes,
        stripes.mT,
        torch.randn(48, 3, 32, 32),
        last.permute(0, 3, 1, 2),
    ):
        assert another_order(healthy.contiguous()) is None
