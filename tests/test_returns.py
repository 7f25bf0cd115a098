"""Trained weights that are put back to one state again and again; and restores, inner loops and restarts."""

import copy

import pytest
import torch
from torch import nn

import gradproof

ID = "weights-state-error/put-back"
STEPS = 60


class Loop:
    """A regression towards a slower copy of its own; `after` is called behind every step."""

    def __init__(self, optimizer=torch.optim.Adam):
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.target = copy.deepcopy(self.online)
        self.start = copy.deepcopy(self.online.state_dict())
        self.kind = optimizer
        self.optimizer = optimizer(self.online.parameters(), lr=0.01)

    def run(self, path, after, bootstrapped=True):
        x = torch.randn(STEPS, 16, 4)
        with gradproof.watch(self.online, out=path / "run", experiments=False):
            for number in range(STEPS):
                goal = x[number].sum(1, keepdim=True)
                if bootstrapped:
                    with torch.no_grad():
                        goal = goal + 0.5 * self.target(x[number])
                loss = (self.online(x[number]) - goal).pow(2).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                after(self, number)
        return {c.id: c for c in gradproof.diagnose(path / "run").causes}


def load_the_wrong_way(loop, number):
    if number % 20 == 19:
        loop.online.load_state_dict(loop.target.state_dict())


@torch.no_grad()
def copy_the_wrong_way(loop, number):
    if number % 20 == 19:
        for mine, other in zip(loop.online.parameters(), loop.target.parameters(), strict=True):
            mine.data.copy_(other.data)


@pytest.mark.parametrize("after", [load_the_wrong_way, copy_the_wrong_way])
def test_a_target_network_that_gives_its_weights(tmp_path, after):
    cause = Loop().run(tmp_path, after)[ID]
    assert cause.level == "problem" and "began with" in cause.evidence[0]
    if after is load_the_wrong_way:
        assert cause.where.startswith("test_returns.py:")


def test_every_epoch_begins_where_the_first_did(tmp_path):
    def after(loop, number):
        if number % 10 == 9:
            loop.online.load_state_dict(loop.start)

    assert Loop().run(tmp_path, after, bootstrapped=False)[ID].level == "problem"


def sync(loop, number):
    if number % 20 == 19:
        loop.target.load_state_dict(loop.online.state_dict())


def restore_once(loop, number):
    if number == 40:
        loop.online.load_state_dict(loop.start)


def restore_best_at_the_end(loop, number):
    if number == 30:
        loop.best = copy.deepcopy(loop.online.state_dict())
    if number == STEPS - 1:
        loop.online.load_state_dict(loop.best)


def inner_loops(loop, number):  # Reptile, four tasks of five steps to one outer step
    if number % 5 == 4:
        if number % 20 == 19:
            now = loop.online.state_dict()
            loop.start = {key: torch.lerp(value, now[key], 0.3) for key, value in loop.start.items()}
        loop.online.load_state_dict(loop.start)


def inner_loops_of_which_the_first_is_long(loop, number):
    if number in (8, 16, 24, 32, 40, 44, 48, 52):
        if number >= 40:
            loop.start = {key: 0.9 * value for key, value in loop.start.items()}
        loop.online.load_state_dict(loop.start)


@torch.no_grad()
def stay_inside_of_bounds(loop, number):
    for parameter in loop.online.parameters():
        parameter.clamp_(-0.001, -0.001)  # as far as it goes, all of them


def lend_the_average(loop, number):
    own = copy.deepcopy(loop.online.state_dict())
    loop.online.load_state_dict(loop.start)
    loop.online.load_state_dict(own)


@torch.no_grad()
def clamp(loop, number):
    for parameter in loop.online.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def start_anew(loop, number):  # folds of a cross validation
    if number % 20 == 19:
        loop.online.load_state_dict(loop.start)
        loop.optimizer = loop.kind(loop.online.parameters(), lr=0.01)


def start_anew_with_the_optimizers_state(loop, number):
    if number == 0:
        loop.fresh = copy.deepcopy(loop.optimizer.state_dict())
    if number % 15 == 14:
        loop.online.load_state_dict(loop.start)
        loop.optimizer.load_state_dict(loop.fresh)


@pytest.mark.parametrize(
    "after",
    [
        sync,
        restore_once,
        restore_best_at_the_end,
        inner_loops,
        inner_loops_of_which_the_first_is_long,
        stay_inside_of_bounds,
        lend_the_average,
        clamp,
        start_anew,
        start_anew_with_the_optimizers_state,
    ],
)
def test_what_is_meant_is_silent(tmp_path, after):
    assert ID not in Loop().run(tmp_path, after)


def test_tasks_that_begin_alike_without_moments_are_no_problem(tmp_path):
    def after(loop, number):
        if number % 10 == 9:
            loop.online.load_state_dict(loop.start)

    cause = Loop(torch.optim.SGD).run(tmp_path, after, bootstrapped=False)[ID]
    assert cause.level == "warning"


def test_a_part_that_is_put_back_is_no_problem(tmp_path):
    def after(loop, number):
        if number % 5 == 4:
            loop.online[2].load_state_dict({k[2:]: v for k, v in loop.start.items() if k.startswith("2.")})

    assert ID not in Loop().run(tmp_path, after)


class Average:
    """Follows the weights at every step, and is put in their place for a validation every tenth."""

    def __init__(self, restores):
        self.restores, self.shadow = restores, []

    @torch.no_grad()
    def __call__(self, loop, number):
        weights = list(loop.online.parameters())
        self.shadow = self.shadow or [w.clone() for w in weights]
        for mine, weight in zip(self.shadow, weights, strict=True):
            mine.lerp_(weight, 0.02)
        if number % 10 == 9:
            kept = [w.clone() for w in weights]
            for weight, mine in zip(weights, self.shadow, strict=True):
                weight.copy_(mine)
            loop.online(torch.randn(4, 4))
            if self.restores:
                for weight, old in zip(weights, kept, strict=True):
                    weight.copy_(old)


def run_taped(path, after):
    loop = Loop()
    x = torch.randn(STEPS, 16, 4)
    with gradproof.watch(loop.online, loop.optimizer, out=path / "run"):
        for number in range(STEPS):
            loss = (loop.online(x[number]) - x[number].sum(1, keepdim=True)).pow(2).mean()
            loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
            after(loop, number)
    return {c.id: c for c in gradproof.diagnose(path / "run").causes}


def test_an_average_that_stays_in_the_weights_place(tmp_path):
    cause = run_taped(tmp_path, Average(restores=False))["weights-state-error/average-stays"]
    assert cause.level == "problem" and "every 10 steps" in cause.evidence[0]


def back_to_slow_weights(loop, number):
    """Lookahead: slow weights take half of the way at every fifth step, and the fast ones start from there."""
    with torch.no_grad():
        loop.slow = getattr(loop, "slow", None) or [w.clone() for w in loop.online.parameters()]
        if number % 5 == 4:
            for slow, weight in zip(loop.slow, loop.online.parameters(), strict=True):
                weight.copy_(slow.lerp_(weight, 0.3))


@pytest.mark.parametrize("after", [Average(restores=True), back_to_slow_weights])
def test_an_average_that_is_only_lent_and_slow_weights(tmp_path, after):
    assert "weights-state-error/average-stays" not in run_taped(tmp_path, after)
