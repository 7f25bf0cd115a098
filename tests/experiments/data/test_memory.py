"""Stacks of one buffer, targets changed together with inputs; and clones."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from taped_trainings import examine, ids, plain_step
from torch import nn

from gradproof.experiments.data.memory import do_two_things_share_memory


def verdicts(model, make_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = plain_step(model, optimizer, make_loss)
    return examine(do_two_things_share_memory, model, optimizer, step, steps=2)


@pytest.mark.parametrize("kept", ["view", "clone"])
def test_replay_of_one_buffer(kept):
    state, memory = torch.zeros(2, 2), []
    for t in range(12):
        state.copy_(torch.full((2, 2), float(t)))
        memory.append(state.flatten() if kept == "view" else state.flatten().clone())
    model = nn.Linear(4, 1)
    found = verdicts(model, lambda: model(torch.stack(memory)).pow(2).mean())
    assert ids(found) == ({"aliasing-or-inplace/one-buffer"} if kept == "view" else set())


def test_of_one_buffer_the_line_that_hands_it_out_is_named():
    state, memory, model = torch.zeros(2, 2), [], nn.Linear(4, 1)

    def loss():
        for t in range(8):
            state.fill_(float(t))
            memory.append(state.flatten())
        return model(torch.stack(memory)).pow(2).mean()

    number = int(verdicts(model, loss)[0].where.rpartition(":")[2])
    assert "memory.append(state.flatten())" in Path(__file__).read_text().splitlines()[number - 1]


def test_rows_of_one_large_buffer_are_silent():
    buffer, model = torch.randn(12, 4), nn.Linear(4, 1)
    rows = [buffer[i] for i in range(12)]
    assert not verdicts(model, lambda: model(torch.stack(rows)).pow(2).mean())


@pytest.mark.parametrize("kept", [lambda r: r, torch.clone])
def test_rewards_of_one_buffer_inside_a_step(kept):
    model, reward = nn.Linear(3, 1), torch.zeros(4)

    def loss():
        seen = torch.randn(8, 4, 3)
        rewards = []
        for x in seen:
            reward.copy_(x.sum(1))
            rewards.append(kept(reward))
        return F.mse_loss(model(seen).squeeze(-1), torch.stack(rewards))

    assert ids(verdicts(model, loss)) == (
        set() if kept is torch.clone else {"aliasing-or-inplace/one-buffer"}
    )


@pytest.mark.parametrize("in_place", [True, False])
def test_noise_scaled_in_place_is_the_target_too(in_place):
    model = nn.Linear(4, 4)

    def loss():
        clean, noise = torch.randn(16, 4), torch.randn(16, 4)
        mixed = clean + (noise.mul_(0.3) if in_place else noise * 0.3)
        return (model(mixed) - noise).pow(2).mean()

    assert ids(verdicts(model, loss)) == ({"aliasing-or-inplace/target-changed"} if in_place else set())


def preferred(policy, reference, x, y):
    """The margin of two answers against that of a reference, as preference tuning has it."""

    def log_probability(model, answer):
        return model(x).log_softmax(-1).gather(1, answer[:, None]).squeeze(1)

    with torch.no_grad():
        held = [log_probability(reference, answer) for answer in (y, 1 - y)]
    learned = [log_probability(policy, answer) for answer in (y, 1 - y)]
    return -F.logsigmoid((learned[0] - held[0]) - (learned[1] - held[1])).mean()


def taught(policy, teacher, x, y):
    with torch.no_grad():
        wanted = teacher(x).tanh()
    return F.mse_loss(policy(x).tanh(), wanted) + F.cross_entropy(policy(x), y)


@pytest.mark.parametrize("make_loss", [preferred, taught])
@pytest.mark.parametrize("copied", [False, True])
def test_a_network_that_is_its_own_reference(make_loss, copied):
    torch.manual_seed(0)
    policy, x, y = nn.Linear(4, 2), torch.randn(12, 4), torch.randint(0, 2, (12,))
    reference = copy.deepcopy(policy) if copied else policy
    found = ids(verdicts(policy, lambda: make_loss(policy, reference, x, y)))
    assert found == (set() if copied else {"aliasing-or-inplace/compared-with-itself"})


def test_ratios_and_detached_twins_are_equal_on_purpose():
    torch.manual_seed(0)
    policy, x, done = nn.Linear(4, 2), torch.randn(12, 4), torch.randint(0, 2, (12,))
    gain = torch.randn(12)

    def ratio():
        log = policy(x).log_softmax(-1).gather(1, done[:, None]).squeeze(1)
        with torch.no_grad():
            old = policy(x).log_softmax(-1).gather(1, done[:, None]).squeeze(1)
        return -((log - old).exp() * gain).mean()

    def surrogate():
        out = policy(x)
        return (out - out.detach()).mul(gain[:, None]).mean() + (out.round() + (out - out.detach())).pow(
            2
        ).mean()

    for make_loss in (ratio, surrogate):
        assert not ids(verdicts(policy, make_loss))
