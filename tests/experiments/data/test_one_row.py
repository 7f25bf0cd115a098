"""Lists of references to one array; and copies, bandits, contexts repeated on purpose."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.data.stored import are_data_kept_as_they_were

ID = "aliasing-or-inplace/one-row"


def found(model, make_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, make_loss)
    return examine(are_data_kept_as_they_were, model, optimizer, step, steps=6)


def rollout(keep, anew, random, episodes=3, length=8):
    """States kept along some episodes, of an environment that changes its state in place."""
    state, kept = np.zeros(3, dtype=np.float32), []
    for _ in range(episodes):
        if anew:
            state = np.zeros(3, dtype=np.float32)
        state[:] = random.normal(size=3)
        for _ in range(length):
            kept.append(keep(state))
            state += 0.1
    return torch.from_numpy(np.stack(kept))


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("keep", [lambda s: s, np.copy])
def test_states_kept_by_reference(keep, anew):
    model, random = nn.Linear(3, 1), np.random.default_rng(0)

    def loss():
        returns = torch.from_numpy(random.normal(size=(24, 1)).astype(np.float32))
        return F.mse_loss(model(rollout(keep, anew, random)), returns)

    assert ids(found(model, loss)) == (set() if keep is np.copy else {ID})


def test_a_bandit_has_one_state():
    model, state, random = nn.Linear(3, 1), torch.ones(16, 3), np.random.default_rng(0)
    assert not found(
        model, lambda: F.mse_loss(model(state), torch.from_numpy(random.random((16, 1))).float())
    )


def test_one_context_for_a_group_of_answers():
    model, random = nn.Linear(3, 1), np.random.default_rng(0)

    def loss():
        context = torch.from_numpy(random.random((1, 3))).float().expand(16, 3)
        return F.mse_loss(model(context), torch.from_numpy(random.random((16, 1))).float())

    assert not found(model, loss)


def test_one_image_at_many_times():
    class Eps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, t):
            return self.layer(torch.cat([x, t], 1))

    model, random = Eps(), np.random.default_rng(0)

    def loss():
        x = torch.from_numpy(np.stack([random.random(3)] * 1 + []).repeat(16, 0)).float()
        t, e = (torch.from_numpy(random.random((16, n))).float() for n in (1, 3))
        return F.mse_loss(model(x, t), e)

    assert not found(model, loss)
