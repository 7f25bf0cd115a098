"""Scores reshaped across their axis of classes; and moved first, kept as maps, of one pixel, of anchors, heat maps."""

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

from gradproof.experiments.network.shapes import do_shapes_meet

MIXED = ["axis-or-shape-error/classes-of-different-places"]

B, C, SIZE = 4, 3, 6


def found(arrange, channels=C, size=SIZE, layer=None, make_loss=F.cross_entropy, targets=None):
    """The experiment on a segmentation whose loss is given the scores as `arrange` leaves them."""
    torch.manual_seed(0)
    layer = layer or nn.Conv2d(2, channels, 1)
    images = torch.randn(B, 2, size, size)
    targets = torch.randint(0, C, (B * size * size,)) if targets is None else targets
    evidence = evidence_of(layer, lambda: make_loss(arrange(layer(images)), targets))
    return confirmed_ids(do_shapes_meet, evidence)


def focal(scores, targets):
    right = scores.softmax(1).log().gather(1, targets[:, None])
    return -((1 - right.detach().exp()) ** 2 * right).mean()


def test_pixels_of_one_class_in_place_of_the_classes_of_one_pixel():
    assert found(lambda scores: scores.reshape(-1, C)) == MIXED
    assert found(lambda scores: scores.flatten(2).reshape(-1, C) / 0.5) == [
        "axis-or-shape-error/classes-of-different-places"
    ]
    assert found(lambda scores: scores.reshape(-1, C), size=5, targets=torch.randint(0, C, (B * 25,))) == [
        "axis-or-shape-error/classes-of-different-places"
    ]
    assert found(lambda scores: scores.reshape(-1, C), make_loss=focal) == [
        "axis-or-shape-error/classes-of-different-places"
    ]


def test_a_map_that_is_scaled_up_first():
    targets = torch.randint(0, C, (B * 4 * SIZE * SIZE,))
    assert found(lambda s: F.interpolate(s, scale_factor=2).reshape(-1, C), targets=targets) == [
        "axis-or-shape-error/classes-of-different-places"
    ]


def test_time_in_place_of_classes():
    layer = nn.Sequential(nn.Flatten(2), nn.Conv1d(2, C, 1))
    assert found(lambda scores: scores.view(-1, C), layer=layer) == [
        "axis-or-shape-error/classes-of-different-places"
    ]
    assert found(lambda scores: scores.transpose(1, 2).reshape(-1, C), layer=layer) == []


def test_anchors_that_are_not_moved():
    targets = torch.randint(0, C, (B * 2 * SIZE * SIZE,))
    assert found(lambda s: s.view(B, -1, C).view(-1, C), channels=2 * C, targets=targets) == [
        "axis-or-shape-error/classes-of-different-places"
    ]
    moved = found(lambda s: s.permute(0, 2, 3, 1).reshape(-1, C), channels=2 * C, targets=targets)
    assert moved == []


@pytest.mark.parametrize(
    "arrange",
    [
        lambda scores: scores.permute(0, 2, 3, 1).reshape(-1, C),
        lambda scores: scores.flatten(2).transpose(1, 2).reshape(-1, C),
        lambda scores: scores.movedim(1, -1).contiguous().view(-1, C),
        lambda scores: scores.transpose(0, 1).reshape(C, -1).t(),
    ],
)
def test_classes_moved_to_the_end_first(arrange):
    assert found(arrange) == []


def test_maps_as_they_are():
    maps = torch.randint(0, C, (B, SIZE, SIZE))
    assert found(lambda scores: scores, targets=maps) == []
    assert found(lambda scores: scores.flatten(2), targets=maps.flatten(1)) == []


def test_one_pixel_has_nothing_to_mix():
    assert found(lambda scores: scores.reshape(-1, C), size=1) == []


def test_a_heat_map_is_a_softmax_over_places():
    where = torch.randint(0, SIZE * SIZE, (B * SIZE * SIZE,))
    assert found(lambda scores: scores.view(-1, SIZE * SIZE), channels=SIZE * SIZE, targets=where) == []


def test_one_layer_for_all_positions():
    layer = nn.Sequential(nn.Flatten(2), nn.Linear(SIZE * SIZE, 5 * C))
    targets = torch.randint(0, C, (B * 2 * 5,))
    assert found(lambda scores: scores.view(-1, C), layer=layer, targets=targets) == []


def test_values_are_no_classes():
    targets = torch.randn(B * SIZE * SIZE, C)
    assert found(lambda scores: scores.reshape(-1, C), make_loss=F.mse_loss, targets=targets) == []
