"""TrainCheck's silent errors as small trainings: named with the place where they are planted, silent where repaired."""

import re

import pytest
from silent_errors import ERRORS, diagnose

from gradproof.faults.scoreboard import names_place

NAMED = [error for error in ERRORS if error.family]


def test_all_eighteen_are_planted_and_fourteen_have_a_name():
    assert len(ERRORS) == 18 and len(NAMED) >= 14
    for error in ERRORS:
        assert error.source(faulty=True) != error.source(faulty=False)


@pytest.mark.slow
@pytest.mark.parametrize("error", NAMED, ids=lambda error: error.name)
def test_an_error_is_named_first_with_its_place(error, tmp_path):
    causes, source = diagnose(error, True, tmp_path, *error.options)
    assert causes and causes[0]["family"] == error.family, causes[:2]
    assert causes[0]["level"] in ("problem", "warning")
    assert names_place(error.where, causes[0], source), causes[0]


@pytest.mark.slow
@pytest.mark.parametrize("error", NAMED, ids=lambda error: error.name)
def test_a_repaired_training_is_left_alone(error, tmp_path):
    causes, _ = diagnose(error, False, tmp_path, *error.options)
    assert not [cause for cause in causes if cause["level"] != "note"]
    assert not re.search(r"gradproof.*(failed|stopped)", (tmp_path / "log.txt").read_text())
