"""Views in place of transposes, as people write them; honest reshapes are silent."""

import pytest
import torch
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.shapes import do_shapes_meet, scrambles


@pytest.mark.parametrize(
    "before, after",
    [
        ((7, 4, 16), (4, 7, 16)),
        ((4, 8, 8, 3), (4, 3, 8, 8)),
        ((4, 7, 16), (4, 2, 7, 8)),
        ((4, 2, 7, 8), (4, 7, 16)),
        ((2, 5, 16), (5, 32)),
        ((4, 16, 3, 5), (4, 15, 16)),
        ((4, 15, 16), (4, 16, 3, 5)),
    ],
)
def test_shapes_that_cannot_be_meant(before, after):
    assert scrambles(before, after)


@pytest.mark.parametrize(
    "before, after",
    [
        ((4, 7, 16), (4, 7, 2, 8)),
        ((4, 7, 2, 8), (4, 7, 16)),
        ((4, 7, 16), (28, 16)),
        ((28, 16), (4, 7, 16)),
        ((4, 16, 3, 3), (4, 144)),
        ((4, 1, 7), (4, 7, 1)),
        ((4, 12, 5, 5), (4, 3, 4, 5, 5)),
        ((1, 5, 16), (5, 16)),
        ((4, 16, 3, 5), (4, 16, 15)),
        ((4, 16, 4, 4), (4, 16, 16)),
        ((4, 16, 3, 5), (60, 16)),
    ],
)
def test_shapes_that_keep_their_order(before, after):
    assert not scrambles(before, after)


def hidden_state_step(make):
    model = nn.ModuleDict({"rnn": nn.GRU(3, 4, bidirectional=True), "out": nn.Linear(8, 1)})
    x, y = torch.randn(6, 5, 3), torch.randn(5)
    return evidence_of(model, lambda: ((model["out"](make(model["rnn"](x)[1])).squeeze(1) - y) ** 2).mean())


def test_a_hidden_state_viewed_instead_of_transposed():
    wrong = hidden_state_step(lambda h: h.view(5, -1))
    right = hidden_state_step(lambda h: h.transpose(0, 1).reshape(5, -1))
    assert confirmed_ids(do_shapes_meet, wrong) == ["axis-or-shape-error/view-for-transpose"]
    assert not confirmed_ids(do_shapes_meet, right)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_attention_is_silent(batch_first):
    model = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    x = torch.randn(2, 5, 8, requires_grad=True)
    evidence = evidence_of(model, lambda: model(x, x, x)[0].pow(2).mean())
    assert not confirmed_ids(do_shapes_meet, evidence)


def patch_step(make):
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 2, 2), "out": nn.Linear(8, 1)})
    x, y = torch.randn(6, 3, 6, 10), torch.randn(6, 15)
    return evidence_of(model, lambda: ((model["out"](make(model["stem"](x))).squeeze(2) - y) ** 2).mean())


def test_patches_of_a_picture_viewed_instead_of_transposed():
    wrong = patch_step(lambda h: h.reshape(6, -1, 8))
    right = patch_step(lambda h: h.flatten(2).transpose(1, 2))
    assert confirmed_ids(do_shapes_meet, wrong) == ["axis-or-shape-error/view-for-transpose"]
    assert not confirmed_ids(do_shapes_meet, right)


def test_relative_positions_that_are_shifted_by_a_view():
    model = nn.Linear(8, 9)

    def shifted():
        scores = nn.functional.pad(model(torch.randn(3, 5, 8)), (1, 0))  # (3, 5, 10)
        return scores.view(3, 10, 5)[:, 1:].reshape(3, 5, 9).pow(2).mean()

    assert not confirmed_ids(do_shapes_meet, evidence_of(model, shifted))
