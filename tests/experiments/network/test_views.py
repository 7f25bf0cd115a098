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


class Heads(nn.Module):
    """Attention of 5 heads over 8 positions, with the heads folded into the batch by `fold` and back by `unfold`."""

    def __init__(self, fold, unfold, fused):
        super().__init__()
        self.qkv, self.out = nn.Linear(10, 30), nn.Linear(10, 1)
        self.fold, self.unfold, self.fused = fold, unfold, fused

    def forward(self, x):
        q, k, v = (self.fold(part) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            made = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        else:
            made = torch.bmm(torch.bmm(q, k.mT).mul(2**-0.5).softmax(-1), v)
        return self.out(self.unfold(made)).squeeze(-1)


def viewed(x):
    return x.reshape(len(x) * 5, -1, 2)


def transposed(x):
    return x.view(len(x), -1, 5, 2).transpose(1, 2).reshape(len(x) * 5, -1, 2)


def back(x):
    return x.view(len(x) // 5, 5, -1, 2).transpose(1, 2).reshape(len(x) // 5, -1, 10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "fold, unfold", [(viewed, lambda x: x.reshape(len(x) // 5, -1, 10)), (transposed, back)]
)
def test_heads_folded_into_the_batch_by_a_view(fold, unfold, fused):
    model = Heads(fold, unfold, fused)
    x, y = torch.randn(6, 8, 10), torch.randn(6, 8)
    evidence = evidence_of(model, lambda: ((model(x) - y) ** 2).mean())
    expected = ["axis-or-shape-error/view-for-transpose"] if fold is viewed else []
    assert confirmed_ids(do_shapes_meet, evidence) == expected


def test_parts_that_are_looked_at_one_by_one_may_be_folded_anyhow():
    """Each head's numbers at each position are normalised by themselves, and put back where they were."""

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm, self.out = nn.Linear(10, 10), nn.LayerNorm(2), nn.Linear(10, 1)

        def forward(self, x):
            h = self.inner(x)
            return self.out(self.norm(viewed(h)).view(h.shape)).squeeze(-1)

    model = Normalised()
    x, y = torch.randn(6, 8, 10), torch.randn(6, 8)
    assert not confirmed_ids(do_shapes_meet, evidence_of(model, lambda: ((model(x) - y) ** 2).mean()))
