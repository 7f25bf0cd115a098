"""Numbers of the wrong size are named with the value to divide by; standardised ones are excluded."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of, excluded_families
from torch import nn

from gradproof.experiments.data.scale import are_numbers_of_a_fitting_size
from gradproof.experiments.network.initial import where_does_it_start

X, Y, CLASS = torch.randn(32, 6), torch.randn(32, 1), torch.randint(0, 4, (32,))
PIXELS = torch.randint(0, 256, (32, 6)).float()


def ids(x, y, model=None, loss=F.mse_loss):
    model = model or nn.Linear(6, 1)
    return confirmed_ids(are_numbers_of_a_fitting_size, evidence_of(model, lambda: loss(model(x), y)))


def test_sizes():
    raw = X * torch.tensor([1, 1, 1, 50, 2000, 1.0]) + 3
    assert ids(raw, Y) == ["input-or-target-scale/raw-features"]
    assert ids(PIXELS, Y) == ["input-or-target-scale/pixels-to-255"]
    assert ids(PIXELS.clamp(max=39), Y) == [
        "input-or-target-scale/raw-features"
    ]  # a table of counts, no image
    dark = torch.randint(0, 40, (32, 64)).float()
    assert ids(dark, Y, nn.Linear(64, 1)) == ["input-or-target-scale/pixels-to-255"]
    assert ids(X, 300 + 90 * Y) == ["input-or-target-scale/raw-targets"]
    yes = (Y > 0).float()
    assert ids(X, 255 * yes, loss=F.binary_cross_entropy_with_logits) == [
        "input-or-target-scale/yes-or-no-target"
    ]
    assert ids(X, yes, loss=F.binary_cross_entropy_with_logits) == []


def test_standardised_numbers_are_excluded():
    model = nn.Linear(6, 1)
    evidence = evidence_of(model, lambda: F.mse_loss(model(X), Y))
    assert excluded_families(are_numbers_of_a_fitting_size, evidence) == ["input-or-target-scale"]


def test_a_network_that_normalises_its_input():
    assert ids(PIXELS, Y, nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))) == []


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, mask, x):
        seen = (self.scores(x)[:, None, :] + mask).softmax(-1) @ x[:, :, None]
        return self.last(seen.squeeze(-1))


def test_a_mask_that_is_handed_in_is_no_feature():
    for hidden in (-float("inf"), -1e9):
        mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), hidden)
        mask, model = mask.repeat(32, 1, 1), Masked()
        evidence = evidence_of(model, lambda m=model, k=mask: F.mse_loss(m(k, X), Y))
        assert confirmed_ids(are_numbers_of_a_fitting_size, evidence) == []


def test_the_loss_at_the_start():
    for scale, expected in ((1.0, []), (60.0, ["bad-init/too-large", "bad-init/loss-at-start"])):
        model = nn.Linear(6, 4)
        with torch.no_grad():
            model.weight.mul_(scale)
        evidence = evidence_of(model, lambda m=model: F.cross_entropy(m(X), CLASS))
        assert confirmed_ids(where_does_it_start, evidence) == expected


def test_raw_targets_are_a_problem_where_nothing_is_learned():
    """The mean is learned and no more: the predictions explain nothing of the targets' variance."""
    model = nn.Linear(6, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 300.0)
    evidence = evidence_of(model, lambda: F.mse_loss(model(X), 300 + 90 * Y), step=100)
    (said,) = [v for v in are_numbers_of_a_fitting_size(evidence) if v.id]
    assert not said.if_troubled and said.confidence == "likely"


@pytest.mark.parametrize("learned", [False, True])
def test_how_much_is_explained_is_noted(learned):
    """Half of the labels are ignored: they are no class."""
    model, labels = nn.Linear(6, 4), CLASS.clone()
    labels[::2] = -100
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(100 if learned else 0):
        optimizer.zero_grad()
        F.cross_entropy(model(X), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    evidence = evidence_of(model, lambda: F.cross_entropy(model(X), labels), step=120)
    list(are_numbers_of_a_fitting_size(evidence))
    ((step, share),) = evidence.noted["learned"]
    assert step == 120 and (share > 0.2) == learned and share < (1 if learned else 0.03)
    ((_, guess),) = evidence.noted["guessing"]
    assert 1.0 < guess <= math.log(4)


@pytest.mark.parametrize("by_a_network", [False, True])
def test_what_a_reference_says_has_the_size_that_it_has(by_a_network):
    model, reference = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)
    reference.bias.fill_(-100.0)
    said = reference(X)
    loss = (
        (lambda: F.mse_loss(model(X), reference(X))) if by_a_network else lambda: F.mse_loss(model(X), said)
    )
    found = confirmed_ids(are_numbers_of_a_fitting_size, evidence_of(model, loss, step=100))
    assert found == ([] if by_a_network else ["input-or-target-scale/raw-targets"])


def test_what_a_network_makes_of_its_targets_is_not_noted():
    model, target = nn.Linear(6, 1), nn.Linear(6, 1)
    evidence = evidence_of(model, lambda: F.mse_loss(model(X), target(X).detach()), step=120)
    list(are_numbers_of_a_fitting_size(evidence))
    assert "learned" not in evidence.noted


def test_numbers_of_the_wrong_size_are_followed_to_where_they_are_made():
    model = nn.Linear(6, 1)
    raw = 300 + 90 * torch.randn(64, 1)
    targets = raw

    def loss():
        return F.mse_loss(model(X), targets[: len(X)])

    evidence = evidence_of(model, loss, step=100)
    said = [v for v in are_numbers_of_a_fitting_size(evidence) if v.id == "input-or-target-scale/raw-targets"]
    (made,) = [line for line in said[0].evidence if line.startswith("these numbers are made at")]
    lines = Path(__file__).read_text().splitlines()
    named = [lines[int(number) - 1].strip() for number in re.findall(r":(\d+)", made)]
    assert named == ["targets = raw", "raw = 300 + 90 * torch.randn(64, 1)"]
