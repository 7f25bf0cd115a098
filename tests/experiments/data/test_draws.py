"""Steps drawn up to the batch's size, of a schedule that has more, are named with the range to draw from."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from taped_trainings import as_said
from torch import nn

from gradproof.examination.sightings import Sightings
from gradproof.experiments.data.draws import is_all_of_the_range_drawn

LEVELS = torch.cumprod(1 - torch.linspace(1e-4, 0.04, 100), 0)
DATA = torch.randn(100, 4, generator=torch.manual_seed(0))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.out = nn.Embedding(100, 4), nn.Linear(4, 4)

    def forward(self, x, t=None):
        return self.out(x if t is None else x + self.steps(t))


def by_schedule(model, draw):
    t, noise = draw(), torch.randn(16, 4)
    level = LEVELS.gather(-1, t)[:, None]
    return F.mse_loss(model(level.sqrt() * DATA[:16] + (1 - level).sqrt() * noise), noise)


def by_embedding(model, draw):
    noise = torch.randn(16, 4)
    return F.mse_loss(model(DATA[:16] + noise, draw()), noise)


def by_sample(model, draw):
    """Rows of the data: how many are drawn is asked elsewhere."""
    x = DATA[draw()]
    return F.mse_loss(model(x), 2 * x)


def within_batch(model, draw):
    """A partner for every sample, from the same batch."""
    x = DATA[:16]
    return F.mse_loss(model(x), x[draw()])


def ids(loss, draw, steps=4):
    model, sightings, found = Denoiser(), Sightings(), []
    for step in range(steps):
        evidence = evidence_of(model, lambda: loss(model, draw), step=step)
        found = as_said(is_all_of_the_range_drawn, evidence, sightings)
    return [verdict.id for verdict in found if verdict.id]


def short():
    return torch.randint(0, 16, (16,))


@pytest.mark.parametrize("loss", [by_schedule, by_embedding])
def test_a_range_of_the_size_of_the_batch(loss):
    assert ids(loss, short) == ["data-order-or-sampling/part-of-the-range"]
    assert ids(loss, short, steps=1) == []  # once may be chance


@pytest.mark.parametrize(
    ("loss", "draw"),
    [
        (by_schedule, lambda: torch.randint(100, (16,))),
        (by_embedding, lambda: torch.randint(0, 99, (16,))),
        (by_schedule, lambda: torch.randint(0, 50, (16,))),  # the lower noise levels, on purpose
        (by_sample, short),
        (within_batch, short),
    ],
)
def test_ranges_that_are_meant(loss, draw):
    assert ids(loss, draw) == []
