"""Scores that all start far on one side are named with the weights that put them there; others are left alone."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from experiment_steps import confirmed_ids, evidence_of
from torch import nn

import gradproof
from gradproof.diagnosis.ranking import diagnose
from gradproof.experiments.gradients.stop_gradients import does_gradient_reach_what_it_must_not
from gradproof.experiments.network.initial import where_does_it_start

G = torch.Generator().manual_seed(0)
USERS, ITEMS = torch.randint(40, (128,), generator=G), torch.randint(30, (128,), generator=G)
CLICKS = torch.randint(0, 2, (128,), generator=G).float()


class Factors(nn.Module):
    def __init__(self, draw=torch.rand, bias=0.0):
        super().__init__()
        self.bias = bias
        self.user = nn.Parameter(draw(40, 32))
        self.item = nn.Parameter(draw(30, 32))

    def forward(self, u, i):
        return (self.user[u] * self.item[i]).sum(-1) + self.bias


def small(*shape):
    return 0.1 * torch.randn(*shape)


def step(model, clicks=CLICKS):
    return evidence_of(model, lambda: F.binary_cross_entropy_with_logits(model(USERS, ITEMS), clicks))


def test_factors_that_are_all_positive():
    (verdict,) = where_does_it_start(step(Factors()))
    assert verdict.id == "bad-init/scores-one-sided" and verdict.numbers == {"guess": math.log(2)}
    line = Path(__file__).read_text().splitlines()[int(verdict.where.rpartition(":")[2].rstrip(")")) - 1]
    assert line.strip().startswith(("self.user = nn.Parameter", "self.item = nn.Parameter"))


@pytest.mark.parametrize(
    ("model", "clicks"),
    [
        (Factors(small), CLICKS),
        (Factors(torch.randn), CLICKS),  # large, but on both sides
        (Factors(small, bias=-4.6), torch.zeros(128)),  # as rare as the targets are, on purpose
    ],
)
def test_starts_that_may_be(model, clicks):
    assert confirmed_ids(where_does_it_start, step(model, clicks)) == []


def test_a_batch_of_a_large_data_set():
    """Only the batch is on the tape: the question is asked of it all the same."""
    data = torch.randn(1 << 15, 640, generator=G)  # 84 MB
    model, rows = nn.Linear(640, 1), torch.arange(128)
    evidence = evidence_of(
        model, lambda: F.binary_cross_entropy_with_logits(model(data[rows]).squeeze(1), CLICKS)
    )
    assert any(slot.index not in evidence.tape.memory_of for slot in evidence.roles.inputs)
    assert confirmed_ids(where_does_it_start, evidence) == []


def test_a_score_of_two_tables_is_not_a_prediction_and_its_target():
    for model in (Factors(), Factors(small)):
        assert confirmed_ids(does_gradient_reach_what_it_must_not, step(model)) == []


def diagnosed(path, lr):
    torch.manual_seed(0)
    model = Factors()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with gradproof.watch(model, optimizer, out=path):
        for _ in range(120):
            loss = F.binary_cross_entropy_with_logits(model(USERS, ITEMS), CLICKS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {cause.id: cause.level for cause in diagnose(path).causes}


def test_a_problem_where_the_way_back_is_long(tmp_path):
    assert diagnosed(tmp_path / "long", 4e-3)["bad-init/scores-one-sided"] == "problem"
    assert diagnosed(tmp_path / "short", 0.1).get("bad-init/scores-one-sided", "note") == "note"
