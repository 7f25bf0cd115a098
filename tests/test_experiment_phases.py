"""Phases that half precision has spoiled are proven against float64; half precision that does no harm is left alone."""

import math
from pathlib import Path

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.phases import are_phases_kept
from gradproof.numerics.stored import format_of

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
    (verdict,) = are_phases_kept(in_autocast(Waves(200)))
    assert verdict.id == "low-precision-error/phases" and verdict.level == "problem"
    line = Path(__file__).read_text().splitlines()[int(verdict.where.rpartition(":")[2].rstrip(")")) - 1]
    assert line.strip() == "phase = 2 * math.pi * torch.mm(t[:, None], self.frequency[None])"


@pytest.mark.parametrize("model", [Waves(200, kept=None), Waves(3)])
def test_phases_in_float32_or_small_ones(model):
    assert list(are_phases_kept(in_autocast(model))) == []


def stored(dtype, rounded_first=False, highest=200.0):
    """Times that were kept in few digits; targets of the true times, or of the rounded ones."""
    model, kept = Waves(highest), TIME.to(dtype)
    wave = torch.sin(2 * math.pi * 150 * (kept.double() if rounded_first else TIME)).float()
    model.kept = None
    return evidence_of(model, lambda: (model(kept.float()[:1024]) - wave[:1024]).square().mean())


def test_stored_times():
    assert confirmed_ids(are_phases_kept, stored(torch.bfloat16)) == ["low-precision-error/stored-phases"]


@pytest.mark.parametrize(
    "evidence",
    [
        lambda: stored(torch.float32),
        lambda: stored(torch.bfloat16, highest=2),  # such waves need no more digits
        lambda: stored(torch.bfloat16, rounded_first=True),  # nothing was lost: the rounded time is the time
    ],
)
def test_times_that_tell_samples_apart(evidence):
    assert confirmed_ids(are_phases_kept, evidence()) == []


def test_formats():
    numbers = 60 * torch.randn(500, generator=torch.manual_seed(1))
    assert format_of(numbers.half().double()) == torch.float16
    assert format_of(numbers.bfloat16().float()) == torch.bfloat16
    for exact in (numbers, numbers.round(), (4 * numbers).round() / 4, torch.randint(0, 2, (500,)).float()):
        assert format_of(exact) is None
