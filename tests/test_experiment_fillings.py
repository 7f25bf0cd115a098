"""Targets whose gaps are filled with a number that is learned; and masks, pictures, counts, one-hot rows."""

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.fillings import ID, do_missing_entries_count


def found(target, masked=None):
    torch.manual_seed(0)
    model, x = nn.Linear(6, target.shape[1]), torch.randn(len(target), 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss():
        if masked is None:
            return F.mse_loss(model(x), target)
        mask = (target != masked).float()
        return ((model(x) - target) ** 2 * mask).sum() / mask.sum()

    step = plain_step(model, optimizer, loss)
    return examine(do_missing_entries_count, model, optimizer, step, steps=1)


def ratings(filled):
    torch.manual_seed(1)
    known = (3 + torch.randn(40, 30)).clamp(1, 5)
    return torch.where(torch.rand(40, 30) < 0.2, known + 0.01 * torch.rand(40, 30), torch.tensor(filled))


def test_ratings_with_zeros_for_none():
    verdicts = found(ratings(0.0))
    assert ids(verdicts, "warning") == {ID} and verdicts[0].confidence == "likely"
    assert not found(ratings(0.0), masked=0.0)


def test_a_number_that_nobody_measures():
    assert ids(found(ratings(-999.0)), "problem") == {ID}
    assert not found(ratings(-999.0), masked=-999.0)


@pytest.mark.parametrize(
    "target",
    [
        torch.randn(40, 30),
        torch.randn(40, 30).relu(),  # comes near its zeros
        F.one_hot(torch.arange(40) % 30, 30).float(),
        torch.poisson(torch.full((40, 30), 0.7)),
        (torch.rand(40, 30) < 0.3).float(),
        torch.rand(40, 30) * (torch.rand(40, 30) < 0.3),  # sparse, of all sizes
        torch.randn(40, 30) * (torch.rand(40, 30) < 0.3),  # silence between signs
    ],
)
def test_other_targets_are_silent(target):
    assert not found(target)
