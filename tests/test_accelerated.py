"""The trainings for an accelerator: every edit applies, gives nothing away and still runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradproof.faults.accelerated import FAULTS, HEALTHY, SCRIPTS, TRAININGS, Planted, Sound, plant
from gradproof.faults.catalogue import FAULTS as FIRST_FAULTS

FAMILIES = {fault.family for fault in FIRST_FAULTS}  # test_faults.py holds these to be all there are
GIVE_AWAY = r"\b(?:bug|buggy|wrong|broken|fault|mistake|incorrect|oops|fixme|todo|hack|healthy|gradproof)\b"


def by_name(case):
    return case.name


def test_there_are_enough_and_they_have_names_of_their_own():
    assert len(SCRIPTS) >= 16 and len(FAULTS) >= 34 and len(HEALTHY) >= 16
    assert len({fault.family for fault in FAULTS}) >= 20
    names = [case.name for case in (*FAULTS, *HEALTHY)]
    assert sorted(set(names)) == sorted(names)
    assert sorted(SCRIPTS) == sorted(path.stem for path in TRAININGS.glob("*.py"))


def test_families_are_known():
    for fault in FAULTS:
        assert {fault.family, *fault.also} <= FAMILIES
        assert fault.family not in fault.also


@pytest.mark.parametrize("case", [*FAULTS, *HEALTHY], ids=by_name)
def test_edits_apply_once_compile_and_give_nothing_away(case):
    source = plant(case)
    compile(source, case.script, "exec")
    plain = (TRAININGS / f"{case.script}.py").read_text()
    assert (source != plain) == bool(case.edits)
    assert re.findall(GIVE_AWAY, source, flags=re.IGNORECASE) == []


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.place], ids=by_name)
def test_a_place_is_a_line_of_the_planted_source(fault):
    hits = [line for line in plant(fault).splitlines() if re.search(fault.place, line)]
    assert hits
    assert len(hits) < 30  # a pattern that fits everything names nothing


def test_an_edit_that_does_not_occur_exactly_once_is_refused():
    missing = Planted("lr-too-high/x", "vae_conv", "", (("no such text", ""),))
    twice = Sound("x", "vae_conv", (("torch", "numpy"),))
    for case in (missing, twice):
        with pytest.raises(ValueError, match="not once"):
            plant(case)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_training_runs_on_one_core(script):
    environment = {**os.environ, "SMALL": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(TRAININGS) / f"{script}.py"), "--steps", "3"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    result = json.loads(run.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result.keys() >= {"first", "last", "seconds", "peak_bytes", "weights"}
