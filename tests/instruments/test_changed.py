"""What is different about the batches of now: planted changes are named, and batches as they come are not."""

import numpy as np
import pytest

from gradproof.instruments.changed import find_changes


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
