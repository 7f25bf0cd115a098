"""Two views that are one tensor, by an augmentation in place; inputs that are given twice on purpose."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.data.memory import do_two_things_share_memory

DATA = torch.randn(64, 6)


def in_place(x):
    x += 0.2 * torch.randn_like(x)
    x[:, 3:] *= 1 + torch.rand(len(x), 1)
    return x


def anew(x):
    return in_place(x.clone())


def contrast(a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    scores = (z @ z.t() / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -9e9)
    count = len(a)
    return F.cross_entropy(scores, torch.arange(2 * count).roll(count))


def likeness(a, b):
    return -F.cosine_similarity(a, b).mean() + a.std(0).sub(1).square().mean()


def encoder(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def verdicts(model, make_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return examine(
        do_two_things_share_memory, model, optimizer, plain_step(model, optimizer, make_loss), steps=2
    )


@pytest.mark.parametrize("augment", [in_place, anew])
@pytest.mark.parametrize("compare", [contrast, likeness])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_augmentation_in_place(augment, compare, at_once):
    model = encoder()

    def loss():
        x = DATA[torch.randperm(64)[:16]]
        one, two = augment(x), augment(x)
        ends = model(torch.cat([one, two])).chunk(2) if at_once else (model(one), model(two))
        return compare(*ends)

    found = verdicts(model, loss)
    assert ids(found) == ({"aliasing-or-inplace/one-view"} if augment is in_place else set())
    if found:
        number = int(found[0].where.rpartition(":")[2])
        assert "x += 0.2" in Path(__file__).read_text().splitlines()[number - 1]


@pytest.mark.parametrize("same", [True, False])
def test_a_loader_that_brings_one_view_twice(same):
    model = encoder()
    brought = [(x.clone(), in_place(x) if not same else x.clone()) for x in DATA[:32].split(16)]

    def loss():
        one, two = brought.pop()
        return contrast(model(one), model(two))

    assert ids(verdicts(model, loss)) == ({"aliasing-or-inplace/one-view"} if same else set())


def test_one_input_twice_with_dropout_between():
    """As SimCSE and R-Drop do it, here after a sum in place: the passes differ."""
    model = encoder(dropout=0.3)

    def loss():
        x = torch.zeros(16, 6)
        for part in DATA[:48].split(16):
            x += part
        return contrast(model(x), model(x))

    assert not ids(verdicts(model, loss))


def test_one_input_twice_for_two_terms():
    """A batch that was written into twice and is judged twice; the judgements are not compared with each other."""
    model = encoder()

    def loss():
        x = in_place(in_place(DATA[:16].clone()))
        return F.softplus(-model(x)).mean() + 0.1 * model(x).square().mean()

    assert not ids(verdicts(model, loss))
