"""What is different about the batches of now: planted changes are named, and batches as they come are not."""

import numpy as np
import pytest
import torch

import gradproof
from gradproof.errors import UserError
from gradproof.instruments.changed import columns_of, find_changes
from gradproof.record.writer import RunWriter


def draw(generator, rows=256, shift=0.0, drift=0):
    """Ids with what belongs to them, a region, two features; `drift`: from this id on, one region counts otherwise."""
    item = (200 * generator.random(rows) ** 3).astype(int)
    brand = (item * 7919) % 23  # of each item
    region = generator.integers(0, 4, rows)
    item = item + np.where((region == 2) & (item >= 3), drift, 0)
    features = generator.normal(size=(rows, 2)) + np.array([0, shift])
    columns = np.column_stack([item, brand, region, features]).astype(float)
    return {f"input[:, {place}]": columns[:, place] for place in range(columns.shape[1])}


def tables(seed, count=4, **how):
    generator = np.random.default_rng(seed)
    return [draw(generator, **how) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_batches_as_they_come_have_not_changed(seed):
    assert not find_changes(tables(seed), tables(seed + 100))


def test_a_column_that_has_moved():
    (found,) = find_changes(tables(0), tables(1, shift=1.0))
    assert found.column == "input[:, 4]" and "before" in found.text and found.share > 0.3


def test_ids_that_mean_something_else_in_one_region():
    first, *_ = find_changes(tables(0, 8), tables(1, 8, drift=1))
    assert first.column == "input[:, 0]" and "input[:, 1]" in first.text
    assert "100 % have 2 in input[:, 2]" in first.text


def test_a_few_numbers_that_never_came_before():
    late = tables(1)
    for table in late:
        table["input[:, 4]"][:3] = 50.0
    (found,) = find_changes(tables(0), late)
    assert "of 1024 samples lie where none" in found.text and " to 50, before" in found.text


def test_numbers_that_are_no_longer_finite():
    late = tables(1)
    for table in late:
        table["input[:, 3]"][5:9] = np.nan
    (found,) = find_changes(tables(0), late)
    assert found.column == "input[:, 3]" and "NaN" in found.text


def test_data_that_come_in_order_differ_all_the_time():
    """Of a sorted table every batch differs from the one before: that is no change."""
    generator = np.random.default_rng(0)
    steps = [{"input": generator.normal(size=256) + (place % 4)} for place in range(16)]
    assert not find_changes(steps[:8], steps[8:])


def columns(value):
    return dict(columns_of(torch.as_tensor(value)))


def series(generator, stuck=False, axis=-1):
    """Four sensors over 20 moments, which wander; the last of them may say the same again and again."""
    values = generator.normal(size=(48, 20, 4)).cumsum(1)
    if stuck:
        values[:, 12:, 3] = values[:, 12:13, 3]
    return columns(np.moveaxis(values, -1, axis))


@pytest.mark.parametrize("axis, name", [(-1, "[..., 3]"), (1, "[:, 3]")])
def test_a_sensor_that_is_stuck(axis, name):
    generator = np.random.default_rng(0)
    early = [series(generator, axis=axis) for _ in range(6)]
    found = find_changes(early, [series(generator, True, axis) for _ in range(3)])
    assert found[0].column == f"{name} repeated"
    assert not any("repeated" in each.column for each in find_changes(early, [series(generator, axis=axis)]))


def test_one_number_that_is_far_outside_of_all_before():
    late = tables(1)
    late[0]["input[:, 3]"][7] = 1.75e5
    first, *_ = find_changes(tables(0), late)
    assert first.far and first.column == "input[:, 3]" and "1 of 1024 samples lie far outside" in first.text


def texts(generator, count=12, without=(), topics=1):
    """Words by Zipf's law; of several topics, each batch has words of its own."""
    found = []
    for _ in range(count):
        words = (400 * generator.random((16, 80)) ** 3).astype(int)
        words += 400 * int(generator.integers(topics))
        found.append(columns(np.where(np.isin(words, without), 401, words)))
    return found


def test_words_that_do_not_come_any_more():
    generator = np.random.default_rng(0)
    found = find_changes(texts(generator), texts(generator, without=range(100, 120)))
    assert any(each.column == " ids" and "more often 401" in each.text for each in found)


@pytest.mark.parametrize("topics", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_words_as_they_come_have_not_changed(seed, topics):
    generator = np.random.default_rng(seed)
    found = find_changes(texts(generator, topics=topics), texts(generator, topics=topics))
    assert " ids" not in [each.column for each in found]


def test_steps_that_were_given_something_else_are_left_out():
    """The first step of an epoch has no state that was carried on."""
    generator = np.random.default_rng(0)
    assert find_changes([{"other": np.zeros(9)}, *tables(0)], tables(1, shift=1.0))
    assert texts(generator)[0].keys() == columns(np.zeros((4, 80), int)).keys()


def test_where_no_step_was_recorded_that_is_said(tmp_path):
    RunWriter(tmp_path / "run", {}).close()
    with pytest.raises(UserError, match="no step was recorded"):
        gradproof.open(tmp_path / "run").ask("changed")
