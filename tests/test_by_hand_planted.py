"""Every planted slip in a script that updates by hand is named with its line; see `gradproof scoreboard`."""

import os
import subprocess
import sys

import pytest

from gradproof.diagnosis.ranking import diagnose
from gradproof.experiments.table import BY_NAME, find
from gradproof.faults.by_hand import FAULTS
from gradproof.faults.fault import plant
from gradproof.instruments.evidence import Evidence
from gradproof.tape.label import find_specimens
from gradproof.tape.specimen import load

QUESTIONS = (
    "does_the_optimizer_hold_everything",
    "is_the_update_the_textbooks",
    "is_the_gradient_right",
    "is_the_loss_the_right_way_up",
)
WHOLE = ("lr-schedule-error",)  # what only a whole run shows


def watched(source, directory, *options):
    (directory / "train.py").write_text(source)
    command = [sys.executable, "-m", "gradproof", "run", "--quiet", "--examine", "off", "--out", "run"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(
        [*command, *options, "train.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return directory / "run"


def ask(run, steps):
    """The first cause that a question about updates confirms on some taped steps, and where."""
    for name in QUESTIONS:
        memory = {}
        for path in find_specimens(run):
            specimen = load(path)
            verdicts = find(BY_NAME[name])(Evidence(specimen, memory)) if specimen.step in steps else ()
            for verdict in verdicts:
                if verdict.id:
                    return verdict.id, verdict.where
    return "nothing", ""


def test_there_are_twelve_or_more_in_five_kinds_of_script():
    assert len(FAULTS) >= 12 and len({fault.script for fault in FAULTS}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_slip_is_named_with_its_line(fault, tmp_path):
    source = plant(fault)
    if fault.family in WHOLE:
        cause = diagnose(watched(source, tmp_path, "--no-experiments")).causes[0]
        id, where = cause.id, cause.where
    else:
        id, where = ask(watched(source, tmp_path, "--steps", "12"), steps=(1, 3, 4, 10))
    assert id.partition("/")[0] in (fault.family, *fault.also)
    number = int(where.partition("train.py:")[2].partition(")")[0])
    named = f"{where} {source.splitlines()[number - 1]}"
    assert any(piece in named for piece in fault.where), named
