"""Which steps are measured: sentences are understood or refused, and a budget is kept."""

import os

import pytest

from gradproof.errors import UserError
from gradproof.probes.distributed import RANKS_HERE
from gradproof.probes.pace import Pace
from gradproof.probes.schedule import (
    BARE,
    EVERYTHING,
    LIGHT,
    PARAMETERS,
    Moment,
    Purse,
    Rule,
    parse_budget,
    parse_schedule,
)


def depth_at(text, **moment):
    return max((rule.depth for rule in parse_schedule(text) if rule.applies(Moment(**moment))), default=None)


def test_every_tenth_step():
    assert parse_schedule("every 10th step") == (Rule(EVERYTHING, every=10),)
    assert depth_at("parameters every 10 steps", step=20) == PARAMETERS
    assert depth_at("parameters every 10 steps", step=21) is None


def test_first_batch_of_some_epochs_on_one_rank():
    text = "first batch of epochs 1-5 and 8, rank 0"
    assert depth_at(text, step=900, epoch=8, batch=0, rank=0) == EVERYTHING
    for moment in ({"epoch": 6}, {"epoch": 8, "batch": 1}, {"epoch": 8, "rank": 1}):
        assert depth_at(text, step=900, **moment) is None


def test_from_the_first_nonfinite_value_on():
    text = "light every step; all, from the first non-finite value on"
    assert depth_at(text, step=5) == LIGHT
    assert depth_at(text, step=5, steps_since_nonfinite=0) == EVERYTHING


def test_ranges_and_lists_of_steps():
    text = "all steps 0-2, 7 and 100-101"
    assert [s for s in range(200) if depth_at(text, step=s)] == [0, 1, 2, 7, 100, 101]


@pytest.mark.parametrize("text", ["sometimes", "every banana", "all steps", "every 10th step maybe"])
def test_what_cannot_be_read_is_refused_with_examples(text):
    with pytest.raises(UserError, match="every 10th step"):
        parse_schedule(text)


def test_budgets():
    assert parse_budget("2%") == parse_budget("0.02") == 0.02
    for text in ("two", "-1%", "200%"):
        with pytest.raises(UserError, match="share of the wall time"):
            parse_budget(text)


@pytest.mark.parametrize("step_seconds", [0.0005, 0.005, 0.2])
def test_a_purse_keeps_its_budget(step_seconds):
    purse, elapsed, prices = Purse(0.02), 0.0, (0.00001, 0.0003, 0.004, 0.008, 0.02)
    depths = []
    while elapsed < 60:
        depth = purse.choose(len(depths), elapsed)
        purse.pay(depth, prices[depth])
        depths.append(depth)
        elapsed += step_seconds + prices[depth]
    unavoidable = 0.00001 * len(depths) + 3 * 0.02
    assert purse.spent <= 0.02 * elapsed + Purse.GRACE + unavoidable + 0.02
    assert depths[:3] == [EVERYTHING] * 3
    assert EVERYTHING in depths[len(depths) // 2 :]  # deep looks go on for ever
    if step_seconds == 0.2:
        assert BARE not in depths


@pytest.mark.parametrize("step_seconds", [0.0003, 0.002, 0.02])
def test_what_cannot_be_afforded_before_a_time_is_not_asked_for_before_it(step_seconds):
    """The same depths, whether a purse is asked at every step or not."""
    prices = (0.0001, 0.0003, 0.004, 0.008, 0.02)

    def depths(waits):
        purse, elapsed, asked, found = Purse(0.02), 0.0, 0, []
        for step in range(20_000):
            known = waits and elapsed < purse.bare_until
            asked += not known
            depth = BARE if known else purse.choose(step, elapsed)
            purse.pay(depth, prices[depth])
            found.append(depth)
            elapsed += step_seconds + prices[depth]
        return found, asked

    each, often = depths(waits=False)
    same, seldom = depths(waits=True)
    assert same == each and often == 20_000 and seldom < (10_000 if step_seconds < 0.001 else 20_001)


@pytest.mark.parametrize("rules, close", [((), True), (parse_schedule("light every step"), False)])
def test_after_a_nonfinite_value_a_few_steps_are_measured_whole_unless_rules_say_what(rules, close):
    pace = Pace(rules, None, rank=0)
    pace.purse.pay(EVERYTHING, 100.0)  # nothing deep is affordable
    assert pace.open_step(9, 0, 9).depth <= LIGHT
    pace.nonfinite_step = 10
    depths = [pace.open_step(step, 0, step).depth for step in range(10, 17)]
    assert [depth == EVERYTHING for depth in depths] == [close] * 5 + [False] * 2


@pytest.mark.parametrize("budget, passed", [(0.01, True), (None, False)])
def test_only_under_a_budget_that_was_asked_for_is_a_step_passed_over(budget, passed):
    pace = Pace((), budget, rank=0)
    pace.pay(10, LIGHT, own_seconds=100.0)
    assert not pace.must_pass_over(Purse.FIRST - 1)
    assert pace.must_pass_over(10) == passed


@pytest.mark.parametrize(
    "told, world, cores, share",
    [
        ({}, 1, 2, 0.02),
        ({}, 4, 2, 0.01),  # a script that starts its ranks itself
        ({"LOCAL_WORLD_SIZE": "4"}, 64, 2, 0.01),
        ({"LOCAL_WORLD_SIZE": "8"}, 64, 96, 0.02),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 8, 8, 0.02),
    ],
)
def test_ranks_that_share_a_core_share_what_watching_may_cost(monkeypatch, told, world, cores, share):
    for name in RANKS_HERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert Pace((), None, 0, world).purse.budget == share
    assert Pace((), 0.05, 0, world).purse.budget == 0.05, "what was asked for is kept"


def deep_steps(price, keeps_time, steps=20_000, each=0.01):
    """Which steps are measured whole by a purse that pays so much for one."""
    purse, elapsed, found = Purse(0.02), 0.0, []
    purse.keeps_time = keeps_time
    for step in range(steps):
        depth = purse.choose(step, elapsed)
        spent = price if depth > LIGHT else 0.0001
        purse.pay(depth, spent)
        elapsed += each + spent
        found += [step] if depth > LIGHT else []
    assert purse.spent <= 0.02 * elapsed + Purse.GRACE + 4 * price
    return set(found)


@pytest.mark.parametrize("other", [0.0101, 0.013, 0.017])
def test_ranks_that_hold_parts_of_one_model_look_closely_at_the_same_steps(other):
    """Each by its own purse, and nobody asks another."""
    one, two = deep_steps(0.01, True), deep_steps(other, True)
    assert len(one) > 100 and len(one & two) >= 0.7 * min(len(one), len(two))
    alone, beside = deep_steps(0.01, False), deep_steps(other, False)
    assert len(one) > 0.9 * len(alone) and len(alone & beside) < 0.3 * len(beside)
