"""Digits that are lost on the way, in the update and in what was stored; and roundings that do no harm."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from taped_trainings import examine, ids, plain_step
from torch import nn

import gradproof
from gradproof.diagnosis.ranking import diagnose
from gradproof.experiments.numbers.lost_digits import counted_in, is_it_precision, which_digits_are_lost
from gradproof.experiments.numbers.nonfinite import where_was_it_born
from gradproof.instruments.digits import jumps
from gradproof.numerics.stored import format_of
from gradproof.probes.tables import stepped_tables
from gradproof.record.run import open_run

WHOLE, MERGED = "low-precision-error/whole-numbers", "low-precision-error/merged-rows"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


@pytest.mark.parametrize("dtype, lost", [(torch.bfloat16, True), (torch.float32, False)])
def test_small_steps_of_half_precision_weights(dtype, lost):
    model = network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    x = torch.randn(16, 8).to(dtype)
    found = examine(
        is_it_precision, model, optimizer, plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    )
    assert ids(found) == ({"low-precision-error/lost-updates"} if lost else set())


@pytest.mark.parametrize("dtype, lost", [(torch.bfloat16, True), (torch.float32, False)])
def test_average_kept_in_half_precision(dtype, lost):
    model = network()
    average = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(16, 8)
    train = plain_step(model, optimizer, lambda: model(x).pow(2).mean())

    def step():
        loss = train()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.add_((fast - slow).to(dtype), alpha=1e-3)
        return loss

    found = examine(is_it_precision, model, optimizer, step)
    assert ids(found) == ({"low-precision-error/lost-updates"} if lost else set())
    assert not lost or "test_lost_digits.py" in found[-1].where


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1)
    )


@pytest.mark.parametrize("make", [network, convolutional])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("overwritten", [True, False])
def test_masters_that_are_made_anew_of_the_weights(make, foreach, overwritten):
    model = make().bfloat16()
    weights = list(model.parameters())
    masters = nn.ParameterList(p.detach().float() for p in weights)
    optimizer = torch.optim.Adam(masters, lr=1e-4)
    x = torch.randn(16, 8).bfloat16()

    def copied(into, source):
        with torch.no_grad():
            if foreach:
                torch._foreach_copy_(into, source)
            else:
                for mine, other in zip(into, source, strict=True):
                    mine.copy_(other)

    def step():
        copied(weights, list(masters))
        model.zero_grad()
        loss = (model(x) - 1).float().pow(2).mean()
        loss.backward()
        if overwritten:
            copied(list(masters), weights)
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
        optimizer.step()
        return loss.detach()

    found = examine(is_it_precision, model, optimizer, step)
    assert ids(found) == ({"low-precision-error/lost-updates"} if overwritten else set())
    assert not overwritten or (
        "overwritten" in found[-1].evidence[0] and "test_lost_digits.py" in found[-1].where
    )


@pytest.mark.parametrize("scale, lost", [(1e-7, True), (1.0, False)])
def test_gradients_below_the_smallest_float16(scale, lost):
    model = network().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(16, 8).half()
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean() * scale)
    assert ("low-precision-error/underflow" in ids(examine(is_it_precision, model, optimizer, step))) == lost


@pytest.mark.parametrize("dtype, bad", [(torch.float16, True), (torch.float32, False)])
def test_adam_divides_by_an_epsilon_that_half_precision_rounds_to_zero(dtype, bad):
    model = network().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = (1e-4 * torch.randn(16, 8)).to(dtype)
    step = plain_step(model, optimizer, lambda: model(x).pow(2).mean())
    found = examine(where_was_it_born, model, optimizer, step, steps=1)
    assert ids(found) == ({"low-precision-error/optimizer-in-half"} if bad else set())


# whole numbers -------------------------------------------------------------------------------------------


def found(model, make_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return examine(which_digits_are_lost, model, optimizer, plain_step(model, optimizer, make_loss), steps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_times_cast_before_their_sine(dtype):
    model, periods = nn.Linear(4, 1), torch.tensor([12.0, 24.0])
    hours = torch.randperm(4000)[:64]

    def loss():
        angle = hours.to(dtype).unsqueeze(1) * (6.2831853 / periods).to(dtype)
        return model(torch.cat([angle.sin(), angle.cos()], 1).float()).pow(2).mean()

    verdicts = found(model, loss)
    assert ids(verdicts, "problem") == ({WHOLE} if dtype == torch.bfloat16 else set())
    if verdicts:
        assert "test_lost_digits.py:" in verdicts[0].where


@pytest.mark.parametrize("half", [True, False])
def test_positions_under_autocast(half):
    model, scale = nn.Linear(16, 1), 0.5 ** torch.arange(8).float()

    def loss():
        positions = torch.arange(1024).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            angle = positions[:, None] @ scale[None]
        return model(torch.cat([angle.sin(), angle.cos()], 1).float()).pow(2).mean()

    assert ids(found(model, loss)) == ({WHOLE} if half else set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ids_that_travel_among_features(dtype):
    model, items = nn.Embedding(5000, 4), torch.randperm(5000)[:64]

    def loss():
        row = torch.stack([items.float(), torch.rand(64)], 1).to(dtype)
        return model(row[:, 0].long()).pow(2).mean()

    assert ids(found(model, loss), "problem") == ({WHOLE} if dtype == torch.float16 else set())


def test_a_range_counted_in_half_precision():
    model = nn.Linear(2, 1)

    def loss():
        angle = torch.arange(600, dtype=torch.bfloat16)[:, None]
        return model(torch.cat([angle.sin(), angle.cos()], 1).float()).pow(2).mean()

    assert ids(found(model, loss)) == {WHOLE}


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
    assert ids(found(model, lambda: model().float().pow(2).mean())) == ({WHOLE} if half else set())


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


@pytest.mark.parametrize("start, id", [(1_700_000_000, {WHOLE}), (0, set())])
def test_seconds_since_an_epoch_in_float32(start, id):
    model = nn.Linear(2, 1)
    seconds = start + torch.randint(0, 20_000, (64,))

    def loss():
        phase = 6.2831853 * torch.frac(seconds.float()[:, None] / 180.0)
        return model(torch.cat([phase.sin(), phase.cos()], 1)).pow(2).mean()

    assert ids(found(model, loss), "problem") == id


# phases --------------------------------------------------------------------------------------------------


TIME = torch.linspace(0, 1, 2048, dtype=torch.float64)[torch.randperm(2048, generator=torch.manual_seed(0))]


class Waves(nn.Module):
    def __init__(self, highest, kept=torch.bfloat16):
        super().__init__()
        self.register_buffer("frequency", torch.linspace(1, highest, 40))
        self.out, self.kept = nn.Linear(80, 1), kept

    def forward(self, t):
        if self.kept is None:  # as it should be
            with torch.autocast("cpu", enabled=False):
                phase = 2 * math.pi * torch.mm(t[:, None].float(), self.frequency[None])
        else:
            phase = 2 * math.pi * torch.mm(t[:, None], self.frequency[None])
        return self.out(torch.cat([phase.sin(), phase.cos()], 1)).squeeze(1)


def in_autocast(model, t=None):
    t = TIME.float() if t is None else t

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model(t[:512])
        return (made.float() - torch.sin(300 * t[:512])).square().mean()

    return evidence_of(model, loss)


def test_phases_in_autocast():
    (verdict,) = which_digits_are_lost(in_autocast(Waves(200)))
    assert verdict.id == "low-precision-error/phases" and verdict.level == "problem"
    line = Path(__file__).read_text().splitlines()[int(verdict.where.rpartition(":")[2].rstrip(")")) - 1]
    assert line.strip() == "phase = 2 * math.pi * torch.mm(t[:, None], self.frequency[None])"


@pytest.mark.parametrize("model", [Waves(200, kept=None), Waves(3)])
def test_phases_in_float32_or_small_ones(model):
    assert list(which_digits_are_lost(in_autocast(model))) == []


def stored(dtype, rounded_first=False, highest=200.0):
    """Times that were kept in few digits; targets of the true times, or of the rounded ones."""
    model, kept = Waves(highest), TIME.to(dtype)
    wave = torch.sin(2 * math.pi * 150 * (kept.double() if rounded_first else TIME)).float()
    model.kept = None
    return evidence_of(model, lambda: (model(kept.float()[:1024]) - wave[:1024]).square().mean())


def test_stored_times():
    assert confirmed_ids(which_digits_are_lost, stored(torch.bfloat16)) == [
        "low-precision-error/stored-phases"
    ]


@pytest.mark.parametrize(
    "evidence",
    [
        lambda: stored(torch.float32),
        lambda: stored(torch.bfloat16, highest=2),  # such waves need no more digits
        lambda: stored(torch.bfloat16, rounded_first=True),  # nothing was lost: the rounded time is the time
    ],
)
def test_times_that_tell_samples_apart(evidence):
    assert confirmed_ids(which_digits_are_lost, evidence()) == []


def test_formats():
    numbers = 60 * torch.randn(500, generator=torch.manual_seed(1))
    assert format_of(numbers.half().double()) == torch.float16
    assert format_of(numbers.bfloat16().float()) == torch.bfloat16
    for exact in (numbers, numbers.round(), (4 * numbers).round() / 4, torch.randint(0, 2, (500,)).float()):
        assert format_of(exact) is None


# rows that were counted ----------------------------------------------------------------------------------


HOURS = 3000


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


def train_hours(dtype, latest=HOURS):
    torch.manual_seed(0)
    model = Calendar(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        hours = torch.randint(0, latest, (64,))
        return nn.functional.mse_loss(model(hours).squeeze(-1), torch.sin(2 * math.pi * hours / 24))

    return examine(
        which_digits_are_lost,
        model,
        optimizer,
        plain_step(model, optimizer, loss),
        2,
        models={"": model},
    )


def test_hours_that_have_become_one():
    (said,) = {v.id: v for v in train_hours(torch.bfloat16)}.values()
    line = Calendar.__init__.__code__.co_firstlineno + 2
    assert said.id == MERGED and said.level == "problem"
    assert said.where == f"Calendar (test_lost_digits.py:{line})"


def test_hours_that_are_apart_or_not_used():
    assert not ids(train_hours(torch.float32))
    assert not ids(train_hours(torch.bfloat16, latest=400))  # a longer table than anybody asks for


def partly_filled(rows):
    """A memory of 10,000 one-hot rows that has begun to be filled: most of its rows are alike."""
    table = torch.zeros(10_000, 25)
    table[torch.arange(rows), torch.arange(rows) * 7 % 25] = 1.0
    return table


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
        (partly_filled(320), None),
        (partly_filled(0), None),
        (torch.arange(1, 4001).log2().mul(64).floor()[:, None], None),
    ],
)
def test_what_makes_the_pattern(table, format):
    found = counted_in(table)
    assert (found.format if found is not None else None) == format


def test_what_is_smooth_is_good_enough():
    share = (torch.arange(8192) / 8192).to(torch.bfloat16).float()
    made = torch.stack([share, torch.sin(share), share.square()], 1)
    found = jumps(torch.arange(8192).to(torch.bfloat16), made, torch.bfloat16)
    assert found is not None and float(found.share.max()) < 0.01 and counted_in(made) is None


def features(dtype):
    """The verdicts on a script that keeps a table, and trains on its rows in any order."""
    data = torch.utils.data.TensorDataset(waves(torch.arange(HOURS).to(dtype)), torch.zeros(HOURS))
    facts = {"_stepped_tables": list(stepped_tables())}
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(list(torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)))
    step = plain_step(model, optimizer, lambda: model(next(batches)[0]).square().mean())
    return examine(which_digits_are_lost, model, optimizer, step, 1, facts=facts)


def test_features_that_a_script_keeps():
    (said,) = features(torch.bfloat16)
    assert said.id == MERGED and said.level == "problem" and said.evidence[0].startswith("data.tensors")
    assert not features(torch.float32)


# columns of a script -------------------------------------------------------------------------------------


RNG = np.random.default_rng(0)
MINUTES = np.sort(RNG.uniform(0, 60000, 6000))


def phase(numbers, period):
    return np.sin(2 * np.pi * numbers / period)


def jump(stored, feature):
    stored = torch.as_tensor(stored)
    format = format_of(stored)
    found = None if format is None else jumps(stored, torch.as_tensor(feature), format)
    return None if found is None else float(found.share)


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
