"""Observations that are one NumPy array, changed by its owner; and copies, rows, repeats, an array that stays."""

import numpy as np
import pytest
import torch
from taped_trainings import examine, ids, plain_step
from torch import nn

import gradproof
from gradproof.experiments.data.memory import do_two_things_share_memory

ID = "aliasing-or-inplace/one-array"


class Walk:
    """An environment that has one array for its state, and changes it in place."""

    def __init__(self, moves=True):
        self.state, self.moves = np.zeros((4, 3), dtype=np.float32), moves

    def step(self):
        if self.moves:
            self.state[:, 0] += 1
        return self.state


def verdicts(make_loss, model, experiment=do_two_things_share_memory, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return examine(experiment, model, optimizer, plain_step(model, optimizer, make_loss), steps=steps)


def collected(keep, moves=True, acts=True, steps=2):
    """On-policy: each observation is read by the model when it is new, and all are put together for the loss."""
    model, walk = nn.Linear(3, 1), Walk(moves)

    def loss():
        seen = []
        for _ in range(8):
            seen.append(keep(walk.step()))
            with torch.no_grad():
                acts and model(seen[-1])
        return model(torch.stack(seen)).pow(2).mean()

    return verdicts(loss, model, steps=steps)


KEPT = {
    "from_numpy": torch.from_numpy,
    "as_tensor": torch.as_tensor,
    "a view": lambda array: torch.from_numpy(array).unsqueeze(0),
    "a part": lambda array: torch.from_numpy(array)[:2],
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_observations_of_one_array(keep):
    found = collected(keep)
    assert ids(found, "problem") == {ID}
    assert ids(collected(keep, acts=False), "problem") == {ID}
    assert found[0].where.startswith("test_one_array.py:")


@pytest.mark.parametrize(
    "keep", [torch.tensor, lambda a: torch.from_numpy(a.copy()), lambda a: torch.from_numpy(a).clone()]
)
def test_copies(keep):
    assert not collected(keep)


def test_a_mask_that_stays_is_no_problem():
    said = collected(torch.from_numpy, moves=False)
    assert ids(said) == ids(said, "note")


def test_a_mask_that_stays_does_not_hide_what_changes():
    model, walk, mask = nn.Linear(3, 1), Walk(), np.ones((4, 3), dtype=np.float32)

    def loss():
        pairs = [(torch.from_numpy(mask), torch.from_numpy(walk.step())) for _ in range(8)]
        masks, seen = (torch.stack(part) for part in zip(*pairs, strict=True))
        return model(masks * seen).pow(2).mean()

    assert ids(verdicts(loss, model, steps=1), "problem") == {ID}


def test_a_replay_memory_that_changes_under_its_observations(tmp_path):
    model, walk, memory = nn.Linear(3, 1), Walk(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        memory.append(torch.from_numpy(walk.step()))

    def loss():
        memory.append(torch.from_numpy(walk.step()))
        return model(torch.stack([memory[i] for i in torch.randint(40, (16,)).tolist()])).pow(2).mean()

    with gradproof.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(5):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    assert [
        cause.id for cause in gradproof.diagnose(tmp_path / "run").causes if cause.level == "problem"
    ] == [ID]


def test_rows_and_repeats_of_one_array():
    model, table = nn.Linear(3, 1), np.random.default_rng(0).random((8, 3), dtype=np.float32)
    whole = torch.from_numpy(table)
    for make in (lambda: [torch.from_numpy(row) for row in table], lambda: [whole] * 8):
        found = verdicts(lambda make=make: model(torch.stack(make())).pow(2).mean(), model)
        assert ID not in ids(found) and all(verdict.if_troubled for verdict in found)


def test_a_sample_that_is_meant_many_times():
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    views = verdicts(
        lambda: model(torch.cat([x.unsqueeze(1) for _ in range(8)], 1)).pow(2).mean(),
        model,
        do_two_things_share_memory,
    )
    assert not views
    repeats = verdicts(lambda: model(torch.cat([x] * 8)).pow(2).mean(), model, do_two_things_share_memory)
    assert all(verdict.if_troubled for verdict in repeats)
