"""Inputs that hardly differ between samples are named with the line that shrank them; others are left alone."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import evidence_of
from torch import nn

from gradproof.experiments.data.scale import are_numbers_of_a_fitting_size

torch.manual_seed(0)
IMAGES, CLASS = torch.randint(0, 256, (32, 3, 6, 6)).float(), torch.randint(0, 4, (32,))


def said(prepare, model=None, step=1):
    model = model or nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    evidence = evidence_of(model, lambda: F.cross_entropy(model(prepare(IMAGES)), CLASS), step=step)
    found = are_numbers_of_a_fitting_size(evidence)
    return [verdict for verdict in found if "hardly-varies" in f"{verdict.id} {verdict.about}"]


def standardised_twice(x):
    x = x / 255
    x = x / 255  # one too many
    return (x - 0.45) / 0.22


def test_pixels_that_were_divided_twice():
    (verdict,) = said(standardised_twice)
    assert verdict.id == "input-or-target-scale/hardly-varies" and verdict.if_troubled
    line = Path(__file__).read_text().splitlines()[int(verdict.where.rpartition(":")[2].rstrip(")")) - 1]
    assert line.strip().startswith("x = x / 255  # one too many")


def test_it_is_a_problem_of_its_own_where_nothing_is_learned():
    (verdict,) = said(standardised_twice, step=100)
    assert not verdict.if_troubled and verdict.confidence == "likely"


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: (x / 255 - 0.45) / 0.22,
        lambda x: x / 255 / 255,  # tiny, which is something else: all of it varies
        lambda x: 5 + x / 255,
        lambda x: torch.ones_like(x),  # there is nothing in it, on purpose
        lambda x: standardised_twice(x).where(x > 0, torch.nan),  # no matter of scale
    ],
)
def test_inputs_that_vary(prepare):
    assert not [verdict for verdict in said(prepare) if verdict.id]


def test_a_network_that_normalises_behind_its_first_layer():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    assert said(standardised_twice, model) == []
