"""Positions counted over the batch instead of over the sequence, and ones that are right, by any layout."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.shapes import do_shapes_meet

SAMPLES, TIME = 12, 9


class Classifier(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = numbers
        self.tok, self.pos, self.head = nn.Embedding(20, 16), nn.Embedding(32, 16), nn.Linear(16, 2)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(self.numbers(ids))
        return self.head(x.tanh().mean(1))


def ids_of(numbers):
    torch.manual_seed(0)
    model, tokens = Classifier(numbers), torch.randint(1, 20, (SAMPLES, TIME))
    tokens[:6, -3:] = 0  # padding
    labels = torch.randint(0, 2, (SAMPLES,))
    evidence = evidence_of(model, lambda: F.cross_entropy(model(tokens), labels))
    return confirmed_ids(do_shapes_meet, evidence)


@pytest.mark.parametrize(
    "numbers",
    [
        lambda ids: ((ids != 0).long().cumsum(0) - 1).clamp(min=0),
        lambda ids: torch.arange(len(ids))[:, None].expand(ids.shape),
    ],
    ids=["cumsum", "arange"],
)
def test_positions_along_the_batch(numbers):
    assert ids_of(numbers) == ["axis-or-shape-error/positions-along-the-batch"]


@pytest.mark.parametrize(
    "numbers",
    [
        lambda ids: ((ids != 0).long().cumsum(1) - 1).clamp(min=0),
        lambda ids: torch.arange(ids.shape[1]).expand(ids.shape),
        lambda ids: ids.bincount(minlength=20)[ids] if ids.dim() == 1 else (ids % 7),
        lambda ids: torch.arange(ids.shape[1]).flip(0).expand(ids.shape),
    ],
    ids=["cumsum", "arange", "features", "from the end"],
)
def test_positions_along_the_sequence(numbers):
    assert not ids_of(numbers)
